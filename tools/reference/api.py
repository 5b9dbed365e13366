"""docs/api.md from services/tokenizer/fields.py."""

import json
from collections.abc import Iterator, Mapping

from services.tokenizer.fields import PROTOCOLS, QUERIES, How, Rule
from tools.reference.source import code, table

_INTRO = """# API fields

Every field of every protocol, and what becomes of it. Nothing is silently ignored: a field that is
not listed is refused with its name (HTTP 400), and so is a refused one unless its value means
nothing. A null counts as absent. The normaliser reads the same table.

- *honoured*: it does what its protocol says it does.
- *no influence*: accepted, because it changes no answer.
- *refused*: only the listed values are accepted.

Other endpoints: `GET /v1/models`, `GET /v1/models/{id}`, `DELETE /v1/responses/{id}`,
`POST /v1/responses/{id}/cancel`, `GET /health`, `/ping`, `/openapi.json`, `/ready`, `/version`,
`/metrics`, `/load`; on the admin port `GET /admin/status`, `POST /admin/drain`, `/admin/resume`,
`/admin/flush_cache`, `/admin/log_level` (`level`).

Stored responses need a kvstore (`kvstore.count`) and last `tokenizer.response_ttl_s`; any tokenizer
serves them, to the API key that made them. One that runs cannot be deleted: cancel it first. With
`background` a response is answered as soon as it is kept, with status `queued`, and runs on its
own; its status says `in_progress`, then `completed`, `incomplete`, `failed` or `cancelled`.
Cancelling one twice is no error.

Images, audio and files are refused in messages. A failure within a stream is an event of its
protocol: `data: {"error": ...}` in chats and completions, then the end without `[DONE]`;
`event: error` in responses and messages.

Control tokens of the model (`<｜User｜>`, `<｜ref｜>`, ...) within an answer are counted in its
usage and skipped in its text and logprobs, as `skip_special_tokens` does elsewhere. Completions
keep `<think>`, `</think>` and `｜DSML｜` in the text, for clients that parse them, and end at a
control token that is a stop string; the other protocols make reasoning and calls of the marks.
"""
_ROUTES = {
    "chat": "POST /v1/chat/completions",
    "responses": "POST /v1/responses",
    "messages": "POST /v1/messages",
    "count_tokens": "POST /v1/messages/count_tokens",
    "completions": "POST /v1/completions",
    "tokenize": "POST /tokenize",
    "detokenize": "POST /detokenize",
    "response": "GET /v1/responses/{id}",
    "response_items": "GET /v1/responses/{id}/input_items",
}
_FATES = {How.HINT: "no influence", How.REFUSED: "refused"}


def api_page() -> str:
    """The whole page."""
    lines = [_INTRO.rstrip()]
    for name, rules in {**PROTOCOLS, **QUERIES}.items():
        if name not in _ROUTES:
            continue  # without parameters
        lines += ["", f"## {_ROUTES[name]}", ""]
        same = next((n for n, other in PROTOCOLS.items() if other is rules and n != name), None)
        if same is not None and list(PROTOCOLS).index(same) < list(PROTOCOLS).index(name):
            lines += [f"As {_ROUTES[same]}."]
            continue
        rows = [
            [code(path), _FATES.get(rule.how, "honoured"), _values(rule), rule.why]
            for path, rule in sorted(_flat(rules), key=lambda item: _order(item[1]))
        ]
        lines += table(
            ["parameter" if name in QUERIES else "field", "", "accepted values", "note"], rows
        )
    return "\n".join(lines) + "\n"


def _flat(rules: Mapping[str, Rule], prefix: str = "") -> Iterator[tuple[str, Rule]]:
    """Fields, and the keys inside of them, by path."""
    for name, rule in rules.items():
        yield prefix + name, rule
        if rule.inside is not None:
            yield from _flat(rule.inside, f"{prefix}{name}.")


def _order(rule: Rule) -> int:
    return {How.HINT: 1, How.REFUSED: 2}.get(rule.how, 0)


def _values(rule: Rule) -> str:
    if rule.how is not How.REFUSED and not rule.neutral:
        return ""
    return ", ".join(code(json.dumps(value)) for value in (*rule.neutral, None))
