"""The engine's side of the mask worker, against one that says what the test wants it to say."""

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from deepmesh.grammars import make_grammar
from deepmesh.wire.messages import Capacity, DoneReason, Grammar, SlotInit
from deepmesh.wire.packed import pack_ids, unpack_ids
from services.executor.interface import LiveRows, Sampled
from services.executor.masks.gate import MaskGate
from services.executor.masks.protocol import (
    ANSWER,
    TAG,
    TOKEN,
    Advance,
    Answers,
    Close,
    Drafts,
    MaskState,
    Message,
    Open,
)
from services.executor.slots import SlotTable

STOP = 9
CAPACITY = Capacity(1, 0, 64, 64, 16, 4, 256, vocab_size=64, window=128, has_masks=True)
GRAMMAR = make_grammar("regex", "a*")


class ScriptedWorker:
    """Holds what it was told; answers when the test says so."""

    def __init__(self) -> None:
        self.masks = np.full((16, 2), -1, np.int32)  # of 4 slots, behind up to 3 drafts
        self.life = 1
        self.told: list[Message] = []
        self.mail: list[Message] = []
        self.given_up: list[str] = []
        self.num_waits = 0

    def send(self, messages: Sequence[Message]) -> bool:
        self.told += messages
        return True

    def receive(self, timeout_s: float) -> list[Message]:
        self.num_waits += timeout_s > 0
        mail, self.mail = self.mail, []
        return mail

    def give_up(self, reason: str) -> None:
        self.given_up.append(reason)
        self.life = 0

    def answer(
        self, opened: Open, position: int, state: MaskState = MaskState.MASK, num: int = 0
    ) -> None:
        rows = np.array([(opened.slot, opened.serial, position, state, num)], ANSWER)
        self.mail.append(Answers(rows.tobytes()))

    def last_open(self) -> Open:
        return [message for message in self.told if isinstance(message, Open)][-1]


class Rig:
    """One gate over one slot table."""

    def __init__(self) -> None:
        self.worker = ScriptedWorker()
        self.spans: list[dict[str, str | int | float | bool]] = []
        self.gate = MaskGate(
            self.worker,
            4,
            wait_s=0.01,
            compile_s=1.0,
            on_span=lambda parent, begin_ns, end_ns, about: self.spans.append(about),
        )
        self.slots = SlotTable(CAPACITY)
        self._gen = 0

    def admit(
        self,
        slot: int,
        ids: Sequence[int] = (5, 6, 7),
        *,
        prompt_len: int = 3,
        max_len: int = 50,
        grammar: Grammar | None = GRAMMAR,
    ) -> None:
        self._gen += 1
        self.slots.open(
            SlotInit(
                slot,
                self._gen,
                rid=self._gen,
                epoch=0,
                ids=pack_ids(list(ids)),
                prompt_len=prompt_len,
                max_len=max_len,
                stop_ids=pack_ids([STOP]),
                grammar=grammar,
                traceparent="00-" + "1" * 32 + "-" + "2" * 16 + "-01",
            )
        )

    def live(self, *slots: int, sample: bool = True) -> LiveRows:
        at = np.array(slots, np.int64)
        ones, yes = np.ones(len(at), np.int64), np.full(len(at), sample)
        masked = np.array(
            [self.slots.request(slot).init.grammar is not None for slot in slots], bool
        )
        return LiveRows(
            rows=np.arange(len(at)),
            slots=at,
            starts=self.slots.kv_len[at],
            counts=ones,
            samples=yes,
            drafted=~yes & False,
            masked=masked & sample,
        )

    def step(
        self, *slots: int, tokens: Sequence[int] = (), sample: bool = True
    ) -> tuple[NDArray[np.uint8], Sampled]:
        """One step: what the gate says of its rows, and what becomes of `tokens`."""
        live = self.live(*slots, sample=sample)
        self.gate.begin(live, self.slots)
        states = self.gate.collect(live, self.slots)
        drawn = _drawn(list(tokens) or [1] * len(slots))
        sampled = self.gate.settle(live, self.slots, states, drawn)
        self.commit(live, sampled)
        return states, sampled

    def commit(self, live: LiveRows, sampled: Sampled) -> None:
        """What the slot table does with the tokens, as far as the gate sees it."""
        counts = np.ones(len(live.rows), int) if sampled.counts is None else sampled.counts
        reasons = np.zeros(len(live.rows), int) if sampled.reasons is None else sampled.reasons
        tokens = iter(sampled.tokens.tolist())
        for slot, count, reason in zip(live.slots.tolist(), counts, reasons, strict=True):
            new = [next(tokens) for _ in range(count)]
            if reason in (DoneReason.NULL, DoneReason.GRAMMAR_ERROR) or not live.samples.all():
                new = []
            for token in new:
                self.slots.tokens[slot, self.slots.total_len[slot]] = token
                self.slots.total_len[slot] += 1
                self.slots.done[slot] |= token == STOP
            self.slots.done[slot] |= reason in (DoneReason.GRAMMAR, DoneReason.GRAMMAR_ERROR)


