"""Tools and the choice of them: which calls an answer may, or has to, make."""

from typing import TYPE_CHECKING, NamedTuple

from deepmesh.grammar_judge import judge
from deepmesh.grammars import make_grammar, schema_text
from services.tokenizer.dsml import Shape, Tool, calls_grammar, has_plain_name, is_plain_object
from services.tokenizer.reading import (
    Json,
    as_list,
    as_object,
    as_text,
    boolean,
    is_array,
    is_object,
)
from services.tokenizer.refusal import Refusal
from services.tokenizer.schemas import clean_schema

if TYPE_CHECKING:
    from services.tokenizer.grammar import Wanted


class Calls(NamedTuple):
    """What a request says of calls."""

    text: str  # of the grammar; empty: none
    must_call: bool
    param: str  # the field to blame
    body: Json  # for the recipe


class _Choice(NamedTuple):
    """`tool_choice`, whatever its protocol."""

    mode: str  # auto, none, required
    names: tuple[str, ...] = ()  # only these; empty: any
    parallel: bool = True


def read_calls(
    protocol: str, given: Json, passed: Json, format_: "Wanted | None", *, thinking: bool
) -> Calls:
    """The grammar of an answer with tools, and the request as the recipe may see it.

    The recipe forces calls only without thinking, and knows neither "any" nor a list of allowed
    tools: it is told "auto", and the grammar does the rest.

    Raises:
        Refusal: a tool or the choice is at fault.
    """
    body = _without_strict(passed)
    if protocol not in ("chat", "responses", "messages"):
        return Calls("", False, "", body)
    tools = _tools(protocol, given)
    choice = _choice(protocol, given)
    if not tools or choice.mode == "none":
        if choice.mode == "required":
            raise Refusal("`tool_choice` needs `tools`.", "tool_choice")
        return Calls("", False, "", body)
    names = [tool.name for tool in tools if tool is not None]
    for name in choice.names:
        if name not in names:
            raise Refusal(f"`tool_choice` names {name!r}, which is not in `tools`.", "tool_choice")
    must_call = choice.mode == "required"
    if must_call and format_ is not None:
        raise Refusal(
            f"`{format_.param}` and a `tool_choice` that forces a call contradict each other.",
            format_.param,
        )
    if None in tools or not all(map(has_plain_name, names)):
        if must_call or format_ is not None:
            raise Refusal("Only function tools can be kept to.", "tool_choice")
        return Calls("", False, "", body)  # as the model likes
    allowed = [t for t in tools if t is not None and (not choice.names or t.name in choice.names)]
    is_opened = must_call and not thinking and _is_plain(given)
    if not is_opened and "tool_choice" in body:
        body = {**body, "tool_choice": _auto(protocol)}
    if format_ is not None and format_.kind != "json_schema":
        raise Refusal(f"`{format_.param}` cannot be combined with `tools`.", format_.param)
    shape = Shape(
        must_call=must_call,
        is_opened=is_opened,
        parallel=choice.parallel,
        json_schema=format_.text if format_ is not None else "",
    )
    return Calls(calls_grammar(allowed, shape), must_call, "tools", body)


def _auto(protocol: str) -> object:
    return {"type": "auto"} if protocol == "messages" else "auto"


def _is_plain(given: Json) -> bool:
    """Whether the recipe itself knows the choice."""
    choice: object = given.get("tool_choice")
    return choice == "required" or (
        is_object(choice) and choice.get("type") in ("function", "tool")
    )


# ---------------------------------------------------------------- tools


def _tools(protocol: str, given: Json) -> list[Tool | None]:
    """Those that can be called; None for one that is no function of JSON parameters."""
    if given.get("tools") is None:
        return []
    found: list[Tool | None] = []
    for i, item in enumerate(as_list(given["tools"], "tools")):
        found.append(_tool(protocol, as_object(item, f"tools[{i}]"), f"tools[{i}]"))
    return found


def _tool(protocol: str, tool: Json, param: str) -> Tool | None:
    holder, key = tool, "parameters"
    match protocol:
        case "chat":
            param = f"{param}.function"
            holder = as_object(tool.get("function"), param)
        case "messages":
            key = "input_schema"
        case _:
            if tool.get("type") != "function":
                return None
    name = holder.get("name")
    if not isinstance(name, str):
        return None  # the recipe says so
    return Tool(
        name, _parameters(holder.get(key), f"{param}.{key}", strict=boolean(holder, "strict"))
    )


