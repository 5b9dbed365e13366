"""A grammar over one output: what may follow, when it may end, where it begins."""

import json
import random
import re

import numpy as np
import pytest
from llguidance import LLMatcher

from deepmesh.grammars import Kind, compile_limits, llguidance_source, make_grammar
from deepmesh.wire.packed import pack_ids
from services.executor.masks.constraint import Constraint
from services.executor.masks.protocol import MaskState, Open
from services.executor.masks.vocabulary import MaskVocabulary
from tests.services.tokenizer_harness import EOS, MODEL, TOKENIZER, ids_of
from tests.tiny import VOCAB_SIZE

SCHEMA = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
THINK_END = TOKENIZER.token_to_id("</think>")


@pytest.fixture(scope="module")
def vocabulary() -> MaskVocabulary:
    return MaskVocabulary(MODEL, VOCAB_SIZE)


def constrained(
    vocabulary: MaskVocabulary,
    kind: Kind,
    text: str,
    *,
    start_after: list[int] | None = None,
    output: list[int] | None = None,
    stop_ids: tuple[int, ...] = (EOS,),
    min_len: int = 0,
) -> Constraint:
    """The output of a request whose prompt has 100 ids."""
    grammar = make_grammar(kind, text, pack_ids(start_after or []))
    matcher = LLMatcher(
        vocabulary.tokenizer, llguidance_source(grammar), log_level=0, limits=compile_limits()
    )
    assert not matcher.is_error(), matcher.get_error()
    output = output or []
    order = Open(
        slot=0,
        serial=1,
        grammar=grammar,
        output=pack_ids(output),
        position=100 + len(output),
        min_len=min_len,
        stop_ids=pack_ids(list(stop_ids)),
    )
    return Constraint(order, matcher, vocabulary)


def allowed(vocabulary: MaskVocabulary, constraint: Constraint) -> set[int]:
    """Ids that may follow."""
    row = np.zeros(vocabulary.num_words, np.int32)
    assert constraint.fill(row) is MaskState.MASK
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def state(vocabulary: MaskVocabulary, constraint: Constraint) -> MaskState:
    return constraint.fill(np.zeros(vocabulary.num_words, np.int32))


def feed(constraint: Constraint, text: str) -> None:
    for token in ids_of(text):
        constraint.consume(token)


def test_only_what_the_schema_allows_may_follow(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "json_schema", SCHEMA)
    names = {TOKENIZER.id_to_token(token) for token in allowed(vocabulary, constraint)}
    assert names
    assert all(name.startswith("{") for name in names)
    feed(constraint, '{"n": 1')
    now = allowed(vocabulary, constraint)
    assert set(ids_of("7")) | set(ids_of("}")) <= now
    assert EOS not in now  # not whole yet
    feed(constraint, "}")
    assert state(vocabulary, constraint) is MaskState.COMPLETE


def test_an_output_may_end_where_it_is_whole_only(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "regex", "(ab)+")
    assert EOS not in allowed(vocabulary, constraint)
    feed(constraint, "ab")
    assert EOS in allowed(vocabulary, constraint)
    feed(constraint, "a")
    assert EOS not in allowed(vocabulary, constraint)


def test_every_stop_id_ends_it_there_and_nowhere_else(vocabulary: MaskVocabulary) -> None:
    """Also one that the grammar could use as text: an illegal stop would cut the output short."""
    (letter,) = ids_of("a")
    constraint = constrained(vocabulary, "regex", "b(ab)*", stop_ids=(EOS, letter))
    assert letter not in allowed(vocabulary, constraint)
    feed(constraint, "b")
    assert allowed(vocabulary, constraint) >= {EOS, letter}


def test_no_stop_id_comes_below_the_minimum_length(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "regex", "a*", min_len=102)
    (letter,) = ids_of("a")
    for _ in range(2):
        assert EOS not in allowed(vocabulary, constraint)
        constraint.consume(letter)
    assert EOS in allowed(vocabulary, constraint)


def test_without_a_stop_id_it_ends_when_nothing_can_follow(vocabulary: MaskVocabulary) -> None:
    """`ignore_eos`: the end-of-text token is no way out."""
    constraint = constrained(vocabulary, "regex", "ab", stop_ids=())
    feed(constraint, "ab")
    assert state(vocabulary, constraint) is MaskState.COMPLETE