def _drawn(tokens: list[int]) -> Sampled:
    num = len(tokens)
    nothing = [np.zeros(0, np.int32)] * num
    return Sampled(
        np.array(tokens, np.int32),
        np.ones(num, bool),
        np.arange(num).astype(np.float32),
        nothing,
        [np.zeros(0, np.float32)] * num,
    )


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_row_without_a_grammar_is_free(rig: Rig) -> None:
    rig.admit(0, grammar=None)
    states, sampled = rig.step(0)
    assert states.tolist() == [MaskState.FREE]
    assert sampled.reasons is None
    assert rig.worker.told == []


def test_a_grammar_is_opened_with_the_first_chunk_of_the_prompt(rig: Rig) -> None:
    """So that it is compiled by the time the first token is sampled."""
    rig.admit(2)
    rig.step(2, sample=False)
    opened = rig.worker.last_open()
    assert (opened.slot, opened.position, opened.output) == (2, 3, b"")
    rig.worker.answer(opened, 3)
    states, _ = rig.step(2, tokens=[4])
    assert states.tolist() == [MaskState.MASK]
    assert len([m for m in rig.worker.told if isinstance(m, Open)]) == 1


def test_sampled_tokens_go_to_the_worker_with_their_positions(rig: Rig) -> None:
    rig.admit(0)
    rig.step(0, sample=False)
    opened = rig.worker.last_open()
    for position, token in ((3, 11), (4, 12)):
        rig.worker.answer(opened, position)
        rig.step(0, tokens=[token])
    advances = [m for m in rig.worker.told if isinstance(m, Advance)]
    rows = [np.frombuffer(m.tokens, TOKEN)[0].tolist() for m in advances]
    assert rows == [(0, opened.serial, 3, 11), (0, opened.serial, 4, 12)]


def test_a_row_without_its_mask_samples_nothing_and_tries_again(rig: Rig) -> None:
    rig.admit(0)
    states, sampled = rig.step(0)
    assert states.tolist() == [MaskState.MISSING]
    assert sampled.reasons is not None
    assert sampled.reasons.tolist() == [DoneReason.NULL]
    assert not [m for m in rig.worker.told if isinstance(m, Advance)]
    rig.worker.answer(rig.worker.last_open(), 3)
    states, _ = rig.step(0)
    assert states.tolist() == [MaskState.MASK]


def test_a_mask_is_waited_for_once_not_in_every_step(rig: Rig) -> None:
    rig.admit(0)
    rig.step(0)
    waits = rig.worker.num_waits
    assert waits > 0
    for _ in range(5):
        rig.step(0)
    assert rig.worker.num_waits == waits


def test_a_mask_of_another_position_or_request_is_not_taken(rig: Rig) -> None:
    rig.admit(0)
    rig.step(0)
    old = rig.worker.last_open()
    rig.worker.answer(old, 4)
    assert rig.step(0)[0].tolist() == [MaskState.MISSING]
    rig.slots.is_open[0] = False
    rig.admit(0)
    rig.worker.answer(old, 3)
    assert rig.step(0)[0].tolist() == [MaskState.MISSING]
    assert rig.worker.last_open().serial != old.serial


