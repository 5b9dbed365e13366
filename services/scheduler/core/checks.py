"""Values that a `Generate` may hold: whoever sent it, a wrong one never reaches a queue."""

import math
from collections.abc import Iterator

from msgspec.structs import replace

from deepmesh.fingerprint import weights_of
from deepmesh.wire.messages import ErrorCode, Generate, SamplingParams
from deepmesh.wire.packed import unpack_ids

from .request import Request

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1


class Refusal(Exception):
    """A request that must not be queued; the text says what to do about it."""

    def __init__(
        self, code: ErrorCode, detail: str, param: str = "", retry_after_s: float = 0.0
    ) -> None:
        super().__init__(detail)
        self.code, self.detail, self.param, self.retry_after_s = code, detail, param, retry_after_s


def check_values(message: Generate) -> None:
    """What can be told without an engine.

    Raises:
        Refusal: with the field at fault.
    """
    for param, holds, must in (*_numbers(message), *_sampling(message.sampling)):
        if not holds:
            raise Refusal(ErrorCode.INVALID, f"{param} must {must}", param)


def check_grammar(message: Generate, *, has_masks: bool) -> Generate:
    """The request as the executors can serve it: a constraint needs masks.

    One of free text that may end in calls is a help, not a promise: it is left out without them.

    Raises:
        Refusal: they cannot keep an output to it.
    """
    if message.grammar is not None and not has_masks:
        if message.grammar.kind == "tools":
            return replace(message, grammar=None)
        detail = "the executors of this model cannot keep to a grammar: leave the grammar out"
        raise Refusal(ErrorCode.INVALID, detail, "grammar")
    return message


def check_engine(request: Request, fingerprint: str, replica: str) -> None:
    """An answer is of one model: its tokens so far must be of the weights that are loaded now.

    Raises:
        Refusal: they are of others; a replica that still has those may continue it.
    """
    if len(request.ids) * 4 <= len(request.generate.prompt_ids):
        return  # nothing has been answered yet
    known = request.fingerprint or request.generate.fingerprint
    if known and fingerprint and weights_of(known) != weights_of(fingerprint):
        detail = (
            f"this answer was begun by another model ({known}) than {replica} serves now "
            f"({fingerprint}); send the request again"
        )
        raise Refusal(ErrorCode.MISMATCH, detail, retry_after_s=1.0)


def check_tokens(message: Generate, vocabulary: str, replica: str) -> None:
    """The sender's ids must mean to the engine what they mean to the sender.

    Raises:
        Refusal: they do not.
    """
    if message.vocabulary and vocabulary and message.vocabulary != vocabulary:
        detail = (
            f"{replica} serves a model with another vocabulary ({vocabulary[:12]}) than the "
            f"tokenizer's ({message.vocabulary[:12]}); give both the same mesh.model"
        )
        raise Refusal(ErrorCode.MISMATCH, detail)


def check_vocabulary(message: Generate, stop_ids: frozenset[int], vocab_size: int) -> None:
    """Ids beside those of the prompt.

    Raises:
        Refusal: with the field at fault.
    """
    sampling = message.sampling
    allowed = unpack_ids(sampling.allowed_token_ids).tolist()
    bad = [unpack_ids(word).tolist() for word in sampling.bad_words]
    named = (
        ("stop_token_ids", stop_ids),
        ("logit_bias", [token for token, _ in sampling.logit_bias]),
        ("allowed_token_ids", allowed),
        ("bad_words", [token for word in bad for token in word]),
    )
    for param, ids in named:
        if any(not 0 <= token < vocab_size for token in ids):
            detail = f"{param}: token ids must lie in 0..{vocab_size - 1}"
            raise Refusal(ErrorCode.INVALID, detail, param)
    if allowed:
        banned = {word[0] for word in bad if len(word) == 1}
        if message.min_tokens:
            banned |= stop_ids
        if banned.issuperset(allowed):
            detail = "allowed_token_ids: bad_words and min_tokens leave no token to sample"
            raise Refusal(ErrorCode.INVALID, detail, "allowed_token_ids")


def _numbers(message: Generate) -> Iterator[tuple[str, bool, str]]:
    yield "max_tokens", message.max_tokens >= 1, "be at least 1"
    most = message.max_tokens
    yield "min_tokens", 0 <= message.min_tokens <= most, f"lie in 0..max_tokens, {most}"
    yield "seed", 0 <= message.seed <= MAX_SEED, "lie in 0..2**63-1"
    has_logprobs = -1 <= message.n_logprobs <= MAX_LOGPROBS
    yield "top_logprobs", has_logprobs, f"lie in -1..{MAX_LOGPROBS}"
    has_prompt_logprobs = -1 <= message.n_prompt_logprobs <= MAX_LOGPROBS
    yield "prompt_logprobs", has_prompt_logprobs, f"lie in -1..{MAX_LOGPROBS}"


def _sampling(sampling: SamplingParams) -> Iterator[tuple[str, bool, str]]:
    """Comparisons are written so that NaN fails them."""
    warmth = sampling.temperature
    yield "temperature", math.isfinite(warmth) and warmth >= 0, "be a finite number from 0 on"
    yield "top_k", sampling.top_k >= 0, "be 0 (off) or more"
    yield "top_p", 0 < sampling.top_p <= 1, "be above 0 and at most 1"
    yield "min_p", 0 <= sampling.min_p <= 1, "lie in 0..1"
    yield "presence_penalty", math.isfinite(sampling.presence_penalty), "be finite"
    yield "frequency_penalty", math.isfinite(sampling.frequency_penalty), "be finite"
    repetition = sampling.repetition_penalty
    yield "repetition_penalty", math.isfinite(repetition) and repetition > 0, "be above 0"
    lists = [sampling.allowed_token_ids, *sampling.bad_words]
    yield "allowed_token_ids", len(lists[0]) % 4 == 0, "be whole int32s"
    yield "bad_words", all(len(w) % 4 == 0 and w for w in lists[1:]), "hold whole int32s"
    is_finite = all(math.isfinite(amount) for _, amount in sampling.logit_bias)
    yield "logit_bias", is_finite, "hold finite numbers"


def check_probs(message: Generate, num_output: int) -> int:
    """How many confirmed tokens bring their log probabilities: all of them, or none.

    Raises:
        Refusal: some are missing.
    """
    logprobs, top_ids = message.confirmed_logprobs, message.confirmed_top_ids
    if not (logprobs or top_ids or message.confirmed_top_logprobs):
        return 0
    wide = 4 * max(0, message.n_logprobs)
    sizes = (len(logprobs), len(top_ids), len(message.confirmed_top_logprobs))
    if message.n_logprobs < 0 or sizes != (4 * num_output, *2 * (wide * num_output,)):
        detail = f"log probabilities of {sizes} bytes do not fit {num_output} confirmed tokens"
        raise Refusal(ErrorCode.INVALID, detail, "logprobs")
    return num_output
