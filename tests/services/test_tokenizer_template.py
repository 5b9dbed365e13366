"""The short way from a recipe's chunk to an event: the bytes of the long way, or none."""

import json

import pytest
from tokenizers import Tokenizer

from deepmesh.wire.messages import FinishReason
from services.tokenizer.events import RecipeStream
from services.tokenizer.model import load_model
from services.tokenizer.normalize import Limits, normalise
from services.tokenizer.recipe import Recipe
from services.tokenizer.text_stream import Token
from services.tokenizer.text_template import TextTemplate
from tests.tiny import MODEL_FOLDER

MODEL = load_model(MODEL_FOLDER)
RECIPE = Recipe(MODEL.tokenizer, MODEL.vocabulary, ("tiny",), thinking=True)
LIMITS = Limits(models=("tiny",), vocab_size=MODEL.vocab_size, max_stops=16, default_thinking=True)
IDS = Tokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
TEXT = (
    'Let me see.</think>He said "no"\n\tand \\ left: 日本語, Grüße 🙂 '
    '{"a": 1}, DEL \x7f, "content":"x"'
)
BODIES = {
    "chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 500},
    "responses": {"input": "Hi"},
}


def stream(protocol: str, *, is_short: bool) -> RecipeStream:
    body = {"model": "tiny", "stream": True, **BODIES[protocol]}
    normal = normalise(protocol, body, LIMITS)
    talk = RECIPE.convert(protocol, normal.body)
    made = RECIPE.stream(talk, normal, b"r" * 16, 1, silent_ids=MODEL.eos_ids, now_s=lambda: 1)
    if not is_short:
        made._template = None
    return made


def events(protocol: str, ids: list[int], *, is_short: bool) -> list[bytes]:
    text = stream(protocol, is_short=is_short)
    found = text.start(0)
    for token in ids:
        found += text.push(Token(token))
    return found + text.finish(FinishReason.LENGTH)


@pytest.mark.parametrize("protocol", list(BODIES))
def test_both_ways_give_the_same_bytes(protocol: str) -> None:
    ids = IDS.encode(TEXT, add_special_tokens=False).ids * 3
    short, long = (events(protocol, ids, is_short=is_short) for is_short in (True, False))
    assert short == long
    assert len(short) > len(ids) / 2


def test_random_tokens_give_the_same_bytes() -> None:
    ids = [(7919 * n) % MODEL.vocab_size for n in range(400)]
    ids = [token for token in ids if token not in MODEL.eos_ids]
    assert events("chat", ids, is_short=True) == events("chat", ids, is_short=False)


CHUNK = '{"id":"x","created":%d,"choices":[{"delta":{"content":"%s"},"finish_reason":null}]}'
EVENT = 'data: {"id":"x","created":1,"choices":[{"delta":{"content":"%s"}}]}\n\n'


def learned() -> TextTemplate:
    template = TextTemplate()
    template.learn(CHUNK % (5, "a"), (EVENT % "a").encode())
    return template


@pytest.mark.parametrize("text", ["b", " two words", "日本", "a" * 1000])
def test_text_that_json_writes_as_it_is_takes_the_short_way(text: str) -> None:
    assert learned().event(CHUNK % (5, text)) == (EVENT % text).encode()


@pytest.mark.parametrize(
    "chunk",
    [
        CHUNK % (6, "b"),  # its head says something else
        CHUNK % (5, ""),
        CHUNK % (5, '\\"'),
        CHUNK % (5, "\\n"),
        CHUNK % (5, 'b","refusal":"c'),
        (CHUNK % (5, "b")).replace("null", '"stop"'),
        (CHUNK % (5, "b")).replace("content", "reasoning_content"),
        "{}",
    ],
)
def test_anything_else_takes_the_long_way(chunk: str) -> None:
    assert learned().event(chunk) is None


def test_nothing_is_learned_where_the_text_cannot_be_told_from_what_is_around_it() -> None:
    template = TextTemplate()
    twice = json.dumps({"content": "a", "text": "a"}, separators=(",", ":"))
    template.learn(twice, (EVENT % "a").encode())
    template.learn(CHUNK % (5, "a"), (EVENT % "a").encode() * 2)
    assert template.event(twice) is None
    assert template.event(CHUNK % (5, "b")) is None