def test_a_worker_that_died_is_told_everything_again(rig: Rig) -> None:
    rig.admit(0)
    rig.step(0, sample=False)
    first = rig.worker.last_open()
    rig.worker.answer(first, 3)
    rig.step(0, tokens=[11])
    rig.worker.life = 0
    assert rig.step(0)[0].tolist() == [MaskState.MISSING]
    rig.worker.life = 2
    rig.worker.answer(first, 4)  # of the old life: nothing to believe
    assert rig.step(0)[0].tolist() == [MaskState.MISSING]
    again = rig.worker.last_open()
    assert again.serial != first.serial
    assert unpack_ids(again.output).tolist() == [11]
    assert again.position == 4
    rig.worker.answer(again, 4)
    assert rig.step(0, tokens=[12])[0].tolist() == [MaskState.MASK]


def test_a_resumed_request_brings_its_output(rig: Rig) -> None:
    """After a preemption, or from another replica."""
    rig.admit(0, ids=(5, 6, 7, 21, 22), prompt_len=3)
    rig.step(0)
    opened = rig.worker.last_open()
    assert (unpack_ids(opened.output).tolist(), opened.position) == ([21, 22], 5)


def test_a_complete_output_ends_without_a_further_token(rig: Rig) -> None:
    rig.admit(0)
    rig.admit(1, grammar=None)
    rig.step(0, 1, sample=False)
    rig.worker.answer(rig.worker.last_open(), 3, MaskState.COMPLETE)
    _, sampled = rig.step(0, 1, tokens=[30, 31])
    assert sampled.reasons is not None
    assert sampled.counts is not None
    assert sampled.reasons.tolist() == [DoneReason.GRAMMAR, DoneReason.NONE]
    assert sampled.counts.tolist() == [0, 1]
    assert sampled.tokens.tolist() == [31]
    assert sampled.logprobs.tolist() == [1.0]
    assert len(sampled.top_ids) == 1


def test_a_broken_grammar_fails_its_request_alone(rig: Rig) -> None:
    rig.admit(0)
    rig.admit(1)
    rig.step(0, 1, sample=False)
    opened = [m for m in rig.worker.told if isinstance(m, Open)]
    rig.worker.answer(opened[0], 3, MaskState.BROKEN)
    rig.worker.answer(opened[1], 3)
    _, sampled = rig.step(0, 1)
    assert sampled.reasons is not None
    assert sampled.reasons.tolist() == [DoneReason.GRAMMAR_ERROR, DoneReason.NONE]


def test_the_last_token_that_fits_may_complete_the_output(rig: Rig) -> None:
    """Then the reason is the grammar, not the length."""
    rig.admit(0, max_len=4)
    rig.step(0, sample=False)
    opened = rig.worker.last_open()
    rig.worker.answer(opened, 3)
    live = rig.live(0)
    rig.gate.begin(live, rig.slots)
    states = rig.gate.collect(live, rig.slots)
    rig.worker.answer(opened, 4, MaskState.COMPLETE)
    sampled = rig.gate.settle(live, rig.slots, states, _drawn([8]))
    assert sampled.reasons is not None
    assert sampled.reasons.tolist() == [DoneReason.GRAMMAR]
    assert sampled.counts is None  # the token counts


def test_stop_ids_are_not_the_workers_business(rig: Rig) -> None:
    rig.admit(0)
    rig.step(0, sample=False)
    rig.worker.answer(rig.worker.last_open(), 3)
    rig.step(0, tokens=[STOP])
    assert not [m for m in rig.worker.told if isinstance(m, Advance)]


def test_what_left_is_closed_and_traced(rig: Rig) -> None:
    rig.admit(0)
    rig.admit(1)
    rig.step(0, 1, sample=False)
    first = next(m for m in rig.worker.told if isinstance(m, Open))
    rig.slots.is_open[0] = False
    rig.step(1, sample=False)
    (close,) = [m for m in rig.worker.told if isinstance(m, Close)]
    assert np.frombuffer(close.serials, "<u4").tolist() == [first.serial]
    assert [set(span) >= {"compile_ms", "masks", "missed", "wait_ms"} for span in rig.spans] == [
        True
    ]