def test_control_tokens_are_no_text(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "regex", "(?s:.*)")
    control = {TOKENIZER.token_to_id(t) for t in ("</think>", "｜DSML｜", "<｜User｜>", "<think>")}
    assert not control & allowed(vocabulary, constraint)
    feed(constraint, "<")  # spelled as text they are harmless
    assert set(ids_of("/")) <= allowed(vocabulary, constraint)


def test_padding_ids_are_never_allowed() -> None:
    wide = MaskVocabulary(MODEL, VOCAB_SIZE + 45)
    constraint = constrained(wide, "regex", "(?s:.*)")
    assert max(allowed(wide, constraint)) < VOCAB_SIZE


@pytest.mark.parametrize("spelling", [[THINK_END], ids_of("</") + ids_of("think") + ids_of(">")])
def test_masks_begin_behind_the_thinking(vocabulary: MaskVocabulary, spelling: list[int]) -> None:
    """Whether the marker comes as one token or in pieces; before it anything but an end goes."""
    constraint = constrained(vocabulary, "regex", "yes|no", start_after=[THINK_END])
    for token in ids_of("Hm, < perhaps </thin"):
        now = allowed(vocabulary, constraint)
        assert token in now
        assert EOS not in now
        constraint.consume(token)
    for token in spelling:
        assert token in allowed(vocabulary, constraint)
        constraint.consume(token)
    names = {TOKENIZER.decode([token]) for token in allowed(vocabulary, constraint)}
    known = {word for word in ("yes", "ye", "y", "no", "n") if TOKENIZER.token_to_id(word)}
    assert names == known


def test_what_lies_behind_the_marker_in_its_token_counts(vocabulary: MaskVocabulary) -> None:
    """A token that ends the marker and goes on has begun the answer."""
    marker = b"</think>"
    token, rest = next(
        (token, text[cut:])
        for token in range(100, VOCAB_SIZE)
        for cut in range(1, len(marker))
        if (text := vocabulary.bytes_of(token)).startswith(marker[-cut:])
        and len(text) > cut
        and text.isascii()
    )
    before = marker[: len(marker) - (len(vocabulary.bytes_of(token)) - len(rest))].decode()
    pattern = re.escape(rest.decode()) + "ok"
    constraint = constrained(vocabulary, "regex", pattern, start_after=[THINK_END])
    feed(constraint, before)
    constraint.consume(token)
    texts = {vocabulary.bytes_of(token) for token in allowed(vocabulary, constraint)}
    assert texts
    assert texts <= {b"o", b"ok"}


def test_thinking_that_never_ends_needs_no_grammar(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "json_schema", SCHEMA, start_after=[THINK_END])
    feed(constraint, '{"n": "not a number, but thought')
    assert state(vocabulary, constraint) is MaskState.MASK


def test_free_text_with_tools_may_end_while_thinking(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "tools", "start: /a/", start_after=[THINK_END])
    assert state(vocabulary, constraint) is MaskState.FREE


def test_a_token_that_the_grammar_refuses_breaks_it_for_good(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "json_schema", SCHEMA)
    feed(constraint, "[")
    assert state(vocabulary, constraint) is MaskState.BROKEN
    feed(constraint, "{")
    assert state(vocabulary, constraint) is MaskState.BROKEN


def test_behind_the_end_nothing_is_taken(vocabulary: MaskVocabulary) -> None:
    """Overrun: tokens that were sampled behind the end must not revive anything."""
    constraint = constrained(vocabulary, "regex", "ab")
    feed(constraint, "ab")
    assert state(vocabulary, constraint) is MaskState.COMPLETE
    feed(constraint, "ab")
    assert state(vocabulary, constraint) is MaskState.BROKEN


def walk(vocabulary: MaskVocabulary, constraint: Constraint, seed: int, most: int) -> list[int]:
    """Tokens drawn from the masks, short ones preferred so that outputs end."""
    draw, output = random.Random(seed), list[int]()
    row = np.zeros(vocabulary.num_words, np.int32)
    while len(output) < most and constraint.fill(row) is MaskState.MASK:
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        ids = np.flatnonzero(bits).tolist()
        closers = [token for token in ids if vocabulary.bytes_of(token) in (b'"', b"}", b"]")]
        token = draw.choice(closers if closers and draw.random() < 0.5 else ids)
        if token == EOS:
            break
        output.append(token)
        constraint.consume(token)
    return output


