"""Which rows of a step may sample, and under which masks: the engine's side of the mask worker."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import DoneReason
from deepmesh.wire.packed import pack_ids
from services.executor.interface import LiveRows, Sampled
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
    Opened,
)
from services.executor.masks.vocabulary import Words
from services.executor.slots import SlotTable

DRAFTS_S = 0.001  # for masks behind drafts; without them there are fewer drafts
LAST_S = 0.1  # to learn whether the last token that fits completes the output
HANG_S = 5.0  # an answer that takes so long does not come
NOWHERE = -1
UNBOUND = 1 << 20  # more drafts than any row has

Drafted = NDArray[np.int32]  # [slots, drafts]

# parent, begin, end (wall clock, ns), attributes
OnSpan = Callable[[str, int, int, dict[str, str | int | float | bool]], None]


class Masks(Protocol):
    """What the gate needs of a `MaskProcess`."""

    masks: Words

    @property
    def life(self) -> int: ...

    def send(self, messages: Sequence[Message]) -> bool: ...

    def receive(self, timeout_s: float) -> list[Message]: ...

    def give_up(self, reason: str) -> None: ...


class _Stay:
    """What a request's trace tells of its grammar."""

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent
        self.begin_ns = time.time_ns()
        self.compile_ns = 0
        self.from_cache = False
        self.problem = ""


