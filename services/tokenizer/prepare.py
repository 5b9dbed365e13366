"""One submitted request -> either an answer at once, or a generation ready for a scheduler."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deepmesh.config import Config
from deepmesh.vocabulary import vocabulary_digest
from deepmesh.wire.messages import ErrorCode, Ids, SamplingParams, Submit
from deepmesh.wire.packed import pack_ids
from services.tokenizer import answers
from services.tokenizer.answers import Answer
from services.tokenizer.completions import CompletionStream, read_completion
from services.tokenizer.length import Room
from services.tokenizer.model import load_model
from services.tokenizer.normalize import Limits, normalise
from services.tokenizer.reading import Json, parse_object
from services.tokenizer.recipe import Recipe, deepseek_sampling
from services.tokenizer.refusal import Refusal
from services.tokenizer.sampling import Settings
from services.tokenizer.text_stream import TextStream

PROMPT_FIELD = {
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
    "completions": "prompt",
}


@dataclass(frozen=True)
class Generation:
    """All that a scheduler needs, and the text state that its tokens go through."""

    prompt_ids: Ids
    prompt_len: int
    sampling: SamplingParams
    seed: int
    stop_ids: Ids
    max_tokens: int
    min_tokens: int
    n_logprobs: int
    salt: bytes
    stream: bool
    text: TextStream
    field_names: dict[str, str]  # of what a scheduler may find at fault, in the caller's protocol


class Preparer:
    """Everything that is the same for all requests. Safe to use from several threads."""

    def __init__(self, config: Config, now_s: Callable[[], int] = lambda: int(time.time())) -> None:
        self._model = load_model(Path(config.mesh.model))
        self.vocabulary = vocabulary_digest(Path(config.mesh.model))
        self.max_token_bytes = self._model.vocabulary.max_token_bytes
        self._settings = config.tokenizer
        self._models = (config.served_model, *config.mesh.aliases)
        self._recipe = Recipe(
            self._model.tokenizer, self._models, thinking=self._settings.default_thinking
        )
        self._limits = Limits(
            models=self._models,
            vocab_size=self._model.vocab_size,
            max_stops=self._settings.max_stops,
            default_thinking=self._settings.default_thinking,
        )
        self._now_s = now_s
        self._started_s = now_s()
        longest = config.scheduler.max_model_len or self._model.max_positions
        self.context = min(longest, self._model.max_positions)

    def prepare(self, submit: Submit, context: int) -> Generation | Answer:
        """Check, convert and encode.

        Args:
            context: tokens that prompt and output may have together, at present.
        Raises:
            Refusal: the request is at fault.
        """
        if submit.protocol == "models":
            return answers.list_models(submit.body, self._models, context, self._started_s)
        body = parse_object(submit.body)
        match submit.protocol:
            case "chat" | "responses" | "messages":
                return self._recipe_generation(submit, body, context)
            case "completions":
                return self._completion(submit, body, context)
            case "count_tokens":
                return answers.count_tokens(body, self._recipe, self._limits)
            case "tokenize":
                return answers.tokenize(body, self._recipe, self._limits, self._model, context)
            case "detokenize":
                return answers.detokenize(body, self._model.vocabulary, self._limits)
            case _:
                raise Refusal(f"Unknown protocol {submit.protocol!r}.", code=ErrorCode.INTERNAL)

    def _recipe_generation(self, submit: Submit, body: Json, context: int) -> Generation:
        normal = normalise(submit.protocol, body, self._limits)
        conversation = self._recipe.convert(submit.protocol, normal.body, self._room(context))
        settings = normal.settings
        if self._settings.thinking_sampling == "deepseek":
            settings = settings._replace(sampling=deepseek_sampling(conversation, settings))
        text = self._recipe.stream(
            conversation,
            normal,
            submit.rid,
            submit.created_s or self._now_s(),
            silent_ids=self._silent_ids(settings),
            now_s=self._now_s,
        )
        return self._generation(
            submit, conversation.prompt_ids, settings, text, context, stream=normal.stream
        )

    def _completion(self, submit: Submit, body: Json, context: int) -> Generation:
        request = read_completion(body, self._limits, self._model, self._room(context))
        created_s = submit.created_s or self._now_s()
        silent = self._silent_ids(request.settings)
        text = CompletionStream(request, self._model.vocabulary, submit.rid, created_s, silent)
        return self._generation(
            submit, request.prompt_ids, request.settings, text, context, stream=request.stream
        )

    def _room(self, context: int) -> Room:
        return Room(context, self.max_token_bytes)

    def _silent_ids(self, settings: Settings) -> frozenset[int]:
        return self._model.eos_ids.union(settings.stop_token_ids)

    def _generation(
        self,
        submit: Submit,
        prompt_ids: list[int],
        settings: Settings,
        text: TextStream,
        context: int,
        *,
        stream: bool,
    ) -> Generation:
        room = context - len(prompt_ids)
        if room < 1:
            raise Refusal(
                f"The prompt has {len(prompt_ids)} tokens; prompt and answer together may have "
                f"{context}. Shorten the prompt.",
                PROMPT_FIELD[submit.protocol],
                ErrorCode.TOO_LONG,
            )
        if settings.min_tokens > room:
            raise Refusal(
                f"`min_tokens` is {settings.min_tokens}; after the prompt of {len(prompt_ids)} "
                f"tokens there is room for {room}.",
                "min_tokens",
            )
        wish = settings.max_tokens or self._settings.default_max_tokens or room
        ends = () if settings.sampling.ignore_eos else self._model.eos_ids
        return Generation(
            prompt_ids=pack_ids(prompt_ids),
            prompt_len=len(prompt_ids),
            sampling=settings.sampling,
            seed=submit.seed if settings.seed is None else settings.seed,
            stop_ids=pack_ids(sorted({*ends, *settings.stop_token_ids})),
            max_tokens=min(wish, room),
            min_tokens=settings.min_tokens,
            n_logprobs=settings.n_logprobs,
            salt=_salt(submit.tenant_salt, settings.cache_salt),
            stream=stream,
            text=text,
            field_names={
                "prompt": PROMPT_FIELD[submit.protocol],
                "max_tokens": settings.max_tokens_name,
            },
        )


def _salt(tenant: bytes, request: bytes) -> bytes:
    """Requests share cached prefixes only under equal salts."""
    if not request:
        return tenant
    return hashlib.blake2b(request, key=tenant[:64], digest_size=16).digest()
