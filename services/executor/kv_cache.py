"""`KvCache`: the three paged pools of one device, and whole-block operations on them."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import Pool
from kernels.attention.pools import RowFormat, RowPool
from services.executor.kv_sizes import kv_sizes
from services.executor.model_config import BLOCK_TOKENS, ModelConfig


def layout(*, packed: bool) -> str:
    """Name of what `export_block` gives.

    A kvstore must never fill a block with bytes of another layout, so this is part of the
    fingerprint: change it with the order, the shapes or the types below.
    """
    return "packed-1" if packed else "f32-1"


class KvCache:
    """Tensors by pool. Rows are packed as they are released (see `RowFormat`) or plain float32.

    Behind the last block of each pool lies the null block, always zero and never written: index
    `num_*_blocks`. Gathers of positions that do not exist are sent there, so that they read
    finite zeros whatever other blocks hold.

    Attributes:
        packed: rows are uint8 and hold FP8 or FP4; else float32, for numerics "exact".
        compressed: by KV source, [(num_global_blocks + 1) * 64 / ratio, row].
        index_keys: by KV source, [(num_global_blocks + 1) * 64 / ratio, row].
        window: [layers + draft stages, (num_window_blocks + 1) * 64, row].
        pairs: [num_state_blocks + 1, ratio-2 sources, 2, head_dim], float32: k and g of the even
            token of the open group.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_global_blocks: int,
        num_window_blocks: int,
        num_state_blocks: int,
        *,
        packed: bool = True,
        device: str = "cpu",
    ) -> None:
        self.config, self.packed = config, packed
        self.num_blocks = (num_global_blocks, num_window_blocks, num_state_blocks)
        if min(self.num_blocks) < 1:
            raise ValueError(f"each pool needs a block, not {self.num_blocks}")

        def rows(row_format: RowFormat, dim: int, *size: int) -> Tensor:
            width = row_format.row_bytes(dim) if packed else dim
            dtype = torch.uint8 if packed else torch.float32
            return torch.zeros(*size, width, dtype=dtype, device=device)

        self.compressed: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        for source in config.kv_source_layer_ids:
            entries = (num_global_blocks + 1) * BLOCK_TOKENS // config.compress_ratios[source]
            self.compressed[source] = rows(RowFormat.FP4_E4M3, config.head_dim, entries)
            self.index_keys[source] = rows(RowFormat.FP4_UE8M0, config.index_head_dim, entries)
        layers = config.num_hidden_layers + config.num_stages
        window_rows = (num_window_blocks + 1) * BLOCK_TOKENS
        self.window = rows(RowFormat.FP8, config.head_dim, layers, window_rows)
        self.pairs = torch.zeros(
            num_state_blocks + 1,
            len(config.pair_source_layer_ids),
            2,
            config.head_dim,
            device=device,
        )

    def window_pool(self, layer: int) -> RowPool:
        """Window rows of a layer or draft stage."""
        return self._pool(self.window[layer], RowFormat.FP8, self.config.head_dim)

    def compressed_pool(self, source: int) -> RowPool:
        """Compressed rows of a KV source."""
        return self._pool(self.compressed[source], RowFormat.FP4_E4M3, self.config.head_dim)

    def key_pool(self, source: int) -> RowPool:
        """Index keys of a KV source."""
        return self._pool(self.index_keys[source], RowFormat.FP4_UE8M0, self.config.index_head_dim)

    def _pool(self, rows: Tensor, row_format: RowFormat, dim: int) -> RowPool:
        return RowPool(rows, row_format if self.packed else RowFormat.FLOAT, dim)

    @staticmethod
    def block_bytes(config: ModelConfig, *, packed: bool = True) -> tuple[int, int, int]:
        """Bytes that a block of each pool takes: global, window, state."""
        state = len(config.pair_source_layer_ids) * 2 * config.head_dim * 4
        if packed:
            return *kv_sizes(config).per_block[:2], state
        width = 4 * (config.head_dim + config.index_head_dim)
        entries = sum(BLOCK_TOKENS // config.compress_ratios[i] for i in config.kv_source_layer_ids)
        layers = config.num_hidden_layers + config.num_stages
        return entries * width, BLOCK_TOKENS * layers * config.head_dim * 4, state

    def copy_block(self, pool: Pool, src: int, dst: int) -> None:
        """Copy a whole block, all layers of it."""
        for rows in self._blocks(pool):
            rows[:, self._check(pool, dst)] = rows[:, self._check(pool, src)]

    def zero_block(self, pool: Pool, block: int) -> None:
        """Fill a block with zeros."""
        for rows in self._blocks(pool):
            rows[:, self._check(pool, block)] = 0

    def poison_block(self, pool: Pool, block: int) -> None:
        """Fill a block with NaN: whoever reads it before writing it is found out."""
        for rows in self._blocks(pool):
            rows[:, self._check(pool, block)] = 0xFF  # NaN in every format that a row may have

    def export_block(
        self, pool: Pool, block: int, out: NDArray[np.uint8] | Tensor, *, waits: bool = True
    ) -> None:
        """Copy all that a block holds to host memory, or to bytes of a device.

        Layout (`layout`), numbers of several bytes in the machine's order, little-endian wherever
        this runs: a global block is, for each KV source in ascending layer, its compressed rows
        [64 / ratio, row] and then its index keys [64 / ratio, row]; a window block is
        [layers + draft stages, 64, row]; a state block is [ratio-2 sources, 2, head_dim], float32.

        Args:
            out: uint8 [block_bytes of the pool].
            waits: for the copy to be done, if it comes from a device.
        Raises:
            IndexError: there is no such block.
        """
        for part, held in self._parts(pool, block, out):
            part.copy_(held, non_blocking=not waits)

    def import_block(
        self, pool: Pool, block: int, data: NDArray[np.uint8] | Tensor, *, waits: bool = True
    ) -> None:
        """Fill a block with what `export_block` gave.

        Args:
            waits: for the copy to be done, if it goes to a device.
        Raises:
            IndexError: there is no such block.
        """
        for part, held in self._parts(pool, block, data):
            held.copy_(part, non_blocking=not waits)

    def _parts(
        self, pool: Pool, block: int, data: NDArray[np.uint8] | Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of equal shape: a view of `data`, and what the pool holds."""
        given, at = data if isinstance(data, Tensor) else torch.from_numpy(data), 0
        for rows in self._blocks(pool):
            held = rows[:, self._check(pool, block)]
            yield given[at : at + held.numel()].view(held.shape), held
            at += held.numel()
        assert at == len(given), f"{at} bytes are a {pool.name} block, not {len(given)}"

    def _check(self, pool: Pool, block: int) -> int:
        if not 0 <= block < self.num_blocks[pool]:
            raise IndexError(f"{pool.name} block {block} is not within 0..{self.num_blocks[pool]}")
        return block

    def _blocks(self, pool: Pool) -> list[Tensor]:
        """Every tensor of the pool as bytes: [outer, blocks, bytes]."""
        match pool:
            case Pool.WINDOW:
                tensors, outer = [self.window], self.window.shape[0]
            case Pool.STATE:
                tensors, outer = [self.pairs], 1
            case Pool.GLOBAL:
                sources = self.config.kv_source_layer_ids
                tensors = [x for i in sources for x in (self.compressed[i], self.index_keys[i])]
                outer = 1
        count = self.num_blocks[pool] + 1
        each = [tensor.view(torch.uint8) for tensor in tensors]
        return [flat.view(outer, count, flat.numel() // (outer * count)) for flat in each]
