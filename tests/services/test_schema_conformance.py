"""JSON Schemas through the check and the masks: refused by name, or kept to."""

import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from deepmesh.grammars import compile_limits, llguidance_source
from deepmesh.wire.messages import Grammar
from deepmesh.wire.packed import pack_ids
from services.executor.masks.constraint import Constraint
from services.executor.masks.protocol import MaskState, Open
from services.executor.masks.vocabulary import MaskVocabulary
from services.tokenizer.grammar import read_constraint
from services.tokenizer.refusal import Refusal
from tests.schema_suite import Group, download, groups_of
from tests.services.tokenizer_harness import EOS, MODEL
from tests.tiny import VOCAB_SIZE

SAMPLES = Path(__file__).parents[1] / "golden" / "schemas"
MOST_TOKENS = 160
VOCABULARY = MaskVocabulary(MODEL, VOCAB_SIZE)
CLOSERS = (b'"', b"}", b"]", b"0", b"1", b"a", b'":', b"-")


def grammar_of(schema: object) -> Grammar:
    """As a request would bring it.

    Raises:
        Refusal: it cannot be kept to.
    """
    found = read_constraint("chat", {"guided_json": schema}, {}, thinking=False).grammar
    assert found is not None
    return found


def grammar_or_words(schema: object) -> Grammar | set[str]:
    """The grammar, or the words with which it is refused."""
    try:
        return grammar_of(schema)
    except Refusal as refusal:
        return set(re.findall(r"[$\w]+", refusal.detail))


def matcher_of(grammar: Grammar) -> LLMatcher:
    return LLMatcher(
        VOCABULARY.tokenizer, llguidance_source(grammar), log_level=0, limits=compile_limits()
    )


def outputs(grammar: Grammar, count: int) -> Iterator[str | None]:
    """Texts drawn from the masks; None for one that has not ended in time."""
    template = matcher_of(grammar)
    assert not template.is_error(), template.get_error()
    row = np.zeros(VOCABULARY.num_words, np.int32)
    for seed in range(count):
        draw, ids = random.Random(seed), list[int]()
        order = Open(0, 1, grammar, b"", 0, 0, pack_ids([EOS]))
        constraint = Constraint(order, template.deep_copy(), VOCABULARY)
        while True:
            state = constraint.fill(row)
            assert state is not MaskState.BROKEN
            if state is MaskState.COMPLETE or len(ids) > MOST_TOKENS:
                break
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits).tolist()
            closing = [i for i in allowed if i == EOS or VOCABULARY.bytes_of(i) in CLOSERS]
            ids.append(draw.choice(closing if closing and draw.random() < 0.7 else allowed))
            if ids[-1] == EOS:
                ids.pop()
                break
            constraint.consume(ids[-1])
        text = VOCABULARY.tokenizer.decode_bytes(ids)
        yield text.decode() if len(ids) <= MOST_TOKENS else None


def takes(matcher: LLMatcher, text: str) -> bool:
    ids = VOCABULARY.tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def keywords(schema: Any) -> set[str]:  # noqa: ANN401 - any JSON value
    """Every key, at any depth."""
    if isinstance(schema, dict):
        return set(schema).union(*map(keywords, schema.values()))
    return set().union(*map(keywords, schema)) if isinstance(schema, list) else set()


def judge(group: Group, count: int) -> Counter[str]:
    """Put one schema to the test; what came of it, by class."""
    found: Counter[str] = Counter()
    grammar = grammar_or_words(group.schema)
    if isinstance(grammar, set):
        named = keywords(group.schema)
        assert named & grammar or not named, f"{group.name}: {grammar}"
        return Counter({"refused": 1})
    found["kept"] = 1
    validator = jsonschema.Draft202012Validator(
        group.schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    for text in outputs(grammar, count):
        found["outputs" if text is not None else "cut"] += 1
        if text is not None:
            problems = [error.message for error in validator.iter_errors(json.loads(text))]
            assert not problems, f"{group.name}: {text!r}: {problems}"
    template = matcher_of(grammar)
    for instance, is_valid in group.instances:
        taken = takes(template.deep_copy(), json.dumps(instance, ensure_ascii=False))
        found[
            "valid taken" if is_valid and taken else "valid not taken" if is_valid else "bad"
        ] += 1
        assert is_valid or not taken, f"{group.name}: takes {instance!r}"
    return found


@pytest.mark.parametrize("group", groups_of(SAMPLES), ids=lambda g: g.name)
def test_outputs_validate_or_the_schema_is_refused(group: Group) -> None:
    found = judge(group, count=4)
    assert found["refused"] or found["outputs"] or found["cut"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_json_schema_test_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every completed output validates, no invalid instance passes, every refusal names a keyword.

    A cut output is one of more than 160 tokens. Valid instances that are not taken have their
    properties in another order than the schema, or escapes that the grammar does not write.
    """
    found: Counter[str] = Counter()
    for group in groups_of(download(tmp_path)):
        found += judge(group, count=4)
    with capsys.disabled():
        print(f"\nJSON-Schema-Test-Suite: {dict(found)}")
    assert found["kept"] >= 100
    assert found["outputs"] >= 4 * found["cut"]
