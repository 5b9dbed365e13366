"""deepseek-recipe's side: normalised body -> conversation -> prompt ids, and the event stream.

Its objects can be neither pickled nor copied, so conversion and streaming of a request live in
this process.
"""

import re
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import deepseek_recipe as dr
import msgspec

from deepmesh.wire.messages import ErrorCode, SamplingParams
from services.tokenizer.events import Frame, RecipeStream, Stored
from services.tokenizer.length import Room
from services.tokenizer.normalize import Normal
from services.tokenizer.prompt_logprobs import PromptField
from services.tokenizer.reading import Json, is_array
from services.tokenizer.reasoning import ReasoningCount
from services.tokenizer.refusal import Refusal
from services.tokenizer.sampling import MAX_TOKENS_BOUND, Settings
from services.tokenizer.stop_text import StopText
from services.tokenizer.vocabulary import MARKER, THINK, Vocabulary

Request = dr.ChatCompletionRequest | dr.ResponsesRequest | dr.MessagesRequest

_REQUESTS: dict[str, type[Request]] = {
    "chat": dr.ChatCompletionRequest,
    "responses": dr.ResponsesRequest,
    "messages": dr.MessagesRequest,
    "count_tokens": dr.MessagesRequest,
}
_ID_PREFIXES = {"chat": "chatcmpl-", "responses": "resp_", "messages": "msg_"}
_REASONING = (
    dr.ThinkingInitialStage.ReasoningStart,
    dr.ThinkingInitialStage.ReasoningContinuation,
)
_MAIN_FIELDS = {"responses": "input"}  # where the conversation is; messages otherwise


class Conversation(NamedTuple):
    """A converted request; the recipe's objects stay inside."""

    protocol: str
    request: dr.ConversationRequest
    prompt_ids: list[int]
    echo: dr.ResponsesEcho | None
    tool_map: dict[str, tuple[str, str]]


