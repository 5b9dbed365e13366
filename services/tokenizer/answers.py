"""Questions that need no model: models, tokenize, detokenize, count_tokens."""

import time
from typing import NamedTuple

import msgspec

from deepmesh.wire.messages import ErrorCode
from services.tokenizer.completions import read_prompt
from services.tokenizer.model import Model
from services.tokenizer.normalize import Limits, check_fields, check_model, normalise
from services.tokenizer.reading import Json, boolean, parse_object, token_ids
from services.tokenizer.recipe import Recipe
from services.tokenizer.refusal import Refusal
from services.tokenizer.store_orders import Order
from services.tokenizer.vocabulary import Vocabulary


class Answer(NamedTuple):
    """A plain 200 without generation."""

    body: bytes
    prompt_tokens: int = 0
    orders: tuple[Order, ...] = ()  # what else is to be done


def list_models(
    body: bytes,
    names: tuple[str, ...],
    context: int,
    started_s: int,
    fingerprints: tuple[str, ...] = (),
) -> Answer:
    """One shape that both SDKs read. An empty body lists; {"id": name} asks for one.

    `fingerprints`: of the engines that serve; several while replicas change to other weights.
    """
    wanted = parse_object(body).get("id") if body.strip() else None
    created_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(started_s))
    cards = [
        {
            "id": name,
            "object": "model",
            "type": "model",
            "display_name": name,
            "created": started_s,
            "created_at": created_at,
            "owned_by": "deepmesh",
            "root": names[0],
            "max_model_len": context,
            "fingerprints": fingerprints,
        }
        for name in names
    ]
    if wanted is None:
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return Answer(msgspec.json.encode({"object": "list", "data": cards, **page}))
    for card in cards:
        if card["id"] == wanted:
            return Answer(msgspec.json.encode(card))
    raise Refusal(
        f"The model {wanted!r} does not exist; this server has {names[0]!r}.",
        "model",
        ErrorCode.UNKNOWN_MODEL,
    )


def count_tokens(body: Json, recipe: Recipe, limits: Limits) -> Answer:
    """Messages' count_tokens: the length of the prompt that this body would give."""
    normal = normalise("count_tokens", body, limits)
    talk = recipe.convert("count_tokens", normal.body, prefill=normal.prefill)
    count = len(talk.prompt_ids)
    return Answer(msgspec.json.encode({"input_tokens": count}), count)


def tokenize(body: Json, recipe: Recipe, limits: Limits, model: Model, context: int) -> Answer:
    """vLLM's /tokenize: ids of a raw prompt, or of messages as chat would render them."""
    name = check_model(body, limits.models, required=False)
    given = check_fields("tokenize", body)
    if ("messages" in given) == ("prompt" in given):
        raise Refusal("Send either `prompt` or `messages`.", "prompt")
    if "messages" in given:
        keep = (
            "messages",
            "tools",
            "thinking",
            "chat_template_kwargs",
            "add_generation_prompt",
            "continue_final_message",
        )
        chat = {"model": name, **{key: given[key] for key in keep if key in given}}
        ids = recipe.convert("chat", normalise("chat", chat, limits).body).prompt_ids
    else:
        special = boolean(given, "add_special_tokens", True)
        ids = read_prompt(given["prompt"], model, add_bos=special)
    answer: Json = {"count": len(ids), "max_model_len": context, "tokens": ids}
    if boolean(given, "return_token_strs"):
        answer["token_strs"] = [model.vocabulary.name_of(token) for token in ids]
    return Answer(msgspec.json.encode(answer), len(ids))


def detokenize(body: Json, vocabulary: Vocabulary, limits: Limits) -> Answer:
    """vLLM's /detokenize: the text of ids, special tokens spelled out."""
    check_model(body, limits.models, required=False)
    given = check_fields("detokenize", body)
    if "tokens" not in given:
        raise Refusal("`tokens` is missing.", "tokens")
    ids = token_ids(given["tokens"], "tokens", limits.vocab_size)
    return Answer(msgspec.json.encode({"prompt": vocabulary.text_of(ids)}))
