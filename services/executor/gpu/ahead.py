"""What the launching thread knows of each slot: bounds that steps in flight can only fall short of.

The tokens of these steps are not known yet, nor whether they end a request. A step that falls
short, because a mask was missing or a request is over, says so when it is settled.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Capacity, SlotInit
from services.executor.interface import LiveRows
from services.executor.slots import SlotTable

_UNKNOWN = 0  # in the place of ids that only the device knows


class Shortfall(NamedTuple):
    """What came of rows that were launched, one array element each."""

    slots: NDArray[np.int64]
    gens: NDArray[np.uint32]
    positions: NDArray[np.int64]  # that the row did not get to
    tokens: NDArray[np.int64]  # that it did not give
    ended: NDArray[np.bool_]  # the request is done


class AheadSlots(SlotTable):
    """The `SlotTable` of a host that is behind: rows are resolved to where they can get at most.

    A request with a grammar may miss a mask, and one with drafts may get none of them right, so
    its rows go on behind the length at which it ends if all went well, as if it stood right before
    that: the device knows.
    """

    def __init__(
        self,
        capacity: Capacity,
        *,
        on_open: Callable[[SlotInit], None],
        on_append: Callable[[NDArray[np.void]], None],
        on_end: Callable[[NDArray[np.int64]], None],
    ) -> None:
        """
        Args:
            on_open, on_append: called with what was found to be right, to tell the device.
            on_end: slots whose requests are over, though the device may not know it.
        """
        super().__init__(capacity)
        self._on_open, self._on_append, self._on_end = on_open, on_append, on_end
        self._ended = np.zeros(capacity.num_slots, bool)
        # rows may give fewer tokens than they could: for want of a mask, or behind drafts
        self._may_miss = np.zeros(capacity.num_slots, bool)
        self._beyond = np.zeros(capacity.num_slots, np.int64)  # taken off while a step is resolved
        self._known = np.zeros(capacity.num_slots, np.int64)  # ids that came with the request
        self._news: deque[Shortfall] = deque()  # appended to by another thread

    def open(self, init: SlotInit) -> None:
        """A request enters a slot."""
        super().open(init)
        slot = init.slot
        self._ended[slot], self._known[slot] = False, self.total_len[slot]
        self._may_miss[slot], self._beyond[slot] = init.grammar is not None, 0
        self._on_open(init)

    def append(self, blocks: NDArray[np.void]) -> None:
        """Block tables grow."""
        super().append(blocks)
        if len(blocks):
            self._on_append(blocks)

    def fail(self, rows: NDArray[np.void]) -> None:
        """A step broke off before it was launched."""
        before = self.done
        self.done = np.zeros_like(before)
        super().fail(rows)
        self._end(np.flatnonzero(self.done))
        self.done = before

    def hear(self, news: Shortfall) -> None:
        """Called by the thread that settles; the next step is resolved accordingly."""
        self._news.append(news)

    def catch_up(self) -> None:
        """Take what was heard of."""
        while self._news:
            news = self._news.popleft()
            ours = self.is_open[news.slots] & (self.gen[news.slots] == news.gens)
            slots = news.slots[ours]
            self.kv_len[slots] -= news.positions[ours]
            self.total_len[slots] -= news.tokens[ours]
            self._end(slots[news.ended[ours]])

    def _end(self, slots: NDArray[np.int64]) -> None:
        fresh = slots[~self._ended[slots]]
        if len(fresh):
            self._ended[fresh] = True
            self._on_end(fresh)

    def resolve(self, rows: NDArray[np.void]) -> LiveRows:
        """Rows that may compute something, with the furthest starts that they can have."""
        self._move(self._beyond)  # of a step that was not launched
        self._beyond = self._may_miss * np.maximum(0, self.total_len - self.max_len + 1)
        self._move(-self._beyond)
        self.done = self._ended | (self.total_len >= self.max_len)
        live = super().resolve(rows)
        # where a row stands is a bound, and so is the room behind it: the device cuts its drafts
        asked = rows["q"][live.rows].astype(np.int64)
        return live._replace(counts=np.where(live.drafted, asked, live.counts))

    def _move(self, by: NDArray[np.int64]) -> None:
        self.kv_len += by
        self.total_len += by

    def project(self, live: LiveRows, step_id: int) -> None:
        """The step is launched: take for granted that every row gets as far as it can."""
        slots = live.slots
        given = most_tokens(live)
        for place in range(int(given.max(initial=0))):
            giving = slots[given > place]
            at = self.total_len[giving] + place
            fits = at < self.tokens.shape[1]
            self.tokens[giving[fits], at[fits]] = _UNKNOWN
        self._move(self._beyond)
        self._beyond = np.zeros_like(self._beyond)
        self._may_miss[slots[given > 1]] = True
        self.kv_len[slots] += live.counts
        self.total_len[slots] += given
        self.producer_step[slots] = step_id

    def newest(self, live: LiveRows) -> NDArray[np.bool_]:
        """Rows of one output token whose id is the newest of its request, wherever it came from,
        and of drafts behind it: those that the device can compute from its slot alone."""
        at, starts = live.slots, live.starts
        is_output, is_one = starts >= self.prompt_len[at], (live.counts == 1) | live.drafted
        return live.samples & is_one & is_output & (starts == self.total_len[at] - 1)

    def check_known(self, live: LiveRows) -> None:
        """Ids of these rows came with their requests."""
        known = live.starts + live.counts <= self._known[live.slots]
        assert known.all(), f"row {live.rows[~known][0]}: only the device knows its ids"


def most_tokens(live: LiveRows) -> NDArray[np.int64]:
    """That each row can give: one, or one for each of its positions if these hold drafts."""
    return np.where(live.samples, np.where(live.drafted, live.counts, 1), 0)
