"""What the check asks: one set of prompts, greedy and sampled, short and chunked."""

import functools
from dataclasses import dataclass
from pathlib import Path

import deepseek_recipe as dr
import numpy as np

from deepmesh.wire.messages import Generate, Grammar, SamplingParams
from deepmesh.wire.packed import pack_ids

LONGEST_PROMPT = 330
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Look up the {name} of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "traffic")
]
# Longer than any output of the check: the request ends by its length.
_GRAMMAR = Grammar("regex", "[a-z ]{600}")


@dataclass(frozen=True)
class Job:
    """One request, and what kind of one it is."""

    kind: str
    generate: Generate

    def message(self, number: int) -> Generate:
        """To be sent; `number` is not used twice."""
        from msgspec.structs import replace

        return replace(self.generate, rid=number.to_bytes(16, "little"))


_WARM = SamplingParams(temperature=0.8, top_p=0.9)
_KINDS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "nucleus": _WARM,
    "greedy, chunked": SamplingParams(temperature=0.0),
    "top-k, chunked": SamplingParams(temperature=1.0, top_k=40),
    "greedy, tools": SamplingParams(temperature=0.0),
    "penalties, tools": SamplingParams(
        temperature=0.9,
        min_p=0.02,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        repetition_penalty=1.1,
    ),
    "bias and bans": SamplingParams(
        temperature=1.3,
        logit_bias=[(700, 3.0), (701, -100.0)],
        bad_words=[pack_ids([702]), pack_ids([700, 703])],
    ),
    "second choice, chunked": SamplingParams(temperature=1.0, min_p=0.05),
}


def make_jobs(model: Path, count: int, tokens: int, *, has_masks: bool) -> list[Job]:
    """`count` requests of `tokens` output tokens each.

    Nothing but its length ends a request, so that all comparisons are equally long. Every third
    prompt that is chunked asks for the log-probabilities of its prompt, too.
    """
    return [_job(model, index, tokens, has_masks=has_masks) for index in range(count)]


def _job(model: Path, index: int, tokens: int, *, has_masks: bool) -> Job:
    kind = list(_KINDS)[index % len(_KINDS)]
    turn = index // len(_KINDS)
    ids = _prompt(model, kind, turn)
    masked = has_masks and kind in ("greedy, tools", "nucleus") and turn % 2 == 0
    return Job(
        f"{kind}, grammar" if masked else kind,
        Generate(
            rid=b"",
            attempt=0,
            reply_to="tokenizer-0",
            prompt_ids=pack_ids(ids),
            prompt_len=len(ids),
            sampling=_KINDS[kind],
            seed=1000 + index,
            sub_index=1 if kind.startswith("second") else 0,
            max_tokens=tokens,
            grammar=_GRAMMAR if masked else None,
            n_logprobs=5,
            n_prompt_logprobs=3 if "chunked" in kind and turn % 3 == 1 else -1,
        ),
    )


def _prompt(model: Path, kind: str, turn: int) -> list[int]:
    if "chunked" in kind:
        return _long_prompt(turn, _vocabulary(model))
    tools = _TOOLS[: 1 + turn % 2] if "tools" in kind else []
    return _rendered(model, f"What is {37 + 11 * turn} + {13 + 7 * turn}?", tools)


def _long_prompt(turn: int, vocab_size: int) -> list[int]:
    """Three families that share prefixes of whole chunks, with tails of their own."""
    family = np.random.default_rng(turn % 3).integers(600, vocab_size, LONGEST_PROMPT)
    draw = np.random.default_rng(100 + turn)
    tail = draw.integers(600, vocab_size, draw.integers(1, 40))
    length = int(draw.integers(140, LONGEST_PROMPT - len(tail)))
    return [*family[:length].tolist(), *tail.tolist()]


def _rendered(model: Path, question: str, tools: list[dict[str, object]]) -> list[int]:
    """A chat with thinking off, as the tokenizer service makes it."""
    body: dict[str, object] = {
        "model": "m",
        "messages": [{"role": "user", "content": question}],
        "thinking": {"type": "disabled"},
    }
    if tools:
        body["tools"] = tools
    return rendered(model, body)


def rendered(model: Path, body: dict[str, object]) -> list[int]:
    """Prompt ids of a Chat Completions request, as the tokenizer service makes them."""
    version = dr.ModelVersion.DeepseekV41Flash
    options = dr.ConversionOptions().with_model_alias("m", version)
    conversation = dr.ChatCompletionRequest(body).convert(options).conversation
    return list(_encoding(model).encode(conversation))


@functools.cache
def _encoding(model: Path) -> dr.DeepseekV41Encoding:
    tokenizer = dr.Tokenizer.from_file(str(model / "tokenizer.json"))
    return dr.DeepseekV41Encoding().with_tokenizer(tokenizer)


@functools.cache
def _vocabulary(model: Path) -> int:
    import json

    return int(json.loads((model / "config.json").read_text())["text_config"]["vocab_size"])
