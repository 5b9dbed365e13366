"""Tokens -> protocol events of Chat Completions, Responses and Messages, by deepseek-recipe.

The recipe draws tool-call ids at random and stamps chunks with the clock; both are rewritten
here, because a restarted stream must continue the same objects. Usage is ours: the recipe does
not count the end token, nor tokens whose bytes never completed a character, and counts reasoning
by encoding its text.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import deepseek_recipe as dr
import msgspec

from deepmesh.wire.messages import FinishReason, PromptLogprobs
from services.tokenizer.prompt_logprobs import PromptField
from services.tokenizer.reasoning import ReasoningCount
from services.tokenizer.stop_text import StopText
from services.tokenizer.text_stream import Token, clamp_logprob
from services.tokenizer.text_template import TextTemplate

Event = dict[str, Any]  # Any: the recipe's JSON, of which we touch a few known places
Chunk = dr.ChatCompletionChunk | dr.ResponsesStreamEvent | dr.MessagesStreamEvent
Generator = dr.ChatCompletionChunkGenerator | dr.ResponsesChunkGenerator | dr.MessagesChunkGenerator
Answer = dr.ChatCompletionResponse | dr.ResponsesResponse | dr.MessagesResponse

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.encode


class Stored(NamedTuple):
    """What a stored response repeats of its request, and keeps beside its answer."""

    keeps: bool
    previous: str  # id of the response that it continues; may be empty
    items: list[Any]  # the whole input, that of earlier responses included
    background: bool = False


class Frame(NamedTuple):
    """What stays the same over all events of one answer."""

    protocol: str
    id: str
    model: str
    created_s: int
    stream: bool
    seed: int = 0  # that the output follows from
    usage_chunk: bool = False
    usage_each: bool = False
    metadata: dict[str, Any] | None = None  # the client's labels, which Responses repeat
    choice: int = 0
    is_part: bool = False  # other choices share the stream: its end and its usage are not ours
    stored: Stored | None = None  # of a response


class RecipeStream:
    """Text state of one request in one of the recipe's protocols."""

    def __init__(
        self,
        frame: Frame,
        generator: Generator,
        parsing: dr.ParsingOptions,
        tokenizer: dr.Tokenizer,
        *,
        prompt_tokens: int,
        silent_ids: frozenset[int],
        logprobs: bool,
        now_s: Callable[[], int],
        hidden_ids: frozenset[int] = frozenset(),
        stop_text: StopText | None = None,
        reasoning: ReasoningCount | None = None,
        prompt: PromptField | None = None,
    ) -> None:
        self.stopped = False
        self.fingerprint = ""
        self.usage: Event = {}  # of a chat, once it has ended
        self.head: Event = {}  # what all chunks of a chat have in common
        self.response: Event | None = None  # of a response: the latest state that was told
        self._stop_text = stop_text  # None: stop strings are no part of the text
        self._reasoning = reasoning  # None: the output begins behind it, or there is none
        self._prompt = prompt  # None: its log-probabilities are no part of the answer
        self._stop = ""  # the stop string that ended it and is to be shown
        self._channel = "content"  # what the latest text was
        self._frame = frame
        self._processor = dr.StreamProcessor(generator, parsing, tokenizer)
        self._prompt_tokens = prompt_tokens
        self._silent_ids = silent_ids  # end and stop ids: counted, never shown
        self._hidden_ids = hidden_ids  # control tokens: the same, and they may be reasoning
        self._logprobs = logprobs
        is_plain = stop_text is None and not logprobs and not frame.usage_each
        self._template = TextTemplate() if is_plain else None  # None: events depend on more
        self._now_s = now_s
        self._answer: Answer | None = None
        self._completion_tokens = 0
        self._call_ids: dict[str, str] = {}
        self._body = b""

    def take_prompt(self, found: PromptLogprobs) -> None:
        if self._prompt is not None:
            self._prompt.take(found)

    def start(self, cached_tokens: int) -> list[bytes]:
        if not self._frame.stream:
            self._answer = _new_answer(self._frame, self._prompt_tokens, cached_tokens)
        usage = dr.PromptUsage(
            prompt_tokens=self._prompt_tokens, prompt_cache_hit_tokens=cached_tokens
        )
        return self._emit(self._processor.push(dr.InferenceChunk.ready(prompt_usage=usage)))

    def push(self, token: Token) -> list[bytes]:
        self._completion_tokens += 1
        if token.id in self._silent_ids:
            return []
        if self._reasoning is not None:
            self._reasoning.push(token.id)
        if token.id in self._hidden_ids:
            return []
        logprobs = [_logprob_pair(token)] if self._logprobs else None
        chunks = self._processor.push(dr.InferenceChunk.tokens([token.id], logprobs))
        self.stopped = self._processor.finished
        if self._stop_text is not None:
            self._stop_text.push(token.id)
            self._stop = self._stop_text.found() if self.stopped else ""
        return self._emit(chunks)

    def push_ids(self, ids: Sequence[int]) -> tuple[int, list[bytes]]:
        """`push` for tokens without logprobs, one by one; how many it took, up to the one that
        completes a stop string, and the events of all of them."""
        events: list[bytes] = []
        template = self._template
        if template is None or self._answer is not None:
            for count, token in enumerate(ids, 1):
                events += self.push(Token(token))
                if self.stopped:
                    return count, events
            return len(ids), events
        silent, hidden, reasoning = self._silent_ids, self._hidden_ids, self._reasoning
        push, made_of, processor = self._processor.push, dr.InferenceChunk.tokens, self._processor
        plain = template.event
        for count, token in enumerate(ids, 1):
            self._completion_tokens += 1
            if token in silent:
                continue
            if reasoning is not None and not reasoning.is_over:
                reasoning.push(token)
            if token in hidden:
                continue
            chunks = push(made_of([token]))
            if len(chunks) == 1 and (event := plain(chunks[0].to_json())) is not None:
                events.append(event)
            elif chunks:
                events += self._emit(chunks)
            if processor.finished:
                self.stopped = True
                return count, events
        return len(ids), events

    def finish(self, reason: FinishReason) -> list[bytes]:
        events: list[bytes] = []
        if not self.stopped:
            length = reason is FinishReason.LENGTH
            why = dr.InferenceFinishReason.Length if length else dr.InferenceFinishReason.Stop
            events += self._emit(self._processor.push(dr.InferenceChunk.finish(why)))
        events += self._emit(self._processor.finish())
        self._processor.close()
        if self._answer is not None:
            body = _decode(self._answer.to_json())
            self._patch_answer(body)
            self._body = _encode(body)
        elif self._frame.protocol == "chat" and not self._frame.is_part:
            events.append(b"data: [DONE]\n\n")
        return events

    def body(self) -> bytes:
        return self._body

    def _emit(self, chunks: list[Any]) -> list[bytes]:
        if self._answer is not None:
            for chunk in chunks:
                self._answer.accumulate(chunk)
            return []
        match self._frame.protocol:
            case "chat":
                patch = self._chat_events
            case "responses":
                patch = self._responses_events
            case _:
                patch = self._messages_events
        events: list[bytes] = []
        for chunk in chunks:
            text = chunk.to_json()
            event = self._template.event(text) if self._template is not None else None
            if event is not None:
                events.append(event)
                continue
            made = patch(_decode(text))
            if self._template is not None and len(made) == 1:
                self._template.learn(text, made[0])
            events += made
        return events

    # ------------------------------------------------------------ chat

    def _chat_events(self, chunk: Event) -> list[bytes]:
        """One chunk; the last one's usage becomes a chunk of its own, or nothing."""
        chunk["created"] = self._frame.created_s
        chunk["system_fingerprint"] = self.fingerprint or None
        final = chunk.pop("usage", None)
        choice = chunk["choices"][0]
        choice["index"] = self._frame.choice
        for call in choice["delta"].get("tool_calls") or ():
            if "id" in call:
                call["id"] = self._call_id(call["id"])
        if self._frame.usage_chunk:
            chunk["usage"] = self._chat_usage({}) if self._frame.usage_each else None
        events = [_sse(chunk)]
        if self._stop_text is not None:
            events = [*self._shown_stop(chunk), *events]
        if final is not None:
            self.usage, self.head = self._chat_usage(final), chunk
            if self._frame.usage_chunk and not self._frame.is_part:
                events.append(_sse({**chunk, "choices": [], "usage": self.usage}))
        return events

    def _shown_stop(self, chunk: Event) -> list[bytes]:
        """A chunk with the stop string before the one with the finish reason."""
        choice = chunk["choices"][0]
        for channel in ("reasoning_content", "content"):
            if choice["delta"].get(channel):
                self._channel = channel
        if not self._stop or choice.get("finish_reason") is None:
            return []
        delta, self._stop = {self._channel: self._stop}, ""
        shown = {**choice, "delta": delta, "finish_reason": None, "logprobs": None}
        return [_sse({**chunk, "choices": [shown]})]

    def _chat_usage(self, usage: Event) -> Event:
        self._correct_reasoning(usage.get("completion_tokens_details"))
        return {
            **usage,
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "seed": self._frame.seed,
        }

    # ------------------------------------------------------------ responses

    def _responses_events(self, event: Event) -> list[bytes]:
        if "response" in event:
            self._patch_response(event["response"])
        if "item" in event:
            self._patch_item(event["item"])
        return [_sse(event, event["type"])]

    def _patch_response(self, response: Event) -> None:
        response["created_at"] = self._frame.created_s
        response["system_fingerprint"] = self.fingerprint or None
        if self._frame.metadata is not None:
            response["metadata"] = self._frame.metadata
        if response.get("completed_at") is not None:
            response["completed_at"] = max(self._now_s(), self._frame.created_s)
        for item in response["output"]:
            self._patch_item(item)
        if self._frame.stored is not None:
            response["store"] = self._frame.stored.keeps
            response["background"] = self._frame.stored.background
            response["previous_response_id"] = self._frame.stored.previous or None
            self.response = response
        if response["usage"] is not None:
            total = self._prompt_tokens + self._completion_tokens
            response["usage"]["output_tokens"] = self._completion_tokens
            response["usage"]["total_tokens"] = total
            self._correct_reasoning(response["usage"].get("output_tokens_details"))
            response["usage"]["seed"] = self._frame.seed

    def _patch_item(self, item: Event) -> None:
        if "call_id" in item:
            item["call_id"] = self._call_id(item["call_id"])

    # ------------------------------------------------------------ messages

    def _messages_events(self, event: Event) -> list[bytes]:
        if event["type"] == "content_block_start":
            self._patch_block(event["content_block"])
        elif event["type"] == "message_delta":
            event["usage"]["output_tokens"] = self._completion_tokens
            event["usage"]["seed"] = self._frame.seed
        return [_sse(event, event["type"])]

    def _patch_block(self, block: Event) -> None:
        if block["type"] == "tool_use":
            block["id"] = self._call_id(block["id"])

    # ------------------------------------------------------------ all

    def _patch_answer(self, body: Event) -> None:
        match self._frame.protocol:
            case "chat":
                body["system_fingerprint"] = self.fingerprint or None
                choice = body["choices"][0]
                choice["index"] = self._frame.choice
                message = choice["message"]
                for call in message.get("tool_calls") or ():
                    call["id"] = self._call_id(call["id"])
                if self._stop:
                    channel = "content" if message.get("content") else "reasoning_content"
                    message[channel] = (message.get(channel) or "") + self._stop
                body["usage"] = self.usage = self._chat_usage(body["usage"])
                if self._prompt is not None:
                    body["prompt_logprobs"] = self._prompt.value()
            case "responses":
                self._patch_response(body)
            case _:
                for block in body["content"]:
                    self._patch_block(block)
                body["usage"]["output_tokens"] = self._completion_tokens
                body["usage"]["seed"] = self._frame.seed

    def _correct_reasoning(self, details: Event | None) -> None:
        if details is not None and self._reasoning is not None:
            details["reasoning_tokens"] = self._reasoning.tokens

    def _call_id(self, drawn: str) -> str:
        """The same call has the same id after a restart: hash of (answer, index of the call)."""
        if drawn not in self._call_ids:
            index = len(self._call_ids)
            answer = (
                f"{self._frame.id}.{self._frame.choice}" if self._frame.choice else self._frame.id
            )
            digest = hashlib.blake2b(f"{answer}/{index}".encode(), digest_size=12)
            self._call_ids[drawn] = f"call_{digest.hexdigest()}"
        return self._call_ids[drawn]


def _new_answer(frame: Frame, prompt_tokens: int, cached_tokens: int) -> Answer:
    kinds = {
        "chat": dr.ChatCompletionResponse,
        "responses": dr.ResponsesResponse,
        "messages": dr.MessagesResponse,
    }
    return kinds[frame.protocol](
        frame.id, frame.model, frame.created_s, prompt_tokens, cached_tokens
    )


def _logprob_pair(token: Token) -> tuple[float, list[tuple[int, float]]]:
    best = [(other, clamp_logprob(logprob)) for other, logprob in token.top]
    return clamp_logprob(token.logprob if token.logprob is not None else math.nan), best


def _sse(event: Event, name: str = "") -> bytes:
    data = _encode(event)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data) if name else b"data: %b\n\n" % data
