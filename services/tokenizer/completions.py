"""Our own /v1/completions: a raw prompt, no template."""

from typing import Any, NamedTuple

import msgspec

from deepmesh.wire.messages import FinishReason, Grammar, PromptLogprobs
from services.tokenizer.detokenize import Detokenizer, StopMatcher
from services.tokenizer.grammar import read_constraint
from services.tokenizer.length import Room
from services.tokenizer.model import BOS, Model
from services.tokenizer.normalize import Limits, check_fields, check_model
from services.tokenizer.prompt_logprobs import PromptField, scored_tokens
from services.tokenizer.reading import Json, boolean, is_array, kind_of, stop_strings, token_ids
from services.tokenizer.refusal import Refusal
from services.tokenizer.sampling import MAX_CHOICES, Settings, read_settings
from services.tokenizer.text_stream import Token, clamp_logprob
from services.tokenizer.vocabulary import Vocabulary

DEFAULT_MAX_TOKENS = 16  # OpenAI's

_encode = msgspec.json.encode


class CompletionRequest(NamedTuple):
    """A checked body."""

    model: str
    prompts: list[list[int]]  # token ids of each
    settings: Settings
    stops: list[str]
    stream: bool
    echo: bool
    grammar: Grammar | None = None

    @property
    def num_choices(self) -> int:
        """Of all prompts together."""
        return len(self.prompts) * self.settings.n


def read_completion(body: Json, limits: Limits, model: Model, room: Room) -> CompletionRequest:
    """Check every field and encode the prompt.

    Raises:
        Refusal: the first thing wrong with it.
    """
    name = check_model(body, limits.models)
    given = check_fields("completions", body)
    stream, echo = boolean(given, "stream"), boolean(given, "echo")
    settings = read_settings("completions", given, model.vocab_size, stream=stream)
    if settings.max_tokens is None:
        settings = settings._replace(max_tokens=DEFAULT_MAX_TOKENS)
    stops = stop_strings(given, "stop", limits.max_stops)
    special = boolean(given, "add_special_tokens", True)
    prompts = read_prompts(given.get("prompt"), model, add_bos=special, room=room)
    grammar = read_constraint("completions", given, {}, thinking=False).grammar
    request = CompletionRequest(name, prompts, settings, stops, stream, echo, grammar)
    if request.num_choices > MAX_CHOICES:
        raise Refusal(
            f"`prompt` and `n` make {request.num_choices} choices; at most {MAX_CHOICES} are "
            "allowed.",
            "n" if settings.n > 1 else "prompt",
        )
    return request


def read_prompts(
    prompt: object, model: Model, *, add_bos: bool, room: Room | None = None
) -> list[list[int]]:
    """Ids of each prompt: a string, ids, or a list of strings or of lists of ids."""
    if is_array(prompt) and prompt and (isinstance(prompt[0], str) or is_array(prompt[0])):
        if len(prompt) > MAX_CHOICES:
            raise Refusal(
                f"`prompt` holds {len(prompt)} prompts; at most {MAX_CHOICES} are allowed.",
                "prompt",
            )
        many = len(prompt) > 1
        return [
            read_prompt(
                each, model, add_bos=add_bos, room=room, param=f"prompt[{i}]" if many else "prompt"
            )
            for i, each in enumerate(prompt)
        ]
    return [read_prompt(prompt, model, add_bos=add_bos, room=room)]


def read_prompt(
    prompt: object,
    model: Model,
    *,
    add_bos: bool,
    room: Room | None = None,
    param: str = "prompt",
) -> list[int]:
    """Ids of one prompt: a string or ids.

    What cannot fit into `room` is refused unencoded.
    """
    if prompt is None:
        raise Refusal(f"`{param}` is missing.", param)
    if isinstance(prompt, str):
        if room is not None:
            room.check(prompt, param)
        ids = model.tokenizer.encode(prompt)  # special tokens may be spelled: the template is
        # the user's; and the model has seen every text begin with its BOS token
        return [model.bos_id, *ids] if add_bos and not prompt.startswith(BOS) else ids
    if not is_array(prompt):
        kind = kind_of(prompt)
        raise Refusal(f"`{param}` must be a string or a list of token ids, not {kind}.", param)
    if not prompt:
        raise Refusal(f"`{param}` is empty.", param)
    return token_ids(prompt, param, model.vocab_size)


