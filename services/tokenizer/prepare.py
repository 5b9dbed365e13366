"""One submitted request -> either an answer at once, or a generation ready for a scheduler."""

import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from deepmesh.config import Config
from deepmesh.vocabulary import vocabulary_digest
from deepmesh.wire.messages import ErrorCode, Grammar, Ids, SamplingParams, Submit
from deepmesh.wire.packed import pack_ids
from services.tokenizer import answers, stored
from services.tokenizer.answers import Answer
from services.tokenizer.choices import Choice, Lane, Merge
from services.tokenizer.completions import CompletionStream, read_completion
from services.tokenizer.events import RecipeStream, Stored
from services.tokenizer.generation import Generation, Thinking
from services.tokenizer.grammar import starts_after
from services.tokenizer.jobs import Follow, Job, job_rid
from services.tokenizer.length import Room
from services.tokenizer.model import load_model
from services.tokenizer.normalize import Limits, normalise
from services.tokenizer.reading import Json, as_text, boolean, parse_object, stop_strings
from services.tokenizer.recipe import Recipe, deepseek_sampling, response_id
from services.tokenizer.refusal import Refusal
from services.tokenizer.sampling import Settings, check_prompt_logprobs
from services.tokenizer.stop_text import StopText
from services.tokenizer.store_orders import Wanted
from services.tokenizer.text_stream import TextStream
from services.tokenizer.vocabulary import THINK, THINK_END, USER

PROMPT_FIELD = {
    "chat": "messages",
    "responses": "input",
    "messages": "messages",
    "completions": "prompt",
}