class Recipe:
    """The library with one model's tokenizer and names. Safe to use from several threads."""

    def __init__(
        self,
        tokenizer: dr.Tokenizer,
        vocabulary: Vocabulary,
        models: tuple[str, ...],
        *,
        thinking: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._encoding = dr.DeepseekV41Encoding().with_tokenizer(self._tokenizer)
        self._options = dr.ConversionOptions(
            default_thinking_mode=thinking,
            responses_web_search=dr.WebSearchBehavior.Reject,
            thinking_max_tokens_upper_bound=MAX_TOKENS_BOUND,
            non_thinking_max_tokens_upper_bound=MAX_TOKENS_BOUND,
        ).with_model_versions_by_name(dict.fromkeys(models, dr.ModelVersion.DeepseekV41Flash))

    def convert(
        self, protocol: str, body: Json, room: Room | None = None, *, prefill: str = ""
    ) -> Conversation:
        """Convert and encode a normalised body.

        Args:
            room: what cannot fit into it is refused unencoded.
            prefill: text with which the answer begins; the prompt ends in it.
        Raises:
            Refusal: the recipe refuses it; names the field where the recipe's text allows.
        """
        kind = _REQUESTS[protocol]
        raw = msgspec.json.encode(body)
        try:
            request = kind(raw)
            echo, tool_map = None, dict[str, tuple[str, str]]()
            if isinstance(request, dr.ResponsesRequest):
                echo, tool_map = request.echo(), request.namespace_tool_map(self._options)
            conversation = request.convert(self._options)
        except dr.ConversionError as error:
            raise _converted_refusal(protocol, error) from error
        except ValueError as error:
            raise Refusal(_clean(str(error)), _blame(protocol, body)) from error
        talk = conversation.conversation
        if prefill:
            talk = _continued(talk, prefill)
        try:
            if room is not None and room.may_exceed(len(raw)):
                text = self._encoding.render_conversation(talk).prompt
                room.check(text, _MAIN_FIELDS.get(protocol, "messages"))
            ids = self._encoding.encode(talk)
        except RuntimeError as error:  # a special token is missing in tokenizer.json
            raise Refusal(str(error), code=ErrorCode.INTERNAL) from error
        return Conversation(protocol, conversation, ids, echo, tool_map)

    def stream(
        self,
        conversation: Conversation,
        normal: Normal,
        rid: bytes,
        created_s: int,
        *,
        silent_ids: frozenset[int],
        now_s: Callable[[], int],
        seed: int = 0,
        choice: int | None = None,
        stop_text: StopText | None = None,
        stored: Stored | None = None,
    ) -> RecipeStream:
        """The text state of a converted request; of one of its choices, if that has a number."""
        protocol, request, settings = conversation.protocol, conversation.request, normal.settings
        frame = Frame(
            protocol=protocol,
            id=response_id(protocol, rid),
            model=normal.model,
            created_s=created_s,
            stream=normal.stream,
            seed=seed,
            usage_chunk=settings.usage_chunk,
            usage_each=settings.usage_each,
            metadata=normal.metadata,
            choice=choice or 0,
            is_part=choice is not None,
            stored=stored,
        )
        match protocol:
            case "chat":
                generator = dr.ChatCompletionRequest.chunk_generator(request, frame.id, frame.model)
            case "responses":
                generator = dr.ResponsesRequest.chunk_generator(request, frame.id, frame.model)
                if conversation.tool_map:
                    generator = generator.with_namespace_tool_map(conversation.tool_map)
                if conversation.echo is not None:
                    generator = generator.with_echo(conversation.echo)
            case _:
                generator = dr.MessagesRequest.chunk_generator(request, frame.id, frame.model)
        return RecipeStream(
            frame,
            generator,
            request.parsing_options,
            self._tokenizer,
            prompt_tokens=len(conversation.prompt_ids),
            silent_ids=silent_ids,
            logprobs=settings.n_logprobs >= 0,
            now_s=now_s,
            hidden_ids=self._hidden_ids(request.parsing_options),
            stop_text=stop_text,
            reasoning=self._reasoning(request.parsing_options),
            prompt=PromptField(conversation.prompt_ids, settings.prompt_logprobs, self._vocabulary)
            if settings.prompt_logprobs >= 0 and not choice
            else None,
        )

    def _hidden_ids(self, parsing: dr.ParsingOptions) -> frozenset[int]:
        """Control tokens, and the marks that are none at this place: the recipe would take them for
        text."""
        marks = (THINK,) if parsing.parse_tool_calls else (THINK, MARKER)
        return self._vocabulary.control_ids | self._vocabulary.added_ids(marks)

    def _reasoning(self, parsing: dr.ParsingOptions) -> ReasoningCount | None:
        if parsing.starts_in_tool_calls or parsing.thinking_initial_stage not in _REASONING:
            return None
        return ReasoningCount(self._vocabulary, parses_calls=parsing.parse_tool_calls)


def response_id(protocol: str, rid: bytes) -> str:
    """The name of an answer, which tells its protocol and holds its request's id."""
    return _ID_PREFIXES[protocol] + rid.hex()


def _continued(talk: dr.Conversation, prefill: str) -> dr.Conversation:
    """The same conversation with the beginning of an answer behind it."""
    return dr.Conversation(
        [*talk.messages, dr.AssistantMessage(prefill, prefix=True)],
        thinking_mode=talk.thinking_mode,
        tools=talk.tools,
        tool_choice=talk.tool_choice,
        reasoning_effort=talk.reasoning_effort,
    )


def deepseek_sampling(conversation: Conversation, settings: Settings) -> SamplingParams:
    """thinking_sampling = "deepseek": the recipe's temperature and top_p, as its publisher does."""
    options = conversation.request.inference_options
    return msgspec.structs.replace(
        settings.sampling,
        temperature=_rounded(options.temperature),
        top_p=_rounded(options.top_p),
    )


def _rounded(value: float | None) -> float:
    """The library's floats are 32 bits wide: 0.95 comes out as 0.949999988."""
    return 1.0 if value is None else round(value, 6)


# ---------------------------------------------------------------- errors


_HINTS = (
    # what the recipe says, and the field it means
    (re.compile(r"^Invalid (?:value for )?'?([a-z_]+)'? value"), ""),
    (re.compile(r"^Invalid '([a-z_]+(?:\[\d+\])?)'"), ""),
    (re.compile(r"tool_choice|'tool_call'"), "tool_choice"),
    (re.compile(r"response_format"), "response_format"),
    (re.compile(r"^\.?(messages\[\d+\])"), ""),
    (re.compile(r"[Ii]nput items|input messages|role 'tool'|tool_call_id|^messages"), "messages"),
    (re.compile(r"schema|tool|function", re.IGNORECASE), "tools"),
)


def _converted_refusal(protocol: str, error: dr.ConversionError) -> Refusal:
    try:
        text = str(msgspec.json.decode(error.body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        text = error.body
    for pattern, name in _HINTS:
        if found := pattern.search(text):
            param = name or found.group(1)
            if param == "messages":
                param = _MAIN_FIELDS.get(protocol, param)
            return Refusal(text, param)
    return Refusal(text)


def _blame(protocol: str, body: Json) -> str:
    """The field at whose type the recipe stumbles. Every part of a large body is parsed a few
    times at most: a bad request must not cost more than a good one."""
    main = _MAIN_FIELDS.get(protocol, "messages")
    alone: Json = {"model": body["model"], main: body.get(main)}
    items: object = alone[main]
    if not _parses(protocol, alone):
        if not is_array(items):
            return main
        bad = bisect_left(  # the shortest beginning that fails ends with the culprit
            range(len(items)),
            True,
            key=lambda at: not _parses(protocol, {**alone, main: items[: at + 1]}),
        )
        return f"{main}[{bad}]" if bad < len(items) else main
    short: Json = {**alone, main: items[:1] if is_array(items) else items}
    for name, value in body.items():
        if name not in alone and not _parses(protocol, {**short, name: value}):
            return name
    return main


def _parses(protocol: str, body: Json) -> bool:
    try:
        _REQUESTS[protocol](msgspec.json.encode(body))
    except ValueError:
        return False
    return True


def _clean(text: str) -> str:
    return text.removeprefix("invalid request body: ").removeprefix("invalid JSON request: ")
