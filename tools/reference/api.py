"""docs/api.md from services/tokenizer/fields.py."""

import json
from itertools import groupby

from services.tokenizer.fields import PROTOCOLS, How, Rule
from tools.reference.source import code, table

_INTRO = """# API fields

Every top-level field of every protocol, and what becomes of it. Nothing is silently ignored: a
field that is not listed is refused with its name, and so is a refused one unless its value means
nothing.
"""
_ROUTES = {
    "chat": "POST /v1/chat/completions",
    "responses": "POST /v1/responses",
    "messages": "POST /v1/messages",
    "count_tokens": "POST /v1/messages/count_tokens",
    "completions": "POST /v1/completions",
    "tokenize": "POST /tokenize",
    "detokenize": "POST /detokenize",
}
_GROUPS = {How.RECIPE: "used", How.OURS: "used", How.BOTH: "used"}


def api_page() -> str:
    """The whole page."""
    lines = [_INTRO.rstrip()]
    for name, rules in PROTOCOLS.items():
        lines += ["", f"## {_ROUTES[name]}", ""]
        same = next((n for n, other in PROTOCOLS.items() if other is rules and n != name), None)
        if same is not None and list(PROTOCOLS).index(same) < list(PROTOCOLS).index(name):
            lines += [f"As {_ROUTES[same]}."]
            continue
        lines += _fields(rules)
    return "\n".join(lines) + "\n"


def _fields(rules: dict[str, Rule]) -> list[str]:
    ordered = sorted(rules.items(), key=lambda item: _order(item[1]))
    lines: list[str] = []
    for what, group in groupby(ordered, key=lambda item: _GROUPS.get(item[1].how, "")):
        if what:
            used = list(group)
            lines += [f"Used: {', '.join(code(name) for name, _ in used)}.", ""]
            notes = [f"- {code(name)}: {rule.why}." for name, rule in used if rule.why]
            lines += [*notes, ""] if notes else []
            continue
        rows = [[code(name), _fate(rule), _values(rule), rule.why] for name, rule in group]
        lines += table(["field", "", "accepted values", "why"], rows)
    return lines


def _order(rule: Rule) -> int:
    return {How.HINT: 1, How.REFUSED: 2}.get(rule.how, 0)


def _fate(rule: Rule) -> str:
    return "no influence" if rule.how is How.HINT else "refused"


def _values(rule: Rule) -> str:
    if rule.how is How.HINT and not rule.neutral:
        return "any"
    return ", ".join(code(json.dumps(value)) for value in (*rule.neutral, None))