class CompletionStream:
    """Text state of one choice of a completion."""

    def __init__(
        self,
        request: CompletionRequest,
        vocabulary: Vocabulary,
        rid: bytes,
        created_s: int,
        silent_ids: frozenset[int],
        *,
        index: int = 0,
        seed: int = 0,
    ) -> None:
        self.stopped = False
        self.fingerprint = ""
        self._seed = seed
        self.usage: Json = {}  # once it has ended
        self._index = index
        self._prompt_ids = request.prompts[index // request.settings.n]
        self._prompt_field: PromptField | None = None
        if request.settings.prompt_logprobs >= 0 and not index % request.settings.n:
            num_top = request.settings.prompt_logprobs
            self._prompt_field = PromptField(self._prompt_ids, num_top, vocabulary)
        self._prompt_json: Json = {}  # once it has ended
        self._is_part = request.num_choices > 1  # the end of the stream is not ours
        self._finish_reason = ""
        self._request = request
        self._vocabulary = vocabulary
        self._silent_ids = silent_ids  # end, stop and control ids: counted, never shown
        self._detokenizer = Detokenizer(vocabulary)
        # The output may end a character that the prompt has begun, with 3 bytes at most.
        known = self._prompt_ids if request.echo else self._prompt_ids[-3:]
        self._echo = self._detokenizer.push_all(known)
        self._stops = StopMatcher(request.stops, keep=request.settings.stop_in_text)
        self._cached_tokens = 0
        self._completion_tokens = 0
        self.head: Json = {
            "id": f"cmpl-{rid.hex()}",
            "object": "text_completion",
            "created": created_s,
            "model": request.model,
        }
        self._prompt: list[Token] = []  # with logprobs, from the second on
        self._offset = 0  # characters of the echo
        self._waiting: list[tuple[int, Token]] = []  # (offset, token): their text is held back
        self._length = 0  # characters of the output decoded so far
        self._sent = 0  # characters of the output sent so far
        self._parts: list[str] = []
        self._logprobs = _empty_logprobs()

    def start(self, cached_tokens: int) -> list[bytes]:
        self._cached_tokens = cached_tokens
        self.head["system_fingerprint"] = self.fingerprint or None
        if not self._request.echo:
            return []
        text, logprobs = self._echo, None
        if self._request.settings.n_logprobs >= 0:
            logprobs = self._describe_prompt()
        self._offset = len(text)
        return self._send(text, logprobs)

    def take_prompt(self, found: PromptLogprobs) -> None:
        if self._prompt_field is not None:
            self._prompt_field.take(found)
        if (most := self._request.settings.n_prompt_logprobs) >= 0:
            scored = scored_tokens(self._prompt_ids, found)
            self._prompt = [token._replace(top=token.top[:most]) for token, _ in scored]

    def _describe_prompt(self) -> dict[str, list[Any]]:
        """The first token has no logprob: nothing comes before it."""
        out, at, known = _empty_logprobs(), 0, [Token(self._prompt_ids[0]), *self._prompt]
        detokenizer = Detokenizer(self._vocabulary)
        for token in known:
            self._describe(token, at, out)
            at += len(detokenizer.push(token.id))
        out["token_logprobs"][0] = out["top_logprobs"][0] = None
        return out

    def push(self, token: Token) -> list[bytes]:
        self._completion_tokens += 1
        if token.id in self._silent_ids:
            return []
        self._waiting.append((self._length, token))
        text = self._detokenizer.push(token.id)
        self._length += len(text)
        safe = self._stops.push(text)
        self.stopped = self._stops.found
        return self._emit(safe) if safe else []

    def finish(self, reason: FinishReason) -> list[bytes]:
        self._finish_reason = "length" if reason is FinishReason.LENGTH else "stop"
        if self.stopped:
            self._finish_reason = "stop"
            self._waiting = [(at, token) for at, token in self._waiting if at < self._sent]
        events = self._emit(self._stops.flush(), self._finish_reason)
        self.usage = self._usage_json()
        if self._prompt_field is not None:
            self._prompt_json = {"prompt_logprobs": self._prompt_field.value()}
        if not self._request.stream:
            return []
        if self._is_part:
            return events
        if self._request.settings.usage_chunk:
            events.append(_sse({**self.head, "choices": [], "usage": self.usage}))
        return [*events, b"data: [DONE]\n\n"]

    def body(self) -> bytes:
        choice = {
            "index": self._index,
            "text": "".join(self._parts),
            "logprobs": self._logprobs if self._request.settings.n_logprobs >= 0 else None,
            "finish_reason": self._finish_reason,
            **self._prompt_json,
        }
        return _encode({**self.head, "choices": [choice], "usage": self.usage})

    def _emit(self, text: str, finish_reason: str | None = None) -> list[bytes]:
        """Send text of the output, and with it the logprobs of the tokens that it completes."""
        self._sent += len(text)
        last = finish_reason is not None
        logprobs = _empty_logprobs()
        while self._waiting and (last or self._waiting[0][0] < self._sent):
            at, token = self._waiting.pop(0)
            self._describe(token, at, logprobs)
        return self._send(text, logprobs, finish_reason)

    def _send(
        self, text: str, logprobs: Json | None, finish_reason: str | None = None
    ) -> list[bytes]:
        wanted = self._request.settings.n_logprobs >= 0
        if not self._request.stream:
            self._parts.append(text)
            for key, values in (logprobs or {}).items():
                self._logprobs[key] += values
            return []
        choice = {
            "index": self._index,
            "text": text,
            "logprobs": logprobs if wanted else None,
            "finish_reason": finish_reason,
        }
        chunk = {**self.head, "choices": [choice]}
        if self._request.settings.usage_chunk:
            each = self._request.settings.usage_each
            chunk["usage"] = self._usage_json() if each else None
        return [_sse(chunk)]

    def _describe(self, token: Token, at: int, out: dict[str, list[Any]]) -> None:
        name = self._vocabulary.name_of
        out["tokens"].append(name(token.id))
        out["token_logprobs"].append(clamp_logprob(token.logprob or 0.0))
        best = {name(other): clamp_logprob(logprob) for other, logprob in token.top}
        out["top_logprobs"].append(best)
        out["text_offset"].append(self._offset + at)

    def _usage_json(self) -> Json:
        prompt, completion = len(self._prompt_ids), self._completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
            "seed": self._seed,
        }


def _empty_logprobs() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _sse(event: Json) -> bytes:
    return b"data: %b\n\n" % _encode(event)
