"""Every field of every protocol, and what becomes of it. Nothing is silently ignored.

The normaliser obeys this table, `python -m tools.reference` prints it, and nothing else decides
whether a field is accepted.
"""

from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple


class How(Enum):
    """What becomes of a field."""

    RECIPE = "passed to deepseek-recipe"
    OURS = "read by deepmesh"
    BOTH = "read by deepmesh, passed on for the echo and the recipe's own rules"
    HINT = "accepted; has no influence on the answer by design"
    REFUSED = "refused unless its value means nothing"


class Rule(NamedTuple):
    """One row of the table."""

    how: How
    neutral: tuple[object, ...] = ()  # values of a REFUSED or HINT field that are accepted
    why: str = ""  # completes "`field` is refused: …"; a note on one that is used
    inside: "Mapping[str, Rule] | None" = None  # all keys of an object; None: read elsewhere


_RECIPE = Rule(How.RECIPE)
_OURS = Rule(How.OURS)
_BOTH = Rule(How.BOTH)
_HINT = Rule(How.HINT)


def _refused(why: str, *neutral: object) -> Rule:
    return Rule(How.REFUSED, neutral, why)


_FORMAT = Rule(
    How.BOTH,
    why="enforced, `strict` or not; a schema that cannot be kept to is refused by its keyword",
)
_CHOICE = Rule(
    How.BOTH,
    why="enforced, while thinking is free; calls keep to the schemas of their tools",
)
_PARALLEL = Rule(How.OURS, why="false: at most one call in an answer")
_LIMIT = Rule(How.BOTH, why="lowered to the room that the prompt leaves in the context")
_OUR_LIMIT = Rule(How.OURS, why=_LIMIT.why)
_GUIDED = Rule(How.OURS, why="enforced; at most one of these and of the protocol's own format")
_STAND_BACK = Rule(
    How.OURS,
    why="an integer: 0 or more lets others go first; a negative one is refused, since being "
    "preferred belongs to the API key",
)
_STOP_IN_TEXT = Rule(How.OURS, why="the stop string that ended the answer stays at its end")
_BUDGET = Rule(How.OURS, why="thinking that is not over by then is cut: `</think>` follows")
_CONTINUE = Rule(
    How.OURS, why="true: the last message is the assistant's, and its text is continued"
)
_PROMPT_END = Rule(How.OURS, why="false with `continue_final_message`: true, and only then")
_STREAM_OPTIONS = Rule(
    How.OURS,
    inside={
        "include_usage": Rule(How.OURS, why="a last chunk with usage and no choices"),
        "continuous_usage_stats": Rule(How.OURS, why="usage so far on every chunk, too"),
        "include_obfuscation": _refused("chunks are not padded", False),
    },
)
_TEMPLATE = Rule(
    How.OURS,
    inside={
        "thinking": _OURS,
        "enable_thinking": _OURS,
        "reasoning_effort": _OURS,
    },
)
_THINKING = Rule(How.BOTH, inside={"type": _RECIPE, "budget_tokens": _BUDGET})
_REASONING = Rule(
    How.RECIPE,
    inside={
        "effort": _RECIPE,
        "summary": _refused("reasoning comes whole, not as a summary", "auto"),
        "generate_summary": _refused("reasoning comes whole, not as a summary", "auto"),
    },
)
_STORED = Rule(How.OURS, why="needs a kvstore: its input and output come before `input`")
_TIER = Rule(How.HINT, ("auto", "default", "standard", "standard_only"), "there is one tier")

