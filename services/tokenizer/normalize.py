"""Raw body -> what deepseek-recipe may see, and the settings that it would drop. Pure."""

from typing import NamedTuple

from deepmesh.wire.messages import ErrorCode
from services.tokenizer import content
from services.tokenizer.fields import PROTOCOLS, How, Rule
from services.tokenizer.reading import Json, as_object, boolean, is_object, kind_of, stop_strings
from services.tokenizer.refusal import Refusal
from services.tokenizer.sampling import Settings, read_settings


class Normal(NamedTuple):
    """A request whose every field has been accounted for."""

    body: Json  # for the recipe
    settings: Settings
    model: str
    stream: bool
    metadata: Json | None


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
    match protocol:
        case "chat":
            _thinking_of_template(given, passed)
            if settings.max_tokens is not None:
                passed["max_tokens"] = settings.max_tokens
            content.check_chat(passed, thinking=_thinks(passed, limits.default_thinking))
        case "responses":
            content.check_responses(passed)
        case _:
            content.check_messages(passed)
    metadata = as_object(given["metadata"], "metadata") if "metadata" in given else None
    return Normal(passed, settings, model, stream, metadata)


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
    rules = PROTOCOLS[protocol]
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        rule = rules.get(name)
        if rule is None:
            raise Refusal(f"`{name}` is not a field of this endpoint; leave it out.", name)
        if _limited(rule) and not _neutral(value, rule):
            raise Refusal(f"`{name}` is not supported: {rule.why}.", name)
    return given


def _limited(rule: Rule) -> bool:
    return rule.how is How.REFUSED or (rule.how is How.HINT and bool(rule.neutral))


def _neutral(value: object, rule: Rule) -> bool:
    return any(type(value) is type(v) and value == v for v in rule.neutral)


def _thinking_of_template(given: Json, passed: Json) -> None:
    """SGLang's and vLLM's spelling of `thinking`; the explicit field wins."""
    value = given.get("chat_template_kwargs")
    if value is None:
        return
    options = as_object(value, "chat_template_kwargs")
    for key in options:
        if key not in ("thinking", "enable_thinking"):
            param = f"chat_template_kwargs.{key}"
            raise Refusal(f"`{param}` is not known; `thinking` is.", param)
    for key in ("thinking", "enable_thinking"):
        if options.get(key) is not None:
            kind = "enabled" if boolean(options, key) else "disabled"
            passed.setdefault("thinking", {"type": kind})
            return


def _thinks(passed: Json, default: bool) -> bool:
    thinking: object = passed.get("thinking")
    if is_object(thinking):
        return thinking.get("type") != "disabled"
    effort = passed.get("reasoning_effort")
    return effort != "none" if effort is not None else default
