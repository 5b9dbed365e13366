"""What lies inside the fields that go to the recipe: refuse what it would drop or alter."""

from services.tokenizer.reading import Json, as_list, as_object, boolean, is_array, is_object
from services.tokenizer.refusal import Refusal

_NO_IMAGES = "this model does not take images"
_NO_FILES = "files are not read; put their text into the message"
_NO_STRICT = "`strict` needs constrained decoding, which is not there yet; leave it out"
_FOREIGN_PARTS = {
    "image": _NO_IMAGES,
    "image_url": _NO_IMAGES,
    "input_image": _NO_IMAGES,
    "input_audio": "this model does not take audio",
    "audio": "this model does not take audio",
    "file": _NO_FILES,
    "input_file": _NO_FILES,
    "document": _NO_FILES,
}


def check_chat(body: Json, *, thinking: bool) -> None:
    """Chat Completions. Edits messages: developer becomes system, `reasoning` its alias."""
    messages = _items(body, "messages")
    body["messages"] = [_chat_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    _check_thinking(body)
    if "response_format" in body:
        _check_format(as_object(body["response_format"], "response_format"), "response_format")
    tools = _items(body, "tools", required=False)
    for i, tool in enumerate(tools):
        function: object = tool.get("function")
        if is_object(function):
            _check_strict(function, f"tools[{i}].function.strict")
    choice = body.get("tool_choice")
    if choice in (None, "auto", "none"):
        return
    if not tools:
        raise Refusal("`tool_choice` needs `tools`.", "tool_choice")
    if thinking:
        raise Refusal(
            '`tool_choice` can force a call only without thinking; add `"thinking": '
            '{"type": "disabled"}`.',
            "tool_choice",
        )


def check_responses(body: Json) -> None:
    """Responses."""
    _check_input(body)
    for i, tool in enumerate(_items(body, "tools", required=False)):
        param = f"tools[{i}]"
        if tool.get("type") not in ("function", "namespace", "custom"):
            kind = tool.get("type")
            raise Refusal(f"`{param}.type` {kind!r}: only function tools exist.", f"{param}.type")
        _check_strict(tool, f"{param}.strict")
    text = as_object(body.get("text") or {}, "text")
    if text.get("format") is not None:
        _check_format(as_object(text["format"], "text.format"), "text.format")
    if text.get("verbosity") not in (None, "medium"):
        raise Refusal("`text.verbosity`: ask for the length in the prompt.", "text.verbosity")
    reasoning = as_object(body.get("reasoning") or {}, "reasoning")
    for key, value in reasoning.items():
        if key == "effort" or value is None or (key == "summary" and value == "auto"):
            continue
        raise Refusal(
            f"`reasoning.{key}` is not supported: reasoning comes whole, not as a summary.",
            f"reasoning.{key}",
        )
    if body.get("tool_choice") not in (None, "auto", "none") and not body.get("tools"):
        raise Refusal("`tool_choice` needs `tools`.", "tool_choice")


def check_messages(body: Json) -> None:
    """Messages. Edits tool results: the recipe drops `is_error`, so the text says it."""
    messages = _items(body, "messages")
    body["messages"] = [_anthropic_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    if messages and messages[-1].get("role") == "assistant":
        last = f"messages[{len(messages) - 1}].role"
        raise Refusal(f"`{last}`: continuing an assistant message is not supported here.", last)
    _check_thinking(body)
    for i, tool in enumerate(_items(body, "tools", required=False)):
        _check_strict(tool, f"tools[{i}].strict")
    choice = as_object(body.get("tool_choice") or {}, "tool_choice")
    if choice.get("type") == "any":
        raise Refusal("`tool_choice.type` any is not supported; name a tool.", "tool_choice.type")
    if choice.get("disable_parallel_tool_use"):
        param = "tool_choice.disable_parallel_tool_use"
        raise Refusal(f"`{param}`: the model decides how many calls it makes.", param)
    for key, value in as_object(body.get("output_config") or {}, "output_config").items():
        if key != "effort" and value is not None:
            param = f"output_config.{key}"
            raise Refusal(f"`{param}` is not supported; `output_config.effort` is.", param)


def _chat_message(message: Json, param: str) -> Json:
    _check_parts(message.get("content"), f"{param}.content")
    edited = dict(message)
    if edited.get("role") == "developer":
        edited["role"] = "system"
    reasoning = edited.pop("reasoning", None)
    if reasoning is not None:
        edited.setdefault("reasoning_content", reasoning)
    if edited.get("audio") is not None:
        raise Refusal(f"`{param}.audio`: this model has no audio.", f"{param}.audio")
    return edited


def _anthropic_message(message: Json, param: str) -> Json:
    content: object = message.get("content")
    _check_parts(content, f"{param}.content")
    if not is_array(content):
        return message
    blocks = [as_object(block, f"{param}.content[{i}]") for i, block in enumerate(content)]
    return {**message, "content": [_tool_result(b) for b in blocks]}


def _tool_result(block: Json) -> Json:
    if block.get("type") != "tool_result" or not block.get("is_error"):
        return block
    content: object = block.get("content")
    if is_array(content):
        marked = [{"type": "text", "text": "Error: "}, *content]
    else:
        marked = f"Error: {content or ''}"
    return {**block, "content": marked}


def _check_input(body: Json) -> None:
    value = body.get("input")
    if value is None:
        raise Refusal("`input` is missing.", "input")
    if isinstance(value, str):
        return
    if not as_list(value, "input"):
        raise Refusal("`input` is empty.", "input")
    for i, item in enumerate(_items(body, "input")):
        kind = item.get("type")
        if kind == "item_reference":
            raise Refusal(
                f"`input[{i}]`: responses are not stored; send the item itself.", f"input[{i}].type"
            )
        _check_parts(item.get("content"), f"input[{i}].content")
        _check_parts(item.get("output"), f"input[{i}].output")


def _check_parts(value: object, param: str) -> None:
    """Refuse parts that are not text, also inside tool results."""
    if not is_array(value):
        return
    for i, item in enumerate(value):
        part = as_object(item, f"{param}[{i}]")
        kind = part.get("type")
        if isinstance(kind, str) and kind in _FOREIGN_PARTS:
            raise Refusal(
                f"`{param}[{i}].type` {kind!r}: {_FOREIGN_PARTS[kind]}.", f"{param}[{i}].type"
            )
        _check_parts(part.get("content"), f"{param}[{i}].content")


def _check_format(given: Json, param: str) -> None:
    """Formats that the prompt can ask for; promises that only a mask can keep are refused."""
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise Refusal(
            f"`{param}.type` {kind!r} is not supported: text, json_object and json_schema are.",
            f"{param}.type",
        )
    schema: object = given.get("json_schema")
    if is_object(schema):
        _check_strict(schema, f"{param}.json_schema.strict")
    _check_strict(given, f"{param}.strict")


def _check_strict(holder: Json, param: str) -> None:
    if boolean(holder, "strict"):
        raise Refusal(f"`{param}`: {_NO_STRICT}.", param)


def _check_thinking(body: Json) -> None:
    thinking = as_object(body.get("thinking") or {}, "thinking")
    if thinking.get("budget_tokens") is not None:
        raise Refusal(
            "`thinking.budget_tokens` is not supported; leave it out and set the effort.",
            "thinking.budget_tokens",
        )


def _items(body: Json, name: str, *, required: bool = True) -> list[Json]:
    value = body.get(name)
    if value is None and not required:
        return []
    if value is None:
        raise Refusal(f"`{name}` is missing.", name)
    items = as_list(value, name)
    if required and not items:
        raise Refusal(f"`{name}` is empty.", name)
    return [as_object(item, f"{name}[{i}]") for i, item in enumerate(items)]