# what every protocol that generates may carry beyond its own specification (vLLM's spellings)
_SAMPLING: dict[str, Rule] = {
    "temperature": _BOTH,
    "top_p": _BOTH,
    "top_k": _OURS,
    "min_p": _OURS,
    "presence_penalty": _OURS,
    "frequency_penalty": _OURS,
    "repetition_penalty": _OURS,
    "logit_bias": _OURS,
    "seed": _OURS,
    "min_tokens": _OURS,
    "ignore_eos": _OURS,
    "stop_token_ids": _OURS,
    "allowed_token_ids": Rule(How.OURS, why="nothing else is sampled, `stop_token_ids` included"),
    "bad_words": Rule(
        How.OURS, why="texts that the answer does not hold, as the model spells them"
    ),
    "cache_salt": _OURS,
    "priority": _STAND_BACK,
    "user": _HINT,
    "safety_identifier": _HINT,
    "prompt_cache_key": _HINT,
    "prompt_cache_retention": _HINT,
    "metadata": _HINT,
    "service_tier": _TIER,
    "skip_special_tokens": _refused("control tokens are always skipped", True),
    "spaces_between_special_tokens": _refused("no spaces are added", True),
    "return_token_ids": _refused("token ids are not part of answers", False),
    "guided_json": _GUIDED,
    "guided_json_object": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "structured_outputs": _GUIDED,
    "regex": _GUIDED,
    "ebnf": _GUIDED,
    "json_schema": _GUIDED,
}

_ONE = _refused("this protocol has one answer; send the request again with another seed", 1)
_N = Rule(
    How.OURS, why="choices: up to 128 in all; choice i draws its own random numbers from the seed"
)
_PROMPT_LOGPROBS = Rule(
    How.OURS,
    why="of each prompt token but the first, as vLLM shapes them, with 0 to 20 best ids; not with "
    "`stream`; the prompt is computed whole, cached or not",
)
_NO_PROMPT_LOGPROBS = _refused("only completions and chats have it")
_NO_STOP_IN_TEXT = _refused("the answer names its `stop_sequence`", False)
_BEST_OF = _refused("it would hide tokens that you pay for", 1)

CHAT: dict[str, Rule] = {
    **_SAMPLING,
    "model": _RECIPE,
    "messages": _RECIPE,
    "stream": _RECIPE,
    "tools": _RECIPE,
    "tool_choice": _CHOICE,
    "response_format": _FORMAT,
    "thinking": _THINKING,
    "thinking_token_budget": _BUDGET,
    "reasoning_effort": _RECIPE,
    "stop": _BOTH,
    "include_stop_str_in_output": _STOP_IN_TEXT,
    "logprobs": _RECIPE,
    "top_logprobs": _BOTH,
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "max_tokens": _LIMIT,
    "max_completion_tokens": _OUR_LIMIT,
    "stream_options": _STREAM_OPTIONS,
    "chat_template_kwargs": _TEMPLATE,
    "n": _N,
    "best_of": _BEST_OF,
    "store": _refused("chat answers are not stored; /v1/responses can be", False),
    "parallel_tool_calls": _PARALLEL,
    "functions": _refused("use `tools`"),
    "function_call": _refused("use `tool_choice`", "none", "auto"),
    "audio": _refused("the model has no audio"),
    "modalities": _refused("the model answers in text", ["text"]),
    "prediction": _refused("predicted output is not supported"),
    "web_search_options": _refused("there is no web search"),
    "verbosity": _refused("ask for the length in the prompt", "medium"),
    "echo": _refused("only /v1/completions echoes", False),
    "add_generation_prompt": _PROMPT_END,
    "continue_final_message": _CONTINUE,
    "include_reasoning": _refused("switch thinking off instead", True),
}

RESPONSES: dict[str, Rule] = {
    **_SAMPLING,
    "model": _RECIPE,
    "input": _RECIPE,
    "instructions": _RECIPE,
    "stream": _RECIPE,
    "tools": _RECIPE,
    "tool_choice": _CHOICE,
    "reasoning": _REASONING,
    "text": _FORMAT,
    "user": _RECIPE,
    "max_output_tokens": _LIMIT,
    "top_logprobs": _BOTH,
    "thinking_token_budget": _BUDGET,
    "previous_response_id": _STORED,
    "store": Rule(
        How.OURS, why="default: true where the mesh has a kvstore; without one true is refused"
    ),
    "include": Rule(
        How.OURS,
        why="`message.output_text.logprobs` adds logprobs; `reasoning.encrypted_content` is "
        "accepted, reasoning comes in the clear; others are refused",
    ),
    "conversation": _refused("there are no conversation objects; use `previous_response_id`"),
    "background": Rule(
        How.OURS,
        why="needs a kvstore: answered at once, asked for by GET; with `stream` it can be followed "
        "from any event",
    ),
    "n": _ONE,
    "include_stop_str_in_output": _refused("there are no stop strings here", False),
    "truncation": _refused("input is never cut", "disabled"),
    "prompt": _refused("there are no prompt templates"),
    "max_tool_calls": _refused("tools run at the client"),
    "parallel_tool_calls": _PARALLEL,
    "stream_options": _refused("it has no use here", {}, {"include_obfuscation": False}),
    "context_management": _refused("input is never cut"),
    "prompt_logprobs": _NO_PROMPT_LOGPROBS,
    "verbosity": _refused("ask for the length in the prompt"),
}

