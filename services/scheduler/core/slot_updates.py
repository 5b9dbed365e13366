"""What a step tells the executors about slots: new requests, appended blocks, copies of states."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import BlockOp, Pool, SlotInit
from deepmesh.wire.packed import BLOCK, pack_ids

from .group import Captures, StepRecord, group_step_of
from .request import Request
from .residency import Residency

MakeCopy = Callable[[int, int, bool], BlockOp]  # source, target, after the rows


class SlotUpdates:
    """Collected by rank for the rows of one step; ranks without any have no entry.

    Slot data is sent once, blocks when they are new: a steady step looks at columns only, and at
    rows one by one where something has changed.
    """

    def __init__(
        self,
        residency: Residency,
        index: NDArray[np.intp],
        of_ranks: NDArray[np.intp],
        step_id: int,
        make_copy: MakeCopy,
    ) -> None:
        self.init: dict[int, list[SlotInit]] = {}
        self.blocks: dict[int, bytes] = {}
        self.ops: dict[int, list[BlockOp]] = {}
        self._residency = residency
        self._table = residency.table
        self._slots = residency.slots
        self._make_copy = make_copy
        self._inits(index, step_id)
        self._appends(index, of_ranks)

    def capture(self, captures: list[NDArray[np.int64]], record: StepRecord) -> None:
        """Copy the states of [index, position, state block] behind their rows."""
        if not captures:
            return
        index, position, block = np.concatenate(captures).T
        row_of = np.empty(len(self._table.phase), np.intp)
        row_of[record.rows.index] = np.arange(len(record.rows.index))
        order = np.argsort(row_of[index])
        index, position, block = index[order], position[order], block[order]
        record.captures = Captures(row_of[index], position, block)
        columns: tuple[list[int], ...] = (
            (index // self._slots).tolist(),
            self._table.state[index].tolist(),
            block.tolist(),
        )
        for rank, source, target in zip(*columns, strict=True):
            self._copy(rank, source, target, after=True)

    def _copy(self, rank: int, source: int, target: int, *, after: bool) -> None:
        self.ops.setdefault(rank, []).append(self._make_copy(source, target, after))

    def _inits(self, index: NDArray[np.intp], step_id: int) -> None:
        table = self._table
        new = index[table.needs_init[index]]
        for i in new.tolist():
            request, rank = table.request_at(i), i // self._slots
            self.init.setdefault(rank, []).append(self._slot_init(request, i))
            request.first_step = request.first_step or group_step_of(step_id)
            if request.deferred_state >= 0:
                self._copy(rank, request.deferred_state, int(table.state[i]), after=False)
                self._residency.release_capture(rank, request.deferred_state, step_id)
                request.deferred_state = -1
        table.needs_init[new] = False

    def _slot_init(self, request: Request, index: int) -> SlotInit:
        generate, table = request.generate, self._table
        return SlotInit(
            slot=index % self._slots,
            gen=int(table.gen[index]),
            rid=request.rid,
            epoch=request.epoch,
            ids=pack_ids(table.ids[index, : table.confirmed[index]]),
            prompt_len=request.prompt_len,
            max_len=request.max_len,
            min_len=request.prompt_len + generate.min_tokens,
            sampling=generate.sampling,
            seed=generate.seed,
            sub_index=generate.sub_index,
            stop_ids=generate.stop_ids,
            grammar=generate.grammar,
            n_logprobs=generate.n_logprobs,
            start=int(table.confirmed_kv[index]),
            state_block=int(table.state[index]),
            traceparent=generate.traceparent,
            n_prompt_logprobs=generate.n_prompt_logprobs if request.lacks_prompt_probs else -1,
        )

    def _appends(self, index: NDArray[np.intp], of_ranks: NDArray[np.intp]) -> None:
        """Blocks of all rows whose tables grew since they were last sent."""
        table = self._table
        grown = (table.num_global[index] > table.sent_global[index]) | (
            table.window_end[index] > table.sent_window[index]
        )
        if not grown.any():
            return
        index, of_ranks = index[grown], of_ranks[grown]
        first = np.maximum(table.sent_window[index], table.window_start[index])
        parts = [
            self._entries(Pool.GLOBAL, index, table.sent_global[index], table.num_global[index]),
            self._entries(Pool.WINDOW, index, first, table.window_end[index]),
        ]
        table.sent_global[index] = table.num_global[index]
        table.sent_window[index] = table.window_end[index]
        entries = np.concatenate([entries for entries, _ in parts])
        ranks = of_ranks[np.concatenate([rows for _, rows in parts])]
        order = np.argsort(ranks, kind="stable")
        entries, ranks = entries[order], ranks[order]
        edges = np.flatnonzero(np.diff(ranks, prepend=-1)).tolist()
        for start, end in zip(edges, [*edges[1:], len(ranks)], strict=True):
            self.blocks[int(ranks[start])] = entries[start:end].tobytes()

    def _entries(
        self,
        pool: Pool,
        index: NDArray[np.intp],
        first: NDArray[np.int64],
        end: NDArray[np.int64],
    ) -> tuple[NDArray[np.void], NDArray[np.intp]]:
        """Appends of logical blocks `first` to `end` of each row, and which row each is of."""
        table = self._table
        counts = np.maximum(0, end - first)
        rows = np.repeat(np.arange(len(index)), counts)
        at = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - first, counts)
        of = index[rows]
        blocks = table.global_blocks if pool == Pool.GLOBAL else table.window_blocks
        entries = np.zeros(len(rows), BLOCK)
        entries["slot"], entries["gen"] = of % self._slots, table.gen[of]
        entries["pool"], entries["index"], entries["block"] = pool, at, blocks[of, at]
        return entries, rows
