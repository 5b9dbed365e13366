"""What a GPU keeps of each request, by slot: changed by small copies in the stream's order."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import Capacity, Pool, SlotInit
from deepmesh.wire.packed import unpack_ids
from kernels.step.drafts_portable import DraftArrays, DraftState, DraftTables
from kernels.step.slots_portable import (
    ROW_FIELDS,
    SlotArrays,
    advance_rows,
    apply_changes,
    begin_rows,
    plan_entries,
    plan_tokens,
    stamp,
)
from services.executor.gpu.decode_step import DecodeStep
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.models.plan import Ropes
from services.executor.speculation import scratch_blocks

MAX_STOPS = 32  # ids by which the device ends a request; the host sees to more of them
_NONE = -1


class SlotChanges:
    """Elements of the state to set before a step, the last value of each counts."""

    def __init__(self) -> None:
        self._parts: list[NDArray[np.int32]] = []

    def add(self, first: int, values: Sequence[int] | NDArray[np.int32]) -> None:
        """Consecutive elements."""
        part = np.empty((len(values), 2), np.int32)
        part[:, 0], part[:, 1] = np.arange(first, first + len(values)), values
        self._parts.append(part)

    def scatter(self, where: NDArray[np.int64], values: NDArray[np.int64]) -> None:
        """Elements here and there."""
        self._parts.append(np.stack((where, values), 1).astype(np.int32))

    def take(self) -> NDArray[np.int32]:
        """[count, 2]: index and value, each index once; they are forgotten."""
        parts, self._parts = self._parts, []
        if len(parts) <= 1:
            return parts[0] if parts else np.empty((0, 2), np.int32)
        changes = np.concatenate(parts)
        order = np.argsort(changes[:, 0], kind="stable")
        where = changes[order, 0]
        return changes[order[np.append(where[1:] != where[:-1], True)]]


class DeviceSlots:
    """State of all slots on the device, and the kernels that steps run over it.

    Only the launching thread comes here. `changes` collects what the next `apply` brings.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        compressed_ids: Tensor,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """`max_rows`: of a step, padding included."""
        self._capacity = capacity
        self.max_blocks = -(-capacity.max_model_len // BLOCK_TOKENS)
        self._order, self._vocab_size = config.engram_max_ngram_size, config.vocab_size
        self.arrays = SlotArrays.of(
            capacity.num_slots, self._order, MAX_STOPS, self.max_blocks, device
        )
        self.changes = SlotChanges()
        self.rows = torch.full((max_rows, ROW_FIELDS), -1, dtype=torch.int32, device=device)
        self.positions = torch.full((max_rows,), -1, dtype=torch.int32, device=device)
        arrays = self.arrays
        fields = (arrays.kv_len, arrays.max_len, arrays.done, arrays.state_block, arrays.drafted)
        self._kv_len, self._max_len, self._done, *others = map(arrays.start, fields)
        self._state_block, self._drafted = others
        self._recent, self._stops = arrays.start(arrays.recent), arrays.start(arrays.stops)
        self._tables = {
            Pool.GLOBAL: arrays.start(arrays.global_blocks),
            Pool.WINDOW: arrays.start(arrays.window_blocks),
        }
        ropes, last = Ropes(config), capacity.max_model_len - 1
        if capacity.draft_len:  # whose blocks reach beyond the last position
            last += config.dspark_block_size
        self._compressed_ids = compressed_ids.to(device)
        plain, turned = ropes.plain.upto(last), ropes.compressed.upto(last)
        self._angles = tuple(x.to(device) for x in (*plain, *turned))

    # ------------------------------------------------------------ changes that steps bring

    def open(self, init: SlotInit) -> None:
        """A request enters a slot; see `SlotTable.open`, which has checked it."""
        ids = unpack_ids(init.ids)
        slot, changes = init.slot, self.changes
        fields = (self._kv_len, self._max_len, self._done, self._state_block, self._drafted)
        values = np.array((init.start, init.max_len, 0, init.state_block, _NONE))
        changes.scatter(np.array(fields) + slot, values)
        self.set_recent(slot, ids)
        stops = unpack_ids(init.stop_ids)
        changes.add(self._stops + slot * MAX_STOPS, _first(stops, MAX_STOPS))

    def set_recent(self, slot: int, ids: NDArray[np.int32]) -> None:
        """All ids up to the one that is computed next."""
        newest = ids[: -self._order - 1 : -1]
        self.changes.add(self._recent + slot * self._order, _first(newest, self._order))

    def append(self, blocks: NDArray[np.void]) -> None:
        """Block tables grow (packed.BLOCK, checked)."""
        for pool, start in self._tables.items():
            own = blocks[blocks["pool"] == pool]
            where = start + own["slot"].astype(np.int64) * self.max_blocks + own["index"]
            self.changes.scatter(where, own["block"].astype(np.int64))

    def end(self, slots: NDArray[np.int64]) -> None:
        """Requests are done: rows that follow are null rows."""
        self.changes.scatter(self._done + slots, np.ones(len(slots), np.int64))

    # ------------------------------------------------------------ kernels of a step

    def apply(self, changes: int, count: int) -> None:
        """Carry out changes from an address; see `apply_changes`."""
        apply_changes(self.arrays.state, changes, count)

    def stamp(self, *out: int) -> None:
        """The device's time to these addresses."""
        for address in out:
            stamp(self.rows, address)

    def begin(self, given: int, first: int, count: int, stamp: int = 0) -> None:
        """Rows `first` … of the step, from an address; see `begin_rows`."""
        rows, positions = self.part(first, count)
        begin_rows(rows, positions, given, count, self.arrays, stamp)

    @property
    def plain(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions, as layers without compressed rows rotate."""
        return self._angles[0], self._angles[1]

    def draft_state(self, num_tokens: int) -> DraftState:
        """What drafts of these slots need, for steps of up to so many tokens."""
        capacity, places = self._capacity, self._capacity.draft_len
        drafts = DraftArrays.of(capacity.num_slots, places, self.rows.device)
        tables = DraftTables.of(self.rows, self.positions, places, num_tokens)
        spare = capacity.num_state_blocks, scratch_blocks(places)
        return DraftState(self.arrays, drafts, tables, spare, self._vocab_size)

    def plan(self, step: DecodeStep, drafts: DraftState | None = None) -> None:
        """Fill the index tensors from as many of the step's first rows, or of its tokens if some
        of them may stand behind drafts."""
        rows, positions = self.part(0, step.num_tokens)
        behind = None
        if drafts is not None:
            held = drafts.tables
            rows, positions = held.tokens[: step.num_tokens], held.starts[: step.num_tokens]
            behind = held.place_of, drafts.drafts.ids, drafts.spare
        cosines = (*step.plain, *step.compressed)
        tokens = (step.ids, step.last_ids, step.blocks, step.state_blocks)
        out = (*tokens, step.window_slots, step.window_writes, *cosines)
        tables = (self._compressed_ids, *self._angles)
        plan_tokens(rows, positions, self.arrays, tables, out, BLOCK_TOKENS, behind)
        step.positions.copy_(positions)
        for ratio, own in step.ratios.items():
            out = (own.slots, own.visible, own.write_slots, *own.angles)
            turned = self._angles[2], self._angles[3]
            plan_entries(rows, positions, self.arrays, turned, out, BLOCK_TOKENS, ratio)

    def advance(
        self,
        first: int,
        count: int,
        sampled: tuple[Tensor, Tensor],
        results: tuple[int, int],
        stamp: int = 0,
    ) -> None:
        """Write back what rows `first` … did; see `advance_rows`."""
        rows, _ = self.part(first, count)
        advance_rows(rows, count, sampled, self.arrays, self._vocab_size, results, stamp)

    def part(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Rows `first` … and their positions."""
        return self.rows[first : first + count], self.positions[first : first + count]


def _first(values: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """The first ones, _NONE behind them."""
    kept = np.full(count, _NONE, np.int32)
    some = values[:count]
    kept[: len(some)] = some
    return kept