MESSAGES: dict[str, Rule] = {
    **_SAMPLING,
    "model": _RECIPE,
    "messages": _RECIPE,
    "system": _RECIPE,
    "stream": _RECIPE,
    "tools": _RECIPE,
    "tool_choice": _CHOICE,
    "thinking": _THINKING,
    "thinking_token_budget": _BUDGET,
    "output_config": _FORMAT,
    "stop_sequences": _BOTH,
    "include_stop_str_in_output": _NO_STOP_IN_TEXT,
    "n": _ONE,
    "max_tokens": _LIMIT,
    "cache_control": _HINT,  # every prefix is cached
    "output_format": _GUIDED,
    "mcp_servers": _refused("tools run at the client", []),
    "container": _refused("there are no containers"),
    "context_management": _refused("input is never cut"),
    "inference_geo": _refused("there is one place"),
    "prompt_logprobs": _NO_PROMPT_LOGPROBS,
}

COMPLETIONS: dict[str, Rule] = {
    **_SAMPLING,
    "model": _OURS,
    "prompt": _OURS,
    "max_tokens": _OUR_LIMIT,
    "stream": _OURS,
    "stream_options": _STREAM_OPTIONS,
    "stop": _OURS,
    "include_stop_str_in_output": _STOP_IN_TEXT,
    "logprobs": _OURS,
    "echo": Rule(
        How.OURS, why="with `logprobs` those of the prompt, too; its first token has none"
    ),
    "add_special_tokens": _OURS,
    "n": _N,
    "best_of": _BEST_OF,
    "suffix": _refused("the model cannot fill in the middle", ""),
    "prompt_logprobs": _PROMPT_LOGPROBS,
    "response_format": _GUIDED,
    "truncate_prompt_tokens": _refused("prompts are never cut"),
}

TOKENIZE: dict[str, Rule] = {
    "model": _OURS,
    "prompt": _OURS,
    "messages": _OURS,
    "tools": _OURS,
    "thinking": _OURS,
    "add_special_tokens": _OURS,
    "return_token_strs": _OURS,
    "chat_template_kwargs": _TEMPLATE,
    "add_generation_prompt": _PROMPT_END,
    "continue_final_message": _CONTINUE,
}

DETOKENIZE: dict[str, Rule] = {"model": _OURS, "tokens": _OURS}

PROTOCOLS: dict[str, dict[str, Rule]] = {
    "chat": CHAT,
    "responses": RESPONSES,
    "messages": MESSAGES,
    "count_tokens": MESSAGES,
    "completions": COMPLETIONS,
    "tokenize": TOKENIZE,
    "detokenize": DETOKENIZE,
}

_INCLUDE = Rule(
    How.HINT,
    ("message.output_text.logprobs", "reasoning.encrypted_content"),
    "a response has what it was created with",
)
QUERIES: dict[str, dict[str, Rule]] = {  # parameters of requests without a body
    "response": {
        "stream": Rule(
            How.OURS, why="the events, of a response created with `background`, `stream`"
        ),
        "starting_after": Rule(
            How.OURS, why="with `stream`: the events behind this sequence number"
        ),
        "include": _INCLUDE,
        "include_obfuscation": _refused("events are not padded", False),
    },
    "response_delete": {},
    "response_cancel": {},
    "response_items": {
        "order": Rule(How.OURS, why="`asc` or `desc`, the default"),
        "limit": Rule(How.OURS, why="1 to 100; 20 by default"),
        "after": Rule(How.OURS, why="the id of the last item of the page before"),
        "include": _INCLUDE,
    },
}
