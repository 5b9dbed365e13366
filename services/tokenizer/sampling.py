"""Sampling and limits as the raw body states them; the same fields in every protocol."""

from typing import NamedTuple

from deepmesh.wire.messages import Ids, SamplingParams
from deepmesh.wire.packed import pack_ids
from services.tokenizer.reading import (
    Json,
    as_list,
    as_object,
    as_text,
    boolean,
    integer,
    kind_of,
    number,
    stop_strings,
    token_ids,
)
from services.tokenizer.refusal import Refusal

MAX_TOKENS_BOUND = 393_216  # of deepseek-recipe; more is a mistake, not a wish
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 1 << 18  # in one answer: prompt tokens, each with its best ids
MAX_BAD_WORDS = 64
MAX_CHOICES = 128  # of one request: prompts times `n`
MAX_STAND_BACK = 1 << 20
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
    n_prompt_logprobs: int  # as n_logprobs, of a prompt that is echoed
    prompt_logprobs: int  # as n_logprobs, of a prompt that is not: a field of the answer
    cache_salt: bytes
    usage_chunk: bool  # a last chunk with usage and no choices
    usage_each: bool  # usage so far on every chunk
    n: int  # choices for each prompt
    stop_in_text: bool  # the stop string that ended the answer stays
    think_budget: int | None  # tokens of thinking
    stand_back: int  # how many levels below its key's priority
    bad_words: list[str]


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
        n_prompt_logprobs=_n_logprobs(protocol, body) if boolean(body, "echo") else -1,
        prompt_logprobs=_prompt_logprobs(body, stream=stream),
        cache_salt=as_text(salt, "cache_salt").encode() if salt is not None else b"",
        usage_chunk=usage_chunk,
        usage_each=usage_each,
        n=integer(body, "n", 1, MAX_CHOICES) or 1,
        stop_in_text=boolean(body, "include_stop_str_in_output"),
        think_budget=_think_budget(body),
        stand_back=integer(body, "priority", 0, MAX_STAND_BACK) or 0,
        bad_words=stop_strings(body, "bad_words", MAX_BAD_WORDS),
    )


def _think_budget(body: Json) -> int | None:
    """Anthropic's spelling lies inside `thinking`, vLLM's beside it."""
    thinking = as_object(body.get("thinking") or {}, "thinking")
    named = integer(
        {"thinking.budget_tokens": thinking.get("budget_tokens")},
        "thinking.budget_tokens",
        1,
        MAX_TOKENS_BOUND,
    )
    return named or integer(body, "thinking_token_budget", 1, MAX_TOKENS_BOUND)


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
        allowed_token_ids=_allowed(body, vocab_size),
    )


def _allowed(body: Json, vocab_size: int) -> Ids:
    value = body.get("allowed_token_ids")
    if value is None:
        return b""
    ids = token_ids(value, "allowed_token_ids", vocab_size)
    if not ids:
        raise Refusal(
            "`allowed_token_ids` is empty: nothing could be sampled.", "allowed_token_ids"
        )
    return pack_ids(sorted(set(ids)))


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
        is_included = _includes_logprobs(body)
        return best or (0 if is_included else -1)
    if protocol != "chat":
        return -1
    if not boolean(body, "logprobs"):
        if best is not None:
            raise Refusal("`top_logprobs` needs `logprobs`: true.", "top_logprobs")
        return -1
    return best or 0


def _prompt_logprobs(body: Json, *, stream: bool) -> int:
    most = integer(body, "prompt_logprobs", 0, MAX_LOGPROBS)
    if most is not None and stream:
        raise Refusal(
            "`prompt_logprobs` does not go with `stream`: chunks have no place for it.",
            "prompt_logprobs",
        )
    return -1 if most is None else most


def check_prompt_logprobs(prompts: list[list[int]], settings: Settings) -> None:
    """Refuse log-probabilities of prompts that would make too large an answer."""
    width = 1 + max(settings.n_prompt_logprobs, settings.prompt_logprobs)
    count = sum(map(len, prompts)) * settings.n * width
    if count > MAX_PROMPT_LOGPROBS:
        name = "prompt_logprobs" if settings.prompt_logprobs >= 0 else "logprobs"
        raise Refusal(
            f"`{name}`: the answer would hold {count} log-probabilities of prompt tokens; at most "
            f"{MAX_PROMPT_LOGPROBS} are allowed. Ask for fewer best ids, or with a shorter prompt.",
            name,
        )


def _includes_logprobs(body: Json) -> bool:
    """Responses ask for more by the names of parts of the answer."""
    names = as_list(body.get("include") or [], "include")
    for index, name in enumerate(names):
        if name not in ("message.output_text.logprobs", "reasoning.encrypted_content"):
            param = f"include[{index}]"
            raise Refusal(f"`{param}` {name!r} cannot be added to a response.", param)
    return "message.output_text.logprobs" in names


def _logit_bias(body: Json, vocab_size: int) -> list[tuple[int, float]]:
    value = body.get("logit_bias")
    if value is None:
        return []
    bias: list[tuple[int, float]] = []
    for key, amount in as_object(value, "logit_bias").items():
        param = f"logit_bias.{key}"
        if not (key.isascii() and key.isdigit() and len(key) < 20) or int(key) >= vocab_size:
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
    chunk = boolean(options, "include_usage")
    return chunk, chunk and boolean(options, "continuous_usage_stats")
