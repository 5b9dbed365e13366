"""Grammar masks without a grammar: when they are ready, and when an output is complete."""

import re

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import DoneReason, Grammar
from services.executor.interface import LiveRows
from services.executor.slots import SlotTable

NEVER = 1 << 62
UNKNOWN = -1
_LENGTH = re.compile(r"\.\{(\d+)\}")


class FakeMasks:
    """Stands for the mask worker of one engine epoch.

    A mask is tagged with the slot's generation and the position it is for. It is there a set time
    after the tokens before that position were; whoever samples earlier has missed it. The masks
    allow every second id. A regex `.{N}` is complete behind N tokens, one that does not compile
    is a dead matcher, anything else never ends.
    """

    def __init__(self, num_slots: int, delay_ns: int) -> None:
        self._delay_ns = delay_ns
        self._gen = np.full(num_slots, UNKNOWN, np.int64)
        self._position = np.full(num_slots, UNKNOWN, np.int64)
        self._ready_ns = np.zeros(num_slots, np.int64)
        self._complete_at = np.full(num_slots, NEVER, np.int64)  # total_len
        self._is_dead = np.zeros(num_slots, bool)

    def missing(
        self,
        slots: SlotTable,
        live: LiveRows,
        begin_ns: int,
        sample_ns: int,
    ) -> NDArray[np.bool_]:
        """Which rows have no mask at `sample_ns`, but need one.

        The worker begins one that nobody has asked for at `begin_ns`, when the step begins.
        """
        at, masked, total = live.slots, live.masked & live.samples, slots.total_len[live.slots]
        known = (self._gen[at] == slots.gen[at]) & (self._position[at] == total)
        for slot in at[masked & (self._gen[at] != slots.gen[at])].tolist():
            self._open(slots, slot)
        fresh = at[masked & ~known]
        self._gen[fresh], self._position[fresh] = slots.gen[fresh], slots.total_len[fresh]
        self._ready_ns[fresh] = begin_ns + self._delay_ns
        return masked & (self._ready_ns[at] > sample_ns)

    def _open(self, slots: SlotTable, slot: int) -> None:
        init = slots.request(slot).init
        self._complete_at[slot], self._is_dead[slot] = NEVER, False
        grammar = init.grammar
        if grammar is not None and grammar.kind == "regex":
            self._is_dead[slot] = not _compiles(grammar)
            if found := _LENGTH.fullmatch(grammar.text):
                self._complete_at[slot] = init.prompt_len + int(found[1])

    def advance(
        self, slots: NDArray[np.int64], totals: NDArray[np.int64], ready_ns: int
    ) -> NDArray[np.uint8]:
        """Tokens became known at `ready_ns`, so that `totals` are: masks for the next position
        are begun. The DoneReason behind each last token."""
        self._position[slots] = totals
        self._ready_ns[slots] = ready_ns + self._delay_ns
        complete = totals >= self._complete_at[slots]
        reasons = np.where(complete, DoneReason.GRAMMAR, DoneReason.NONE)
        return np.where(self._is_dead[slots], DoneReason.GRAMMAR_ERROR, reasons).astype(np.uint8)

    def room(self, slots: NDArray[np.int64], totals: NDArray[np.int64]) -> NDArray[np.int64]:
        """Tokens until each output is complete, at least 1."""
        return np.maximum(1, self._complete_at[slots] - totals)


def _compiles(grammar: Grammar) -> bool:
    try:
        re.compile(grammar.text)
    except re.error:
        return False
    return True