def test_another_engine_epoch_forgets_all(rig: Rig) -> None:
    rig.admit(0)
    rig.step(0)
    before = rig.worker.last_open()
    rig.slots = SlotTable(CAPACITY)
    rig.admit(0)
    rig.step(0)
    assert rig.worker.last_open().serial != before.serial
    closed = [m for m in rig.worker.told if isinstance(m, Close)]
    assert np.frombuffer(closed[-1].serials, "<u4").tolist() == [before.serial]


def test_masks_behind_drafts_are_used_as_far_as_they_are_there() -> None:
    rig = Rig()
    rig.admit(0)
    rig.admit(1)
    wide = rig.live(0, 1)._replace(counts=np.array([4, 4], np.int64), drafted=np.ones(2, bool))
    rig.gate.begin(wide, rig.slots)
    opens = [message for message in rig.worker.told if isinstance(message, Open)]
    ids = np.arange(6, dtype=np.int32).reshape(2, 3)
    rig.gate.draft(wide.slots, rig.slots.total_len[wide.slots], ids)
    told = [message for message in rig.worker.told if isinstance(message, Drafts)]
    assert np.frombuffer(told[0].tags, TAG).tolist() == [(o.slot, o.serial, 3) for o in opens]
    assert unpack_ids(told[0].ids).tolist() == list(range(6))
    assert (rig.gate.most_drafts(wide, rig.slots) >= 3).all()  # on their way
    for opened in opens:
        rig.worker.answer(opened, 3)
    rig.worker.answer(opens[0], 3, num=3)
    assert rig.gate.collect(wide, rig.slots).tolist() == [MaskState.MASK, MaskState.MASK]
    assert rig.gate.places(wide, rig.slots).tolist() == [3, 1]  # the other ones are late
    rig.worker.masks[4 + 0] = 7
    assert (rig.gate.mask(0, 1) == 7).all()
    assert rig.gate.counters["cut_drafts"] == 1
    assert rig.gate.most_drafts(wide, rig.slots)[0] == 2


def test_several_tokens_of_a_step_are_told_in_order() -> None:
    rig = Rig()
    rig.admit(0)
    rig.admit(1)
    live = rig.live(0, 1)
    rig.gate.begin(live, rig.slots)
    for opened in [message for message in rig.worker.told if isinstance(message, Open)]:
        rig.worker.answer(opened, 3)
    states = rig.gate.collect(live, rig.slots)
    drawn = _drawn([1, 2, 3, STOP])._replace(
        finite=np.ones(2, bool), counts=np.array([2, 2], np.int64)
    )
    rig.gate.settle(live, rig.slots, states, drawn)
    told = [message for message in rig.worker.told if isinstance(message, Advance)]
    rows = np.concatenate([np.frombuffer(message.tokens, TOKEN) for message in told])
    assert rows[["slot", "position", "token"]].tolist() == [(0, 3, 1), (0, 4, 2)]


def test_drafts_of_another_position_are_nothing() -> None:
    rig = Rig()
    rig.admit(0)
    wide = rig.live(0)._replace(counts=np.array([4], np.int64), drafted=np.ones(1, bool))
    rig.gate.begin(wide, rig.slots)
    ids = np.zeros((1, 3), np.int32)
    rig.gate.draft(wide.slots, rig.slots.total_len[wide.slots] + 1, ids)
    assert not [message for message in rig.worker.told if isinstance(message, Drafts)]
    assert rig.gate.most_drafts(wide, rig.slots).tolist() == [0]
    rig.worker.answer(rig.worker.last_open(), 3)
    rig.worker.answer(rig.worker.last_open(), 2, num=3)  # of a position that is gone
    rig.gate.collect(wide, rig.slots)
    assert rig.gate.places(wide, rig.slots).tolist() == [1]
