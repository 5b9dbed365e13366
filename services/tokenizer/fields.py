"""Every top-level field of every protocol, and what becomes of it. Nothing is silently ignored.

The normaliser obeys this table and nothing else decides whether a field is accepted.
"""

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


_RECIPE = Rule(How.RECIPE)
_OURS = Rule(How.OURS)
_BOTH = Rule(How.BOTH)
_HINT = Rule(How.HINT)


def _refused(why: str, *neutral: object) -> Rule:
    return Rule(How.REFUSED, neutral, why)


_ADVISORY = Rule(
    How.RECIPE,
    why="its format is advice in this version: the prompt asks the model for it, nothing "
    "enforces it; `strict` is refused",
)
_CHOICE = Rule(
    How.RECIPE,
    why='"required", or a tool by its name, is advice in this version: the prompt begins a '
    "call, nothing enforces the rest",
)
_LIMIT = Rule(How.BOTH, why="lowered to the room that the prompt leaves in the context")
_OUR_LIMIT = Rule(How.OURS, why=_LIMIT.why)
_MASKS = _refused("constrained decoding is not there yet; describe the format in the prompt")
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
    "cache_salt": _OURS,
    "priority": _refused("priority belongs to the API key, not to the request", 0),
    "user": _HINT,
    "safety_identifier": _HINT,
    "prompt_cache_key": _HINT,
    "prompt_cache_retention": _HINT,
    "metadata": _HINT,
    "service_tier": _TIER,
    "include_stop_str_in_output": _refused("stop strings are never part of the output", False),
    "skip_special_tokens": _refused("it cannot be switched off", True),
    "spaces_between_special_tokens": _refused("no spaces are added", True),
    "return_token_ids": _refused("token ids are not part of answers", False),
    "thinking_token_budget": _refused("use reasoning effort, or switch thinking off"),
    "guided_json": _MASKS,
    "guided_regex": _MASKS,
    "guided_choice": _MASKS,
    "guided_grammar": _MASKS,
    "structured_outputs": _MASKS,
}

_N = _refused("one choice per request; send the request again with another seed", 1)
_BEST_OF = _refused("it would hide tokens that you pay for", 1)

CHAT: dict[str, Rule] = {
    **_SAMPLING,
    "model": _RECIPE,
    "messages": _RECIPE,
    "stream": _RECIPE,
    "tools": _RECIPE,
    "tool_choice": _CHOICE,
    "response_format": _ADVISORY,
    "thinking": _RECIPE,
    "reasoning_effort": _RECIPE,
    "stop": _BOTH,
    "logprobs": _RECIPE,
    "top_logprobs": _BOTH,
    "max_tokens": _LIMIT,
    "max_completion_tokens": _OUR_LIMIT,
    "stream_options": _OURS,
    "chat_template_kwargs": _OURS,
    "n": _N,
    "best_of": _BEST_OF,
    "store": _refused("answers are not stored", False),
    "parallel_tool_calls": _refused("the model decides how many calls it makes", True),
    "functions": _refused("use `tools`"),
    "function_call": _refused("use `tool_choice`", "none", "auto"),
    "audio": _refused("the model has no audio"),
    "modalities": _refused("the model answers in text", ["text"]),
    "prediction": _refused("predicted output is not supported"),
    "web_search_options": _refused("there is no web search"),
    "verbosity": _refused("ask for the length in the prompt", "medium"),
    "echo": _refused("only /v1/completions echoes", False),
    "add_generation_prompt": _refused("it cannot be switched off", True),
    "continue_final_message": _refused('put `"prefix": true` on the last message', False),
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
    "reasoning": _RECIPE,
    "text": _ADVISORY,
    "user": _RECIPE,
    "max_output_tokens": _LIMIT,
    "top_logprobs": _BOTH,
    "previous_response_id": _refused("responses are not stored; send the whole conversation"),
    "conversation": _refused("conversations are not stored; send the whole conversation"),
    "store": _refused("responses are not stored; leave it out or send false", False),
    "background": _refused("responses run in the foreground", False),
    "include": _refused("nothing can be added", [], ["reasoning.encrypted_content"]),
    "truncation": _refused("input is never cut", "disabled"),
    "prompt": _refused("there are no prompt templates"),
    "max_tool_calls": _refused("tools run at the client"),
    "parallel_tool_calls": _refused("the model decides how many calls it makes", True),
    "stream_options": _refused("it has no use here", {}, {"include_obfuscation": False}),
    "context_management": _refused("input is never cut"),
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
    "thinking": _RECIPE,
    "output_config": _RECIPE,
    "stop_sequences": _BOTH,
    "max_tokens": _LIMIT,
    "cache_control": _HINT,  # every prefix is cached
    "output_format": _MASKS,
    "mcp_servers": _refused("tools run at the client", []),
    "container": _refused("there are no containers"),
    "context_management": _refused("input is never cut"),
    "inference_geo": _refused("there is one place"),
}

COMPLETIONS: dict[str, Rule] = {
    **_SAMPLING,
    "model": _OURS,
    "prompt": _OURS,
    "max_tokens": _OUR_LIMIT,
    "stream": _OURS,
    "stream_options": _OURS,
    "stop": _OURS,
    "logprobs": _OURS,
    "echo": _OURS,
    "add_special_tokens": _OURS,
    "n": _N,
    "best_of": _BEST_OF,
    "suffix": _refused("the model cannot fill in the middle", ""),
    "prompt_logprobs": _refused("logprobs of the prompt are not computed"),
    "response_format": _refused("only chat knows formats", {"type": "text"}),
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
    "chat_template_kwargs": _OURS,
    "add_generation_prompt": _refused("it cannot be switched off", True),
    "continue_final_message": _refused('put `"prefix": true` on the last message', False),
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