class Preparer:
    """Everything that is the same for all requests. Safe to use from several threads."""

    def __init__(self, config: Config, now_s: Callable[[], int] = lambda: int(time.time())) -> None:
        self._model = load_model(Path(config.mesh.model))
        self.vocabulary = vocabulary_digest(Path(config.mesh.model))
        self.max_token_bytes = self._model.vocabulary.max_token_bytes
        self._settings = config.tokenizer
        self._models = (config.served_model, *config.mesh.aliases)
        self._recipe = Recipe(
            self._model.tokenizer,
            self._model.vocabulary,
            self._models,
            thinking=self._settings.default_thinking,
        )
        self._limits = Limits(
            models=self._models,
            vocab_size=self._model.vocab_size,
            max_stops=self._settings.max_stops,
            default_thinking=self._settings.default_thinking,
        )
        self._has_store = config.kvstore.count > 0
        self._now_s = now_s
        self._started_s = now_s()
        longest = config.scheduler.max_model_len or self._model.max_positions
        self.context = min(longest, self._model.max_positions)

    def prepare(
        self,
        submit: Submit,
        context: int,
        record: bytes | None = None,
        fingerprints: tuple[str, ...] = (),
    ) -> Generation | Answer | Wanted | Job | Follow:
        """Check, convert and encode.

        Args:
            context: tokens that prompt and output may have together, at present.
            record: of the response that is asked for; None: not looked up, empty: not there.
            fingerprints: of the engines that serve.
        Raises:
            Refusal: the request is at fault.
        """
        if submit.protocol == "models":
            names, since_s = self._models, self._started_s
            return answers.list_models(submit.body, names, context, since_s, fingerprints)
        if submit.protocol in stored.QUESTIONS:
            return stored.answer(submit.protocol, submit.body, record if self._has_store else b"")
        body = parse_object(submit.body)
        match submit.protocol:
            case "responses":
                return self._response(submit, body, context, record)
            case "chat" | "messages":
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

    def _response(
        self, submit: Submit, body: Json, context: int, record: bytes | None
    ) -> Generation | Wanted | Job:
        """A response, perhaps one that continues another one, perhaps one that is kept."""
        keeps = boolean(body, "store", self._has_store)
        background = boolean(body, "background")
        previous = as_text(body.get("previous_response_id") or "", "previous_response_id")
        wishes = {"store": keeps, "background": background, "previous_response_id": previous}
        for name, wish in wishes.items():
            if wish and not self._has_store:
                raise Refusal(f"`{name}`: this mesh has no kvstore to keep responses in.", name)
        if background and not keeps:
            raise Refusal("`store`: a background response is stored; leave it out.", "store")
        history: list[object] = []
        if previous:
            found = stored.find(previous, record, "previous_response_id")
            if isinstance(found, Wanted):
                return found
            if found.response["status"] in stored.ACTIVE:
                raise Refusal("`previous_response_id`: it still runs.", "previous_response_id")
            history = found.history
        items = [*history, *stored.input_items(body.get("input"))]
        if history and body.get("input") is not None:
            body = {**body, "input": items}
        keep = Stored(keeps, previous, items, background)
        run = submit
        if background:  # the response is not its request, which is answered at once
            run = msgspec.structs.replace(submit, rid=job_rid(submit.rid), body=b"", next_event=0)
        try:
            generation = self._recipe_generation(run, body, context, keep)
        except Refusal as refusal:
            refusal.param = _own_item(refusal.param, len(history))
            raise
        if not background:
            return generation
        id, created_s = response_id("responses", run.rid), run.created_s or self._now_s()
        head = stored.queued(id, generation.model, created_s, body)
        return Job(submit, run, generation, head, id)

    def _recipe_generation(
        self, submit: Submit, body: Json, context: int, keep: Stored | None = None
    ) -> Generation:
        normal = normalise(submit.protocol, body, self._limits)
        conversation = self._recipe.convert(
            submit.protocol, normal.body, self._room(context), prefill=normal.prefill
        )
        settings = normal.settings
        if self._settings.thinking_sampling == "deepseek":
            settings = settings._replace(sampling=deepseek_sampling(conversation, settings))
        thinking = self._thinking(settings) if normal.thinking else None
        stops = stop_strings(normal.given, "stop", self._limits.max_stops)

        def text_of(choice: int | None) -> RecipeStream:
            return self._recipe.stream(
                conversation,
                normal,
                submit.rid,
                submit.created_s or self._now_s(),
                silent_ids=self._silent_ids(settings),
                now_s=self._now_s,
                seed=_seed(submit, settings),
                choice=choice,
                stop_text=StopText(stops, self._model.vocabulary)
                if settings.stop_in_text
                else None,
                stored=keep,
            )

        generation = self._generation(
            submit,
            [conversation.prompt_ids],
            settings,
            text_of,
            context,
            stream=normal.stream,
            thinking=thinking,
        )
        if keep is not None and keep.keeps:
            generation = replace(generation, record=keep, model=normal.model)
        if normal.grammar is None:
            return generation
        marks = (self._model.vocabulary.special_id(mark) for mark in (THINK, THINK_END))
        grammar = starts_after(normal.grammar, conversation.prompt_ids, *marks)
        return _constrained(generation, grammar)

    def _completion(self, submit: Submit, body: Json, context: int) -> Generation:
        request = read_completion(body, self._limits, self._model, self._room(context))
        created_s = submit.created_s or self._now_s()
        vocabulary = self._model.vocabulary
        control = vocabulary.control_ids - vocabulary.added_ids(request.stops)
        silent = self._silent_ids(request.settings) | control

        def text_of(choice: int | None) -> CompletionStream:
            return CompletionStream(
                request,
                vocabulary,
                submit.rid,
                created_s,
                silent,
                index=choice or 0,
                seed=_seed(submit, request.settings),
            )

        generation = self._generation(
            submit, request.prompts, request.settings, text_of, context, stream=request.stream
        )
        return _constrained(generation, request.grammar)

    def _thinking(self, settings: Settings) -> Thinking | None:
        """A budget that the whole answer cannot exceed needs no stage of its own."""
        budget, limit = settings.think_budget, settings.max_tokens
        if budget is None or (limit is not None and budget >= limit):
            return None
        end_id = self._model.vocabulary.special_id(THINK_END)
        stops = {end_id, *self._model.eos_ids, *settings.stop_token_ids}
        return Thinking(budget, end_id, pack_ids(sorted(stops)))

    def _without(self, settings: Settings) -> SamplingParams:
        """Bad words as the ids that would spell them, at the beginning of a word and within one."""
        if not settings.bad_words:
            return settings.sampling
        encode = self._model.tokenizer.encode
        spelled = [encode(text) for word in settings.bad_words for text in (word, f" {word}")]
        ids = dict.fromkeys(pack_ids(found) for found in spelled)
        return msgspec.structs.replace(settings.sampling, bad_words=list(ids))

    def _room(self, context: int) -> Room:
        return Room(context, self.max_token_bytes)

    def _silent_ids(self, settings: Settings) -> frozenset[int]:
        return self._model.eos_ids.union(settings.stop_token_ids)

    def _generation(
        self,
        submit: Submit,
        prompts: list[list[int]],
        settings: Settings,
        text_of: Callable[[int | None], Choice],
        context: int,
        *,
        stream: bool,
        thinking: Thinking | None = None,
    ) -> Generation:
        """One generation, or one for each choice of each prompt under one that merges them."""
        check_prompt_logprobs(prompts, settings)
        count = len(prompts) * settings.n
        if count == 1 and thinking is None:
            alone = self._shared(submit, prompts[0], settings, context, text_of(None))
            return replace(alone, stream=stream)
        lanes = [Lane(text_of(index if count > 1 else None)) for index in range(count)]
        merge = Merge(lanes, settings.n, stream=stream, usage=settings.usage_chunk)
        shared = [self._shared(submit, ids, settings, context, merge) for ids in prompts]
        choices = [
            replace(
                shared[index // settings.n],
                text=lane,
                sub_index=index % settings.n,
                thinking=thinking,
                n_prompt_logprobs=shared[index // settings.n].n_prompt_logprobs
                if index % settings.n == 0
                else settings.n_prompt_logprobs,
            )
            for index, lane in enumerate(lanes)
        ]
        prompt_len = sum(map(len, prompts))
        return replace(shared[0], prompt_len=prompt_len, stream=stream, choices=tuple(choices))

    def _shared(
        self,
        submit: Submit,
        prompt_ids: list[int],
        settings: Settings,
        context: int,
        text: TextStream,
    ) -> Generation:
        """What all choices of a prompt have in common."""
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
            sampling=self._without(settings),
            seed=_seed(submit, settings),
            stop_ids=pack_ids(sorted({*ends, *settings.stop_token_ids})),
            max_tokens=min(wish, room),
            min_tokens=settings.min_tokens,
            n_logprobs=settings.n_logprobs,
            n_prompt_logprobs=max(settings.n_prompt_logprobs, settings.prompt_logprobs),
            salt=_salt(submit.tenant_salt, settings.cache_salt),
            stream=False,
            text=text,
            stand_back=settings.stand_back,
            marks=self._marks(prompt_ids),
            field_names={
                "prompt": PROMPT_FIELD[submit.protocol],
                "max_tokens": settings.max_tokens_name,
            },
        )

    def _marks(self, prompt_ids: list[int]) -> Ids:
        """Where the first question begins: the system prompt and its tools lie before it."""
        users = self._model.vocabulary.added_ids((USER,))
        return pack_ids([prompt_ids.index(user) for user in users if user in prompt_ids])


def _constrained(generation: Generation, grammar: Grammar | None) -> Generation:
    """The same with all its choices kept to a grammar."""
    choices = tuple(replace(choice, grammar=grammar) for choice in generation.choices)
    return replace(generation, grammar=grammar, choices=choices)


def _own_item(param: str, num_before: int) -> str:
    """Where the client finds the item at fault: in its own input, not in that of earlier ones."""
    found = re.match(r"input\[(\d+)\]", param)
    if found is None or int(found[1]) < num_before:
        return param
    return f"input[{int(found[1]) - num_before}]{param[found.end() :]}"


def _seed(submit: Submit, settings: Settings) -> int:
    """The client's, or the one that the gateway drew."""
    return submit.seed if settings.seed is None else settings.seed


def _salt(tenant: bytes, request: bytes) -> bytes:
    """Requests share cached prefixes only under equal salts."""
    if not request:
        return tenant
    return hashlib.blake2b(request, key=tenant[:64], digest_size=16).digest()
