"""Sampling and limits as the raw body states them; the same fields in every protocol."""

from typing import NamedTuple

from deepmesh.wire.messages import SamplingParams
from services.tokenizer.reading import (
    Json,
    as_object,
    as_text,
    boolean,
    integer,
    kind_of,
    number,
    token_ids,
)
from services.tokenizer.refusal import Refusal

MAX_TOKENS_BOUND = 393_216  # of deepseek-recipe; more is a mistake, not a wish
MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1

_LIMIT_NAMES = {
    "chat": ("max_completion_tokens", "max_tokens"),
    "responses": ("max_output_tokens",),
    "messages": ("max_tokens",),
    "count_tokens": ("max_tokens",),
    "completions": ("max_tokens",),
}


class Settings(NamedTuple):
    """Everything about one generation but its prompt."""

    sampling: SamplingParams
    seed: int | None  # None: the gateway's
    max_tokens: int | None  # None: the configured default
    max_tokens_name: str
    min_tokens: int
    stop_token_ids: list[int]
    n_logprobs: int
    cache_salt: bytes
    usage_chunk: bool  # a last chunk with usage and no choices
    usage_each: bool  # usage so far on every chunk


def read_settings(protocol: str, body: Json, vocab_size: int, *, stream: bool) -> Settings:
    """Check and collect; the defaults are those of the protocols."""
    max_tokens, name = _max_tokens(protocol, body)
    min_tokens = integer(body, "min_tokens", 0, MAX_TOKENS_BOUND) or 0
    if max_tokens is not None and min_tokens > max_tokens:
        raise Refusal(
            f"`min_tokens` is {min_tokens}, more than `{name}`, {max_tokens}.", "min_tokens"
        )
    salt = body.get("cache_salt")
    has_usage_chunks = protocol in ("chat", "completions")
    usage_chunk, usage_each = (
        _usage_wishes(body, stream=stream) if has_usage_chunks else (False, False)
    )
    return Settings(
        sampling=_sampling(body, vocab_size),
        seed=integer(body, "seed", 0, MAX_SEED),
        max_tokens=max_tokens,
        max_tokens_name=name,
        min_tokens=min_tokens,
        stop_token_ids=_stop_token_ids(body, vocab_size),
        n_logprobs=_n_logprobs(protocol, body),
        cache_salt=as_text(salt, "cache_salt").encode() if salt is not None else b"",
        usage_chunk=usage_chunk,
        usage_each=usage_each,
    )


def _sampling(body: Json, vocab_size: int) -> SamplingParams:
    temperature = number(body, "temperature", 0.0, 2.0)
    top_p = number(body, "top_p", 0.0, 1.0, above=True)
    repetition = number(body, "repetition_penalty", 0.0, 10.0, above=True)
    return SamplingParams(
        temperature=1.0 if temperature is None else temperature,
        top_k=max(0, integer(body, "top_k", -1, 2**31 - 1) or 0),
        top_p=1.0 if top_p is None else top_p,
        min_p=number(body, "min_p", 0.0, 1.0) or 0.0,
        presence_penalty=number(body, "presence_penalty", -2.0, 2.0) or 0.0,
        frequency_penalty=number(body, "frequency_penalty", -2.0, 2.0) or 0.0,
        repetition_penalty=1.0 if repetition is None else repetition,
        logit_bias=_logit_bias(body, vocab_size),
        ignore_eos=boolean(body, "ignore_eos"),
    )


def _max_tokens(protocol: str, body: Json) -> tuple[int | None, str]:
    names = _LIMIT_NAMES[protocol]
    limits = [(integer(body, name, 1, MAX_TOKENS_BOUND), name) for name in names]
    given = [(limit, name) for limit, name in limits if limit is not None]
    return given[0] if given else (None, names[0])


def _n_logprobs(protocol: str, body: Json) -> int:
    """-1 none, 0 the sampled token's alone, k the k best too."""
    if protocol == "completions":
        most = integer(body, "logprobs", 0, MAX_LOGPROBS)
        return -1 if most is None else most
    best = integer(body, "top_logprobs", 0, MAX_LOGPROBS)
    if protocol == "responses":
        return best or -1
    if protocol != "chat":
        return -1
    if not boolean(body, "logprobs"):
        if best is not None:
            raise Refusal("`top_logprobs` needs `logprobs`: true.", "top_logprobs")
        return -1
    return best or 0


def _logit_bias(body: Json, vocab_size: int) -> list[tuple[int, float]]:
    value = body.get("logit_bias")
    if value is None:
        return []
    bias: list[tuple[int, float]] = []
    for key, amount in as_object(value, "logit_bias").items():
        param = f"logit_bias.{key}"
        if not (key.isascii() and key.isdigit()) or int(key) >= vocab_size:
            raise Refusal(f"`{param}`: keys are token ids, 0 to {vocab_size - 1}.", param)
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise Refusal(f"`{param}` must be a number, not {kind_of(amount)}.", param)
        if not -100 <= amount <= 100:
            raise Refusal(f"`{param}` is {amount}; it must be between -100 and 100.", param)
        bias.append((int(key), float(amount)))
    return sorted(bias)


def _stop_token_ids(body: Json, vocab_size: int) -> list[int]:
    value = body.get("stop_token_ids")
    return [] if value is None else token_ids(value, "stop_token_ids", vocab_size)


def _usage_wishes(body: Json, *, stream: bool) -> tuple[bool, bool]:
    value = body.get("stream_options")
    if value is None:
        return False, False
    options = as_object(value, "stream_options")
    if not stream:
        raise Refusal("`stream_options` needs `stream`: true.", "stream_options")
    for key in options:
        if key not in ("include_usage", "continuous_usage_stats", "include_obfuscation"):
            raise Refusal(f"`stream_options.{key}` is not known.", f"stream_options.{key}")
    if boolean(options, "include_obfuscation"):
        raise Refusal(
            "`stream_options.include_obfuscation`: chunks are not padded.",
            "stream_options.include_obfuscation",
        )
    chunk = boolean(options, "include_usage")
    return chunk, chunk and boolean(options, "continuous_usage_stats")