@pytest.mark.parametrize("seed", range(8))
def test_a_replayed_output_leaves_the_same_masks(vocabulary: MaskVocabulary, seed: int) -> None:
    """What a restarted worker does with confirmed tokens, after each of them."""
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "id": {"type": "string", "pattern": "^[a-z]{2,6}-[0-9]+$", "maxLength": 9},
                "tags": {"type": "array", "items": {"type": "string", "pattern": "^t[0-9]$"}},
            },
            "required": ["id", "tags"],
        }
    )
    first = constrained(vocabulary, "json_schema", schema)
    output = walk(vocabulary, first, seed, most=60)
    assert len(output) > 5
    again = constrained(vocabulary, "json_schema", schema)
    for count in range(len(output) + 1):
        replayed = constrained(vocabulary, "json_schema", schema, output=output[:count])
        rows = np.zeros((2, vocabulary.num_words), np.int32)
        assert replayed.fill(rows[0]) is again.fill(rows[1])
        assert np.array_equal(rows[0], rows[1])
        assert replayed.position == again.position == 100 + count
        if count < len(output):
            again.consume(output[count])


def walked(
    vocabulary: MaskVocabulary, constraint: Constraint, drafts: list[int]
) -> tuple[int, list[bytes]]:
    """How many places have masks behind drafts, and these."""
    rows = list(np.zeros((1 + len(drafts), vocabulary.num_words), np.int32))
    constraint.fill(rows[0])
    num = constraint.walk(drafts, rows)
    return num, [row.tobytes() for row in rows[:num]]


WALKS = [
    ("json_schema", SCHEMA, '{"n": 123}', None),
    ("regex", "(ab)+c", "ababc", None),
    ("regex", "[0-9]{3}", "1234", None),
    ("tools", "start: /ab*/", "so</think>abb", [THINK_END or 0]),
    ("regex", "[a-z ]+", "so</think>then more", [THINK_END or 0]),
]


@pytest.mark.parametrize(("kind", "text", "output", "start_after"), WALKS)
def test_masks_behind_drafts_are_those_of_outputs(
    vocabulary: MaskVocabulary, kind: Kind, text: str, output: str, start_after: list[int] | None
) -> None:
    """At each position, behind right drafts and behind wrong ones; and nothing has happened."""
    draw = random.Random(1)
    tokens = ids_of(output)

    def fresh() -> Constraint:
        return constrained(vocabulary, kind, text, start_after=start_after)

    going = fresh()
    for at in range(len(tokens)):
        wrong = draw.randrange(VOCAB_SIZE)
        for drafts in (tokens[at : at + 5], [*tokens[at : at + 2], wrong, *tokens[at + 2 :][:2]]):
            num, masks = walked(vocabulary, going, drafts)
            assert 1 <= num <= 1 + len(drafts)
            plain = fresh()
            for token in tokens[:at]:
                plain.consume(token)
            for place in range(num):
                row = np.zeros(vocabulary.num_words, np.int32)
                found = plain.fill(row)
                if found is MaskState.FREE and place:
                    row[:] = vocabulary.all
                assert found in (MaskState.MASK, MaskState.FREE) or place == 0
                assert masks[place] == row.tobytes()
                if place < len(drafts):
                    plain.consume(drafts[place])
            if num <= len(drafts):  # the next place: nobody may be, or sample, there
                row = np.zeros(vocabulary.num_words, np.int32)
                is_stop = drafts[num - 1] == EOS
                assert is_stop or plain.fill(row) in (MaskState.BROKEN, MaskState.COMPLETE)
        going.consume(tokens[at])


def test_stop_ids_among_drafts_end_the_walk(vocabulary: MaskVocabulary) -> None:
    constraint = constrained(vocabulary, "regex", "a*")
    a = ids_of("a")[0]
    num, _ = walked(vocabulary, constraint, [a, EOS or 0, a, a])
    assert num == 2
    assert EOS in allowed(vocabulary, constraint)
