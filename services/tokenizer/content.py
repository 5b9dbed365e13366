"""What lies inside the fields that go to the recipe: refuse what it would drop or alter."""

from services.tokenizer.reading import (
    Json,
    as_list,
    as_object,
    as_text,
    is_array,
)
from services.tokenizer.refusal import Refusal

_NO_IMAGES = "this model does not take images"
_NO_FILES = "files are not read; put their text into the message"
MAX_ITEMS = 1 << 16  # messages, items of an input, tools
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


def check_chat(body: Json) -> None:
    """Chat Completions. Edits messages: developer becomes system, `reasoning` its alias."""
    messages = _items(body, "messages")
    body["messages"] = [_chat_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    _items(body, "tools", required=False)


def check_responses(body: Json) -> None:
    """Responses."""
    _check_input(body)
    for i, tool in enumerate(_items(body, "tools", required=False)):
        param = f"tools[{i}]"
        if tool.get("type") not in ("function", "namespace", "custom"):
            kind = tool.get("type")
            raise Refusal(f"`{param}.type` {kind!r}: only function tools exist.", f"{param}.type")
    text = as_object(body.get("text") or {}, "text")
    if text.get("verbosity") not in (None, "medium"):
        raise Refusal("`text.verbosity`: ask for the length in the prompt.", "text.verbosity")


def check_messages(body: Json) -> None:
    """Messages. Edits tool results: the recipe drops `is_error`, so the text says it."""
    messages = _items(body, "messages")
    body["messages"] = [_anthropic_message(m, f"messages[{i}]") for i, m in enumerate(messages)]
    _items(body, "tools", required=False)
    for key, value in as_object(body.get("output_config") or {}, "output_config").items():
        if key not in ("effort", "format") and value is not None:
            param = f"output_config.{key}"
            raise Refusal(f"`{param}` is not supported; `effort` and `format` are.", param)


def continue_last(body: Json) -> None:
    """vLLM's continue_final_message: the recipe's `prefix` on the assistant's last message."""
    messages = _items(body, "messages")
    last, param = messages[-1], f"messages[{len(messages) - 1}].role"
    if last.get("role") != "assistant":
        raise Refusal(f"`{param}`: only a message of the assistant can be continued.", param)
    body["messages"] = [*messages[:-1], {**last, "prefix": True}]


def take_prefill(body: Json) -> str:
    """Anthropic's way to continue: the text of a last message of the assistant, taken out."""
    messages: list[Json] = body["messages"]
    if messages[-1].get("role") != "assistant":
        return ""
    content: object = messages[-1].get("content")
    if isinstance(content, str):
        text = content
    else:
        blocks = [as_object(block, "messages") for block in as_list(content, "messages")]
        if any(block.get("type") != "text" for block in blocks):
            return ""  # calls of tools without results: the recipe says what is wrong
        text = "".join(as_text(block.get("text"), "messages") for block in blocks)
    param = f"messages[{len(messages) - 1}].content"
    if not text:
        raise Refusal(f"`{param}` is empty: there is nothing to continue.", param)
    if len(messages) == 1:
        raise Refusal("`messages` must begin with the user.", "messages")
    body["messages"] = messages[:-1]
    return text


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


def _items(body: Json, name: str, *, required: bool = True) -> list[Json]:
    value = body.get(name)
    if value is None and not required:
        return []
    if value is None:
        raise Refusal(f"`{name}` is missing.", name)
    items = as_list(value, name)
    if required and not items:
        raise Refusal(f"`{name}` is empty.", name)
    if len(items) > MAX_ITEMS:
        raise Refusal(f"`{name}` has {len(items)} entries; at most {MAX_ITEMS} are read.", name)
    return [as_object(item, f"{name}[{i}]") for i, item in enumerate(items)]
