"""Raw body -> what deepseek-recipe may see, and the settings that it would drop. Pure."""

from collections.abc import Mapping
from typing import NamedTuple

from deepmesh.wire.messages import ErrorCode, Grammar
from services.tokenizer import content
from services.tokenizer.fields import PROTOCOLS, QUERIES, How, Rule
from services.tokenizer.grammar import read_constraint
from services.tokenizer.reading import Json, as_object, boolean, is_object, kind_of, stop_strings
from services.tokenizer.refusal import Refusal
from services.tokenizer.sampling import Settings, read_settings


class Normal(NamedTuple):
    """A request whose every field has been accounted for."""

    body: Json  # for the recipe
    given: Json  # as it came, nulls left out
    settings: Settings
    model: str
    stream: bool
    thinking: bool  # the output begins with thinking
    prefill: str  # the beginning of the answer, in a protocol whose recipe knows no continuation
    metadata: Json | None
    grammar: Grammar | None  # that the answer has to keep to, once thinking is over


class Limits(NamedTuple):
    """What requests are checked against."""

    models: tuple[str, ...]  # names that clients may use; the first is the model's own
    vocab_size: int
    max_stops: int
    default_thinking: bool


def normalise(protocol: str, body: Json, limits: Limits) -> Normal:
    """Account for every field of a generating request.

    Raises:
        Refusal: the first thing wrong with it.
    """
    model = check_model(body, limits.models)
    given = check_fields(protocol, body)
    stream = boolean(given, "stream")
    settings = read_settings(protocol, given, limits.vocab_size, stream=stream)
    stop_strings(given, "stop" if protocol == "chat" else "stop_sequences", limits.max_stops)
    rules = PROTOCOLS[protocol]
    passed = {k: v for k, v in given.items() if rules[k].how in (How.RECIPE, How.BOTH)}
    prefill = ""
    match protocol:
        case "chat":
            _read_template(given, passed)
            if settings.max_tokens is not None:
                passed["max_tokens"] = settings.max_tokens
            if _continues(given):
                content.continue_last(passed)
            thinking = _thinks(passed, passed.get("reasoning_effort"), limits.default_thinking)
            content.check_chat(passed)
        case "responses":
            content.check_responses(passed)
            effort = as_object(passed.get("reasoning") or {}, "reasoning").get("effort")
            thinking = _thinks(passed, effort, limits.default_thinking)
        case _:
            effort = as_object(passed.get("output_config") or {}, "output_config").get("effort")
            thinking = _thinks(passed, effort, limits.default_thinking)
            content.check_messages(passed)
            prefill = content.take_prefill(passed)
            if prefill:
                thinking = _no_thinking(passed)
    metadata = as_object(given["metadata"], "metadata") if "metadata" in given else None
    grammar, passed = read_constraint(protocol, given, passed, thinking=thinking)
    if prefill and grammar is not None:
        raise Refusal(
            "A format or a forced call does not go with a last message of the assistant.",
            "messages",
        )
    return Normal(passed, given, settings, model, stream, thinking, prefill, metadata, grammar)


def check_model(body: Json, models: tuple[str, ...], *, required: bool = True) -> str:
    """The model's name if it is served here."""
    model = body.get("model")
    if model is None:
        if required:
            raise Refusal(f"`model` is missing; this server has {models[0]!r}.", "model")
        return models[0]
    if not isinstance(model, str):
        raise Refusal(f"`model` must be a string, not {kind_of(model)}.", "model")
    if model not in models:
        raise Refusal(
            f"The model {model!r} does not exist; this server has {models[0]!r}.",
            "model",
            ErrorCode.UNKNOWN_MODEL,
        )
    return model


def check_fields(protocol: str, body: Json) -> Json:
    """The fields that are given, none of them refused. A null counts as absent."""
    rules = QUERIES[protocol] if protocol in QUERIES else PROTOCOLS[protocol]
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        rule = rules.get(name)
        if rule is None:
            raise Refusal(f"`{name}` is not a field of this endpoint; leave it out.", name)
        _check(value, rule, name)
        if rule.inside is not None:
            _check_inside(as_object(value, name), rule.inside, name)
    return given


def _check(value: object, rule: Rule, path: str) -> None:
    if _limited(rule) and not _neutral(value, rule):
        raise Refusal(f"`{path}` is not supported: {rule.why}.", path)


def _check_inside(value: Json, rules: Mapping[str, Rule], path: str) -> None:
    """The keys of an object that the table knows to the bottom."""
    for key, inner in value.items():
        param = f"{path}.{key}"
        rule = rules.get(key)
        if rule is None:
            raise Refusal(f"`{param}` is not known; {_listed(rules)}.", param)
        if inner is not None:
            _check(inner, rule, param)


def _listed(rules: Mapping[str, Rule]) -> str:
    names = [f"`{name}`" for name, rule in rules.items() if rule.how is not How.REFUSED]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"


def _limited(rule: Rule) -> bool:
    return rule.how is How.REFUSED or (rule.how is How.HINT and bool(rule.neutral))


def _neutral(value: object, rule: Rule) -> bool:
    return any(type(value) is type(v) and value == v for v in rule.neutral)


def _read_template(given: Json, passed: Json) -> None:
    """SGLang's and vLLM's spelling of `thinking` and effort; the explicit fields win."""
    options = as_object(given.get("chat_template_kwargs") or {}, "chat_template_kwargs")
    for key in ("thinking", "enable_thinking"):
        if options.get(key) is not None:
            kind = "enabled" if boolean(options, key) else "disabled"
            passed.setdefault("thinking", {"type": kind})
            break
    if options.get("reasoning_effort") is not None:
        passed.setdefault("reasoning_effort", options["reasoning_effort"])


def _continues(given: Json) -> bool:
    """vLLM's pair of options for a continued message: one says what the other implies."""
    continues = boolean(given, "continue_final_message")
    begins = boolean(given, "add_generation_prompt", not continues)
    if continues == begins:
        name = "add_generation_prompt"
        raise Refusal(f"`{name}` is the opposite of `continue_final_message`.", name)
    return continues


def _no_thinking(passed: Json) -> bool:
    """A continued answer has been thought about already."""
    thinking = as_object(passed.get("thinking") or {}, "thinking")
    if thinking.get("type") not in (None, "disabled"):
        raise Refusal(
            "`thinking` does not go with a last message of the assistant; switch it off.",
            "thinking",
        )
    passed["thinking"] = {"type": "disabled"}
    return False


def _thinks(passed: Json, effort: object, default: bool) -> bool:
    thinking: object = passed.get("thinking")
    if is_object(thinking):
        return thinking.get("type") != "disabled"
    return effort != "none" if effort is not None else default
