"""Conversations and the prompt text that they render to, as the DeepSeek-V4.1 recipe writes it."""

import json
from dataclasses import dataclass, field
from typing import Any

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
THINK, END_THINK = "<think>", "</think>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
DSML = "｜DSML｜"
SPECIAL_TOKENS = (
    BOS,
    EOS,
    PAD,
    THINK,
    END_THINK,
    SYSTEM,
    USER,
    ASSISTANT,
    "<｜latest_reminder｜>",
    DSML,
    "<｜image｜>",
    "<｜ref｜>",
    "<｜/ref｜>",
    "<｜box｜>",
    "<｜/box｜>",
    "<｜point｜>",
    "<｜/point｜>",
    "<｜polygon｜>",
    "<｜/polygon｜>",
)
EFFORT_NAME = {50: "low", 75: "high", 100: "max"}

EFFORT_LINE = (
    "Reasoning Effort: {effort} (range 1-100, the higher the value, "
    "the more thorough the reasoning)\n\n"
)
TOOLS_BLOCK = f"""

## Tools

You have access to a set of tools to help answer the user's question. You can invoke \
tools by writing a "<{DSML} calls>" block like the following:

<{DSML} calls>
<{DSML} invoke name="$TOOL_NAME">
<{DSML} parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML} parameter>
...
</{DSML} invoke>
<{DSML} invoke name="$TOOL_NAME2">
...
</{DSML} invoke>
</{DSML} calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside \
{THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""
FORMAT_BLOCK = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


@dataclass(frozen=True)
class Tool:
    """A function that the model may call; `parameters` maps a name to its JSON type."""

    name: str
    description: str
    parameters: dict[str, str]

    def schema(self) -> dict[str, Any]:
        """The function as a Chat Completions request describes it."""
        properties = {name: {"type": kind} for name, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {"name": self.name, "description": self.description, "parameters": parameters}


@dataclass(frozen=True)
class Turn:
    """One user message (or tool result) and the assistant's answer (or tool call)."""

    user: str
    answer: str
    reasoning: str = ""
    call: tuple[Tool, dict[str, Any]] | None = None
    is_tool_result: bool = False


@dataclass(frozen=True)
class Piece:
    """A run of rendered text that the assistant wrote, or did not."""

    text: str
    is_assistant: bool


def render_call(tool: Tool, arguments: dict[str, Any]) -> str:
    """Return the DSML block of one tool call."""
    lines = [f"\n\n<{DSML} calls>", f'<{DSML} invoke name="{tool.name}">']
    for name, value in arguments.items():
        is_string = "true" if tool.parameters[name] == "string" else "false"
        lines.append(
            f'<{DSML} parameter name="{name}" string="{is_string}">{value}</{DSML} parameter>'
        )
    return "\n".join([*lines, f"</{DSML} invoke>", f"</{DSML} calls>"])


@dataclass(frozen=True)
class Conversation:
    """A whole conversation; `effort` is None with thinking off."""

    turns: tuple[Turn, ...]
    system: str = ""
    tools: tuple[Tool, ...] = ()
    response_format: dict[str, Any] | None = field(default=None)
    effort: int | None = None

    def pieces(self) -> list[Piece]:
        """Return the rendered conversation, prompts and answers in turn."""
        system = EFFORT_LINE.format(effort=self.effort) if self.effort else ""
        system += self.system
        if self.tools:
            system += TOOLS_BLOCK % "\n".join(json.dumps(tool.schema()) for tool in self.tools)
        if self.response_format:
            system += FORMAT_BLOCK + json.dumps(
                self.response_format.get("schema", self.response_format)
            )
        prompt = BOS + (SYSTEM + system if system else "")
        pieces: list[Piece] = []
        for index, turn in enumerate(self.turns):
            # Without tools, the reasoning of earlier turns is dropped from the prompt.
            thinks = self.effort is not None and (bool(self.tools) or index == len(self.turns) - 1)
            user = f"<tool_result>{turn.user}</tool_result>" if turn.is_tool_result else turn.user
            prompt += USER + user + ASSISTANT + (THINK if thinks else END_THINK)
            answer = render_call(*turn.call) if turn.call else turn.answer
            pieces.append(Piece(prompt, is_assistant=False))
            reasoning = turn.reasoning + END_THINK if thinks else ""
            pieces.append(Piece(reasoning + answer + EOS, is_assistant=True))
            prompt = ""
        return pieces

    def chat_request(self) -> dict[str, Any]:
        """Return the Chat Completions body that asks for the last answer."""
        messages: list[dict[str, Any]] = (
            [{"role": "system", "content": self.system}] if self.system else []
        )
        for index, turn in enumerate(self.turns):
            if turn.is_tool_result:
                messages.append(
                    {"role": "tool", "tool_call_id": f"call_{index - 1}", "content": turn.user}
                )
            else:
                messages.append({"role": "user", "content": turn.user})
            reply: dict[str, Any] = {"role": "assistant", "content": turn.answer}
            if self.effort is not None:
                reply["reasoning_content"] = turn.reasoning
            if turn.call:
                tool, arguments = turn.call
                function = {"name": tool.name, "arguments": json.dumps(arguments)}
                reply["tool_calls"] = [
                    {"id": f"call_{index}", "type": "function", "function": function}
                ]
            messages.append(reply)
        body: dict[str, Any] = {"messages": messages[:-1]}
        if self.tools:
            body["tools"] = [{"type": "function", "function": tool.schema()} for tool in self.tools]
        if self.response_format and "schema" in self.response_format:
            body["response_format"] = {"type": "json_schema", "json_schema": self.response_format}
        elif self.response_format:
            body["response_format"] = self.response_format
        if self.effort is None:
            body["thinking"] = {"type": "disabled"}
        else:
            body["reasoning_effort"] = EFFORT_NAME[self.effort]
        return body
