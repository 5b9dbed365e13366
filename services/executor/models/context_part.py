"""One rank's part of a prompt's chunk: the rows that it gives to the other ranks and takes from
them, layer by layer (docs/decisions/0022-context-parallel-prefill.md)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from kernels.attention.pools import RowPool
from services.executor.batch import StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig
from services.executor.models.plan import entry_table, window_table


class Swap(Protocol):
    """Bytes from every rank to every rank, entered by all of them in the same order."""

    def swap(self, sent: Sequence[Tensor], num_from: Sequence[int]) -> list[Tensor]:
        """Give sent[r] (uint8, flat) to rank r; returns num_from[r] bytes of each rank r."""
        ...


@dataclass(frozen=True)
class ContextPart:
    """Positions bounds[rank] .. bounds[rank + 1] - 1 of a chunk; the last rank has its tail and
    holds the window rows and all compressed rows before the chunk, the others those below
    `shared`."""

    rank: int  # in the order of the parts
    bounds: Sequence[int]  # [ranks + 1]
    tail: int  # first position that runs through the decoder layers
    swap: Swap  # of ranks in that order
    shared: int | None = None  # ranks but the last lack compressed rows from here on; None: none

    @property
    def ranks(self) -> int:
        """How many share the chunk."""
        return len(self.bounds) - 1

    def num_above(self) -> int:
        """Tokens of this part that run through the decoder layers."""
        start, end = self.bounds[self.rank : self.rank + 2]
        return max(0, end - max(start, self.tail))

    def share_window(self, layer: int, batch: StepBatch, cache: KvCache, *, above: bool) -> None:
        """Give our last window rows of a layer to the next rank, take those before our part.

        Args:
            above: it is a decoder layer: rows before `tail` are nowhere, and nobody needs them.
        """
        config, table = cache.config, window_table(batch.window_blocks, cache)
        pool, sent = cache.window_pool(layer), [_NOTHING] * self.ranks
        rows = {rank: self._halo(rank, config, above) for rank in range(self.ranks)}
        for rank, (giver, positions) in rows.items():
            if giver == self.rank:
                sent[rank] = _stored(pool, table, positions)
        giver, positions = rows[self.rank]
        num_bytes = len(positions) * _row_bytes(pool)
        got = self.swap.swap(sent, [num_bytes * (rank == giver) for rank in range(self.ranks)])
        _store(pool, table, positions, got[giver])

    def share_before(self, batch: StepBatch, cache: KvCache) -> None:
        """The last rank gives the others what they lack of the compressed rows before the chunk."""
        if self.shared is None or self.shared >= self.bounds[0]:
            return
        last, config, places = (
            self.ranks - 1,
            cache.config,
            list[tuple[RowPool, BlockTable, Tensor]](),
        )
        for layer in config.kv_source_layer_ids:
            ratio = config.compress_ratios[layer]
            entries = torch.arange(self.shared // ratio, self.bounds[0] // ratio)
            table = entry_table(batch.global_blocks, cache, ratio)
            places += [(pool, table, entries) for pool in _entry_pools(layer, cache)]
        sizes = [len(entries) * _row_bytes(pool) for pool, _, entries in places]
        sent, counts = [_NOTHING] * self.ranks, [0] * self.ranks
        if self.rank == last:
            sent[:last] = [torch.cat([_stored(*place) for place in places])] * last
        else:
            counts[last] = sum(sizes)
        got = self.swap.swap(sent, counts)
        if self.rank != last:
            for place, data in zip(places, got[last].split(sizes), strict=True):
                _store(*place, data)

    def share_entries(self, layer: int, batch: StepBatch, cache: KvCache) -> None:
        """Give the compressed rows and index keys of our part to all, take theirs."""
        ratio = cache.config.compress_ratios[layer]
        table = entry_table(batch.global_blocks, cache, ratio)
        entries = [
            torch.arange(a // ratio, b // ratio)
            for a, b in zip(self.bounds, self.bounds[1:], strict=False)
        ]
        for pool in _entry_pools(layer, cache):
            own = _stored(pool, table, entries[self.rank])
            sent = [own if rank != self.rank else _NOTHING for rank in range(self.ranks)]
            counts = [len(part) * _row_bytes(pool) for part in entries]
            counts[self.rank] = 0
            for rank, got in enumerate(self.swap.swap(sent, counts)):
                if rank != self.rank:
                    _store(pool, table, entries[rank], got)

    def _halo(self, rank: int, config: ModelConfig, above: bool) -> tuple[int, Tensor]:
        """Who has the window rows before a rank's part, and which positions these are."""
        start = self.bounds[rank]
        first = max(0, start - config.sliding_window + 1, self.tail if above else 0)
        if above and self.bounds[rank + 1] <= self.tail:
            first = start
        return (rank - 1) % self.ranks, torch.arange(min(first, start), start)


_NOTHING = torch.zeros(0, dtype=torch.uint8)


def _entry_pools(layer: int, cache: KvCache) -> tuple[RowPool, RowPool]:
    """Compressed rows and index keys of a KV source."""
    return cache.compressed_pool(layer), cache.key_pool(layer)


def _row_bytes(pool: RowPool) -> int:
    return pool.rows.shape[1] * pool.rows.element_size()


def _slots(table: BlockTable, positions: Tensor) -> Tensor:
    return table.slots(torch.zeros_like(positions), positions)


def _stored(pool: RowPool, table: BlockTable, positions: Tensor) -> Tensor:
    return pool.rows[_slots(table, positions)].view(torch.uint8).flatten()


def _store(pool: RowPool, table: BlockTable, positions: Tensor, data: Tensor) -> None:
    if len(positions):
        rows = data.view(pool.rows.dtype).view(len(positions), -1)
        pool.rows[_slots(table, positions)] = rows