def _parameters(schema: object, param: str, *, strict: bool) -> Json | None:
    """The schema that calls are kept to; None for what is too free, or not promised."""
    if schema is None:
        return None
    try:
        clean = clean_schema(schema, param, strict=strict)
        if not is_plain_object(clean):
            raise Refusal(
                f"`{param}`: with `strict` it must be an object whose `properties` say everything.",
                param,
            )
        assert not isinstance(clean, bool)
        for name, part in clean.get("properties", {}).items():
            _check_compiles(part, clean, f"{param}.properties.{name}")
    except Refusal:
        if strict:
            raise
        return None
    return clean


def _check_compiles(part: Json | bool, root: Json, param: str) -> None:
    defs = {key: root[key] for key in ("$defs", "definitions") if key in root}
    whole = {**defs, **part} if isinstance(part, dict) else part
    problem = judge(make_grammar("json_schema", schema_text(whole)))
    if isinstance(whole, dict) and problem:
        raise Refusal(f"`{param}` cannot be kept to: {' '.join(problem.split())[:500]}", param)


def _without_strict(passed: Json) -> Json:
    """The recipe is not told of promises that it would refuse."""
    body = dict(passed)
    tools: object = body.get("tools")
    if is_array(tools):
        body["tools"] = [_loose(tool) for tool in tools]
    return body


def _loose(tool: object) -> object:
    if not is_object(tool):
        return tool
    loose = {key: value for key, value in tool.items() if key != "strict"}
    function: object = loose.get("function")
    if is_object(function):
        loose["function"] = {key: value for key, value in function.items() if key != "strict"}
    return loose


# ---------------------------------------------------------------- the choice


def _choice(protocol: str, given: Json) -> _Choice:
    value: object = given.get("tool_choice")
    parallel = boolean(given, "parallel_tool_calls", True)
    if protocol == "messages":
        return _anthropic_choice(as_object(value, "tool_choice") if value is not None else {})
    if value is None:
        return _Choice("auto", parallel=parallel)
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise Refusal(
                f"`tool_choice` {value!r}: auto, none and required are known.", "tool_choice"
            )
        return _Choice(value, parallel=parallel)
    choice = as_object(value, "tool_choice")
    match choice.get("type"):
        case "function":
            return _Choice("required", (_named(choice),), parallel)
        case "allowed_tools":
            listed = choice.get("allowed_tools", choice)
            allowed = as_object(listed, "tool_choice.allowed_tools")
            mode = allowed.get("mode", "auto")
            if mode not in ("auto", "required"):
                raise Refusal(
                    f"`tool_choice.mode` {mode!r}: auto and required are known.", "tool_choice"
                )
            items = as_list(allowed.get("tools"), "tool_choice.tools")
            names = [
                _named(as_object(item, f"tool_choice.tools[{i}]")) for i, item in enumerate(items)
            ]
            if not names:
                raise Refusal("`tool_choice.tools` is empty.", "tool_choice.tools")
            return _Choice(str(mode), tuple(names), parallel)
        case kind:
            raise Refusal(
                f"`tool_choice.type` {kind!r}: function and allowed_tools are known.",
                "tool_choice.type",
            )


def _named(choice: Json) -> str:
    """The name in {"function": {"name": …}} or {"name": …}."""
    function: object = choice.get("function")
    holder = function if is_object(function) else choice
    return as_text(holder.get("name"), "tool_choice.function.name")


def _anthropic_choice(choice: Json) -> _Choice:
    parallel = not boolean(choice, "disable_parallel_tool_use")
    match choice.get("type", "auto"):
        case "auto":
            return _Choice("auto", parallel=parallel)
        case "any":
            return _Choice("required", parallel=parallel)
        case "none":
            return _Choice("none")
        case "tool":
            name = as_text(choice.get("name"), "tool_choice.name")
            return _Choice("required", (name,), parallel)
        case kind:
            raise Refusal(
                f"`tool_choice.type` {kind!r}: auto, any, tool and none are known.",
                "tool_choice.type",
            )