class MaskGate:
    """Knows of every slot whether its output keeps to a grammar, and what its worker was told.

    The worker forgets everything when it dies, and so do we: each constraint is opened anew with
    the output as it is by then. Only the device stream's thread comes here.
    """

    def __init__(
        self,
        process: Masks,
        num_slots: int,
        *,
        wait_s: float,
        compile_s: float,
        on_span: OnSpan = lambda parent, begin_ns, end_ns, attributes: None,
    ) -> None:
        """
        Args:
            wait_s: how long sampling waits for masks that are not there yet; then these rows
                sample nothing in this step.
            compile_s: how long a grammar may take to compile.
        """
        self.counters: Counter[str] = Counter()
        self._process, self._wait_s, self._compile_s = process, wait_s, compile_s
        self._num_slots = num_slots
        self._on_span = on_span
        self._slots: SlotTable | None = None
        self._life = 0
        self._last_serial = 0
        self._closed: list[int] = []  # serials that the worker is still to be told of
        self._stays: dict[int, _Stay] = {}  # by slot
        self._slot_of: dict[int, int] = {}  # by serial, until it is opened
        self._resize(num_slots)

    def _resize(self, num: int) -> None:
        self._gen = np.full(num, NOWHERE, np.int64)
        self._has = np.zeros(num, bool)  # a grammar
        self._serial = np.zeros(num, np.int64)  # 0: not open at the worker
        self._told = np.full(num, NOWHERE, np.int64)  # length of the output's sequence it knows
        self._answered = np.full(num, NOWHERE, np.int64)  # position of its newest answer
        self._state = np.zeros(num, np.uint8)
        self._drafted = np.full(num, NOWHERE, np.int64)  # position whose drafts it knows
        self._walked = np.full(num, NOWHERE, np.int64)  # position whose drafts it has walked
        self._num = np.ones(num, np.int64)  # masks that there are from that position on
        self._missed = np.full(num, NOWHERE, np.int64)  # position that was waited for in vain
        self._due = np.zeros(num)  # monotonic: an answer later than this does not come
        self._num_masks = np.zeros(num, np.int64)  # for the traces, as what follows
        self._num_missed = np.zeros(num, np.int64)
        self._wait_ns = np.zeros(num, np.int64)

    # ------------------------------------------------------------ before the forward pass

    def begin(self, live: LiveRows, slots: SlotTable) -> None:
        """Tell the worker of requests that came, left, or are not where it believes them."""
        if self._slots is not slots:  # another engine epoch
            self._forget_all()
            self._slots = slots
        if self._process.life != self._life:
            self._life = self._process.life
            self._serial[:] = 0
            self._closed.clear()
            self._slot_of.clear()
        at = live.slots
        for slot in at[self._gen[at] != slots.gen[at]].tolist():
            self._enter(slots, slot)
        for slot in np.flatnonzero(self._has & (~slots.is_open | slots.done)).tolist():
            self._leave(slot)
        wants = at[self._has[at]]
        behind = (self._serial[wants] == 0) | (self._told[wants] != slots.total_len[wants])
        orders: list[Message] = []
        if self._closed:
            orders.append(Close(np.array(self._closed, "<u4").tobytes()))
            self._closed.clear()
        orders += [self._open(slots, slot) for slot in wants[behind].tolist()]
        if orders and self._life:
            self._process.send(orders)

    def _enter(self, slots: SlotTable, slot: int) -> None:
        """Another request is in the slot."""
        self._leave(slot)
        init = slots.request(slot).init
        self._gen[slot] = init.gen
        self._has[slot] = init.grammar is not None
        if init.grammar is not None:
            self._stays[slot] = _Stay(init.traceparent)
            self._num_masks[slot] = self._num_missed[slot] = self._wait_ns[slot] = 0

    def _leave(self, slot: int) -> None:
        if self._serial[slot]:
            self._closed.append(int(self._serial[slot]))
        self._serial[slot], self._has[slot] = 0, False
        if (stay := self._stays.pop(slot, None)) is not None and stay.traceparent:
            self._report(slot, stay)

    def _forget_all(self) -> None:
        for slot in np.flatnonzero(self._has).tolist():
            self._leave(slot)
        self._gen[:] = NOWHERE

    def _open(self, slots: SlotTable, slot: int) -> Open:
        init, length = slots.request(slot).init, int(slots.total_len[slot])
        assert init.grammar is not None
        if self._serial[slot]:
            self._closed.append(int(self._serial[slot]))  # told with the next step
        self._last_serial += 1
        self._serial[slot] = self._last_serial
        self._slot_of[self._last_serial] = slot
        self._told[slot], self._answered[slot] = length, NOWHERE
        self._drafted[slot] = self._walked[slot] = NOWHERE
        self._missed[slot] = NOWHERE
        self._due[slot] = time.monotonic() + self._compile_s + HANG_S
        return Open(
            slot=slot,
            serial=self._last_serial,
            grammar=init.grammar,
            output=pack_ids(slots.tokens[slot, init.prompt_len : length]),
            position=length,
            min_len=init.min_len,
            stop_ids=init.stop_ids,
        )

    def most_drafts(self, live: LiveRows, slots: SlotTable) -> NDArray[np.int64]:
        """How many drafts of each live row there may be masks behind; many where none is needed."""
        most = np.full(len(live.rows), UNBOUND, np.int64)
        rows = np.flatnonzero(live.masked)
        if len(rows):
            self._take(0.0)
            at = live.slots[rows]
            positions = slots.total_len[at]
            known = (self._serial[at] > 0) & (self._drafted[at] == positions)
            is_walked = self._walked[at] == positions
            most[rows] = np.where(known, np.where(is_walked, self._num[at] - 1, UNBOUND), 0)
        return most

    # ------------------------------------------------------------ before sampling

    def collect(self, live: LiveRows, slots: SlotTable) -> NDArray[np.uint8]:
        """The MaskState of each live row; FREE for those that sample without a grammar.

        Waits for masks that are on their way, but for none a second time: a grammar that takes
        long to compile must not hold up the others step by step.
        """
        states = np.full(len(live.rows), MaskState.FREE, np.uint8)
        rows = np.flatnonzero(live.masked & live.samples)
        if not len(rows):
            return states
        at = live.slots[rows]
        known = self._await(at, slots.total_len[at], self._wait_s)
        states[rows] = np.where(known, self._state[at], MaskState.MISSING)
        self.counters["masks"] += len(rows)
        self.counters["missed"] += int((~known).sum())
        self._num_masks[at] += known
        self._num_missed[at] += ~known
        self._give_up_hung(at[~known])
        return states

    def places(self, live: LiveRows, slots: SlotTable) -> NDArray[np.int64]:
        """At how many positions each live row may sample, drafts before all but the first; many
        where no mask is needed.

        Waits for masks behind drafts, a moment.
        """
        most = np.full(len(live.rows), UNBOUND, np.int64)
        rows = np.flatnonzero(live.masked & live.samples)
        if not len(rows):
            return most
        wide = live.drafted[rows] & (live.counts[rows] > 1)
        at, positions = live.slots[rows], slots.total_len[live.slots[rows]]
        waits = wide & (self._drafted[at] == positions) & (self._answered[at] == positions)
        until = time.monotonic() + min(self._wait_s, DRAFTS_S)
        while (waits & (self._walked[at] != positions)).any() and self._process.life == self._life:
            if (timeout_s := until - time.monotonic()) <= 0:
                break
            self._take(timeout_s)
        is_walked = wide & (self._walked[at] == positions) & (self._serial[at] > 0)
        self.counters["cut_drafts"] += int((wide & ~is_walked).sum())
        most[rows] = np.where(is_walked, self._num[at], 1)
        return most

    def mask(self, slot: int, place: int = 0) -> Words:
        """The row of bits of a slot whose state is MASK, or behind so many of its drafts."""
        return self._process.masks[slot + place * self._num_slots]

    def _await(
        self, at: NDArray[np.int64], positions: NDArray[np.int64], wait_s: float
    ) -> NDArray[np.bool_]:
        """Which of the slots have an answer for their position."""
        began, timeout_s = time.monotonic(), 0.0
        while True:
            self._take(timeout_s)
            known = (self._answered[at] == positions) & (self._serial[at] > 0)
            late = at[~known & (self._missed[at] != positions)]
            timeout_s = began + wait_s - time.monotonic()
            is_talking = self._life and self._process.life == self._life
            if not len(late) or timeout_s <= 0 or not is_talking:
                break
        waited_ns = round((time.monotonic() - began) * 1e9)
        self.counters["wait_us"] += waited_ns // 1000
        self._missed[at[~known]] = positions[~known]
        self._wait_ns[at] += waited_ns
        return known

    def _take(self, timeout_s: float) -> None:
        for message in self._process.receive(timeout_s):
            match message:
                case Answers(rows=data):
                    rows = np.frombuffer(data, ANSWER)
                    slots = rows["slot"].astype(np.int64)
                    ours = self._serial[slots] == rows["serial"]
                    at, positions, num = slots[ours], rows["position"][ours], rows["num"][ours]
                    self._answered[at], self._state[at] = positions, rows["state"][ours]
                    walked = num > 0
                    self._walked[at[walked]], self._num[at[walked]] = positions[walked], num[walked]
                case Opened():
                    slot = self._slot_of.pop(message.serial, NOWHERE)
                    if (stay := self._stays.get(slot)) is not None:
                        stay.compile_ns = message.end_ns - message.begin_ns
                        stay.from_cache, stay.problem = message.from_cache, message.problem
                case _:
                    pass  # Ready: of a life that began anew

    def _give_up_hung(self, at: NDArray[np.int64]) -> None:
        is_over = time.monotonic() > self._due[at]
        if self._life and bool((is_over & (self._serial[at] > 0)).any()):
            self.counters["hangs"] += 1
            self._process.give_up(f"a mask has been missing for more than {HANG_S:g} s")

    # ------------------------------------------------------------ behind sampling

    def settle(
        self, live: LiveRows, slots: SlotTable, states: NDArray[np.uint8], drawn: Sampled
    ) -> Sampled:
        """What became of the step, with the reasons of rows that sampled nothing.

        Args:
            states: of `collect`.
            drawn: one token for each live row, or `counts`; meaningful where it sampled.
        """
        rows = np.flatnonzero(live.masked & live.samples)
        if not len(rows):
            return drawn
        reasons = np.zeros(len(states), np.uint8)
        reasons[states == MaskState.MISSING] = DoneReason.NULL
        reasons[states == MaskState.BROKEN] = DoneReason.GRAMMAR_ERROR
        whole = states == MaskState.COMPLETE
        reasons[whole] = DoneReason.GRAMMAR
        counts = np.ones(len(states), np.int64) if drawn.counts is None else drawn.counts
        owners = np.repeat(np.arange(len(states)), counts)
        took = np.zeros(len(states), bool)
        took[rows] = (reasons[rows] == DoneReason.NONE) & drawn.finite[rows]
        given = np.flatnonzero(took[owners])
        ends = _stops(live.slots[owners[given]], slots, drawn.tokens[given])
        took[owners[given[ends]]] = False  # what ends an output is none of the worker's business
        goes = np.flatnonzero(took)
        is_last = (
            slots.total_len[live.slots[goes]] + counts[goes] >= slots.max_len[live.slots[goes]]
        )
        self._advance(live.slots[goes], slots, counts[goes], drawn.tokens[took[owners]], is_last)
        last = goes[is_last]
        reasons[last[self._completed(live.slots[last], slots, counts[last])]] = DoneReason.GRAMMAR
        if not whole.any():
            return drawn._replace(reasons=reasons)
        kept = np.flatnonzero(~whole[owners])  # a row that is complete already brings no token
        return drawn._replace(
            tokens=drawn.tokens[kept],
            logprobs=drawn.logprobs[kept],
            top_ids=[drawn.top_ids[i] for i in kept.tolist()],
            top_logprobs=[drawn.top_logprobs[i] for i in kept.tolist()],
            counts=counts * ~whole,
            reasons=reasons,
        )

    def draft(self, at: NDArray[np.int64], positions: NDArray[np.int64], ids: Drafted) -> None:
        """Drafts stand behind the tokens known by now: masks for the places behind them, too.

        Args:
            at: slots.
            positions: of the first draft of each.
            ids: [slots, drafts], int32.
        """
        wants = self._has[at] & (self._serial[at] > 0) & (self._told[at] == positions)
        if not wants.any() or not self._life:
            return
        tags = np.zeros(int(wants.sum()), TAG)
        tags["slot"], tags["serial"] = at[wants], self._serial[at[wants]]
        tags["position"] = self._drafted[at[wants]] = positions[wants]
        self._process.send([Drafts(tags.tobytes(), ids[wants].astype("<i4").tobytes())])

    def _advance(
        self,
        at: NDArray[np.int64],
        slots: SlotTable,
        counts: NDArray[np.int64],
        tokens: NDArray[np.int32],
        is_last: NDArray[np.bool_],
    ) -> None:
        """The next masks are made while the next forward pass runs; those that are waited for
        at once come first. Each slot has `counts` tokens."""
        if not len(at):
            return
        news = np.zeros(len(tokens), TOKEN)
        owner = np.repeat(np.arange(len(at)), counts)
        place = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        news["slot"], news["serial"] = at[owner], self._serial[at[owner]]
        news["position"], news["token"] = slots.total_len[at[owner]] + place, tokens
        self._told[at] = slots.total_len[at] + counts
        self._due[at] = time.monotonic() + HANG_S
        parts = ((news[is_last[owner]], True), (news[~is_last[owner]], False))
        self._process.send([Advance(part.tobytes(), urgent) for part, urgent in parts if len(part)])

    def _completed(
        self, at: NDArray[np.int64], slots: SlotTable, counts: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether the tokens that were just sent complete the output of each slot."""
        if not len(at):
            return np.zeros(0, bool)
        known = self._await(at, slots.total_len[at] + counts, LAST_S)
        return known & (self._state[at] == MaskState.COMPLETE)

    def _report(self, slot: int, stay: _Stay) -> None:
        attributes: dict[str, str | int | float | bool] = {
            "compile_ms": stay.compile_ns / 1e6,
            "from_cache": stay.from_cache,
            "masks": int(self._num_masks[slot]),
            "missed": int(self._num_missed[slot]),
            "wait_ms": int(self._wait_ns[slot]) / 1e6,
        }
        if stay.problem:
            attributes["problem"] = stay.problem
        self._on_span(stay.traceparent, stay.begin_ns, time.time_ns(), attributes)


def _stops(at: NDArray[np.int64], slots: SlotTable, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which tokens end their outputs: they are none of the worker's business."""
    found = slots.is_stop[tokens]  # of any request, so few are looked at one by one
    for i in np.flatnonzero(found).tolist():
        found[i] = int(tokens[i]) in slots.request(int(at[i])).stop_ids
    return found
