"""The OpenAPI document of the API: what a generator of clients, or of tests, has to know."""

from deepmesh import __version__

Json = dict[str, object]

_TEXT: Json = {"type": "string"}
_FLAG: Json = {"type": "boolean"}
_OBJECT: Json = {"type": "object"}
_LIMIT: Json = {"type": "integer", "minimum": 1, "maximum": 393_216}
_IDS: Json = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_STOP: Json = {"oneOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": 16}]}
_STREAM_OPTIONS: Json = {
    "type": "object",
    "properties": {"include_usage": _FLAG, "continuous_usage_stats": _FLAG},
}
_SAMPLING: Json = {
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": 1000},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 10},
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "seed": {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
    "min_tokens": {"type": "integer", "minimum": 0},
    "ignore_eos": _FLAG,
    "stop_token_ids": _IDS,
    "cache_salt": _TEXT,
    "priority": {"type": "integer", "minimum": 0},
    "stream": _FLAG,
    "user": _TEXT,
    "metadata": _OBJECT,
}
_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": _TEXT},
}
_CONTENT: Json = {"oneOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]}
_MESSAGE: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": _CONTENT,
    },
}
_TURN: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _CONTENT},
}
_EFFORT: Json = {"enum": ["none", "minimal", "low", "medium", "high", "xhigh", "max"]}
_THINKING: Json = {
    "type": "object",
    "properties": {"type": {"enum": ["enabled", "disabled", "adaptive"]}, "budget_tokens": _LIMIT},
}
_FUNCTION: Json = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "parameters": _OBJECT},
}
_TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"enum": ["function"]}, "function": _FUNCTION},
}

BODIES: dict[str, Json] = {
    "/v1/chat/completions": {
        "required": ["model", "messages"],
        "properties": {
            **_SAMPLING,
            "model": _TEXT,
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "max_tokens": _LIMIT,
            "max_completion_tokens": _LIMIT,
            "stop": _STOP,
            "include_stop_str_in_output": _FLAG,
            "n": {"type": "integer", "minimum": 1, "maximum": 128},
            "logprobs": _FLAG,
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "stream_options": _STREAM_OPTIONS,
            "thinking": _THINKING,
            "thinking_token_budget": _LIMIT,
            "reasoning_effort": _EFFORT,
            "chat_template_kwargs": {
                "type": "object",
                "properties": {"thinking": _FLAG, "enable_thinking": _FLAG},
            },
            "continue_final_message": _FLAG,
            "add_generation_prompt": _FLAG,
            "tools": {"type": "array", "items": _TOOL},
            "tool_choice": {"enum": ["auto", "none", "required"]},
            "parallel_tool_calls": _FLAG,
            "response_format": {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"enum": ["text", "json_object"]}},
            },
        },
    },
    "/v1/completions": {
        "required": ["model", "prompt"],
        "properties": {
            **_SAMPLING,
            "model": _TEXT,
            "prompt": {
                "oneOf": [
                    _TEXT,
                    {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 4},
                    {**_IDS, "minItems": 1},
                    {"type": "array", "items": {**_IDS, "minItems": 1}, "minItems": 1},
                ]
            },
            "max_tokens": _LIMIT,
            "stop": _STOP,
            "include_stop_str_in_output": _FLAG,
            "n": {"type": "integer", "minimum": 1, "maximum": 128},
            "logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "echo": _FLAG,
            "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
            "stream_options": _STREAM_OPTIONS,
            "add_special_tokens": _FLAG,
        },
    },
    "/v1/responses": {
        "required": ["model", "input"],
        "properties": {
            **_SAMPLING,
            "model": _TEXT,
            "input": {"oneOf": [_TEXT, {"type": "array", "items": _MESSAGE, "minItems": 1}]},
            "instructions": _TEXT,
            "max_output_tokens": _LIMIT,
            "thinking_token_budget": _LIMIT,
            "reasoning": {"type": "object", "properties": {"effort": _EFFORT}},
            "store": _FLAG,
            "background": _FLAG,
            "previous_response_id": _TEXT,
            "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
        },
    },
    "/v1/messages": {
        "required": ["model", "messages", "max_tokens"],
        "properties": {
            **_SAMPLING,
            "model": _TEXT,
            "messages": {"type": "array", "items": _TURN, "minItems": 1},
            "system": _CONTENT,
            "max_tokens": _LIMIT,
            "stop_sequences": {"type": "array", "items": _TEXT, "maxItems": 16},
            "thinking": _THINKING,
        },
    },
    "/v1/messages/count_tokens": {
        "required": ["model", "messages"],
        "properties": {
            "model": _TEXT,
            "messages": {"type": "array", "items": _TURN, "minItems": 1},
            "system": _CONTENT,
            "thinking": _THINKING,
        },
    },
    "/tokenize": {
        "required": [],
        "properties": {
            "model": _TEXT,
            "prompt": _TEXT,
            "messages": {"type": "array", "items": _MESSAGE, "minItems": 1},
            "add_special_tokens": _FLAG,
            "return_token_strs": _FLAG,
        },
    },
    "/detokenize": {
        "required": ["tokens"],
        "properties": {"model": _TEXT, "tokens": _IDS},
    },
}
PARAMETERS: dict[str, dict[str, Json]] = {  # of GET, by path
    "/v1/responses/{id}": {
        "stream": _FLAG,
        "starting_after": {"type": "integer", "minimum": 0},
    },
    "/v1/responses/{id}/input_items": {
        "order": {"enum": ["asc", "desc"]},
        "limit": {"type": "integer", "minimum": 1, "maximum": 100},
        "after": _TEXT,
    },
}
QUESTIONS: dict[str, tuple[str, ...]] = {  # path: methods
    "/v1/models": ("get",),
    "/v1/models/{id}": ("get",),
    "/v1/responses/{id}": ("get", "delete"),
    "/v1/responses/{id}/cancel": ("post",),
    "/v1/responses/{id}/input_items": ("get",),
    "/health": ("get",),
    "/ping": ("get",),
    "/ready": ("get",),
    "/version": ("get",),
    "/metrics": ("get",),
    "/load": ("get",),
}
_ANSWERS: Json = {
    "200": {"description": "The answer; an event stream where `stream` is true."},
    "400": {"description": "A field is at fault; the error names it."},
    "401": {"description": "No API key, or an unknown one."},
    "404": {"description": "No such model, response or route."},
    "413": {"description": "The body is too large."},
    "429": {"description": "Too much at once, or for this key; Retry-After says when."},
    "503": {"description": "No engine is up in time; Retry-After says when."},
}


def document() -> Json:
    """OpenAPI 3.1. Fields that are refused are not in it; docs/api.md lists them all."""
    paths: dict[str, Json] = {}
    for path, body in BODIES.items():
        schema: Json = {"type": "object", "additionalProperties": False, **body}
        content: Json = {"application/json": {"schema": schema}}
        paths[path] = {
            "post": {
                "requestBody": {"required": True, "content": content},
                "responses": _ANSWERS,
            }
        }
    for path, methods in QUESTIONS.items():
        place: Json = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
        parameters = [place] if "{id}" in path else []
        queries: list[Json] = [
            {"name": name, "in": "query", "required": False, "schema": schema}
            for name, schema in PARAMETERS.get(path, {}).items()
        ]
        paths[path] = {
            method: {
                "parameters": [*parameters, *(queries if method == "get" else [])],
                "responses": _ANSWERS,
            }
            for method in methods
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "deepmesh", "version": __version__},
        "paths": paths,
    }
