"""`KvCache`: the three paged pools of one device, and whole-block operations on them."""

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import Pool
from services.executor.kv_sizes import kv_sizes
from services.executor.model_config import BLOCK_TOKENS, ModelConfig

# What `export_block` gives. A kvstore must never fill a block with bytes of another layout, so
# this is part of the fingerprint: change it with the order, the shapes or the type below.
LAYOUT = "f32-1"


class KvCache:
    """Tensors by pool. Rows hold float32, rounded to the cache formats unless `exact`.

    Behind the last block of each pool lies the null block, always zero and never written: index
    `num_*_blocks`. Gathers of positions that do not exist are sent there, so that they read
    finite zeros whatever other blocks hold.

    Attributes:
        compressed: by KV source, [(num_global_blocks + 1) * 64 / ratio, head_dim].
        index_keys: by KV source, [(num_global_blocks + 1) * 64 / ratio, index_head_dim].
        window: [layers + draft stages, (num_window_blocks + 1) * 64, head_dim].
        pairs: [num_state_blocks + 1, ratio-2 sources, 2, head_dim]: k and g of the even token
            of the open group.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_global_blocks: int,
        num_window_blocks: int,
        num_state_blocks: int,
        *,
        device: str = "cpu",
    ) -> None:
        self.config = config
        self.num_blocks = (num_global_blocks, num_window_blocks, num_state_blocks)
        if min(self.num_blocks) < 1:
            raise ValueError(f"each pool needs a block, not {self.num_blocks}")
        dim, index_dim = config.head_dim, config.index_head_dim

        def rows(blocks: int, per_block: int, *tail: int) -> Tensor:
            return torch.zeros((blocks + 1) * per_block, *tail, device=device)

        self.compressed: dict[int, Tensor] = {}
        self.index_keys: dict[int, Tensor] = {}
        for source in config.kv_source_layer_ids:
            entries = BLOCK_TOKENS // config.compress_ratios[source]
            self.compressed[source] = rows(num_global_blocks, entries, dim)
            self.index_keys[source] = rows(num_global_blocks, entries, index_dim)
        layers = config.num_hidden_layers + config.num_stages
        self.window = torch.zeros(
            layers, (num_window_blocks + 1) * BLOCK_TOKENS, dim, device=device
        )
        self.pairs = rows(num_state_blocks, 1, len(config.pair_source_layer_ids), 2, dim)

    @staticmethod
    def bytes_per_block(config: ModelConfig) -> tuple[int, int, int]:
        """Bytes of a block of each pool in the packed formats: global, window, state."""
        return kv_sizes(config).per_block

    @staticmethod
    def float_bytes_per_block(config: ModelConfig) -> tuple[int, int, int]:
        """Bytes that a block of each pool takes here, in float32."""
        width = 4 * (config.head_dim + config.index_head_dim)
        entries = sum(BLOCK_TOKENS // config.compress_ratios[i] for i in config.kv_source_layer_ids)
        layers = config.num_hidden_layers + config.num_stages
        pairs = len(config.pair_source_layer_ids)
        return (
            entries * width,
            BLOCK_TOKENS * layers * config.head_dim * 4,
            pairs * 2 * config.head_dim * 4,
        )

    def copy_block(self, pool: Pool, src: int, dst: int) -> None:
        """Copy a whole block, all layers of it."""
        for rows in self._blocks(pool):
            rows[:, self._check(pool, dst)] = rows[:, self._check(pool, src)]

    def zero_block(self, pool: Pool, block: int) -> None:
        """Fill a block with zeros."""
        for rows in self._blocks(pool):
            rows[:, self._check(pool, block)] = 0.0

    def poison_block(self, pool: Pool, block: int) -> None:
        """Fill a block with NaN: whoever reads it before writing it is found out."""
        for rows in self._blocks(pool):
            rows[:, self._check(pool, block)] = float("nan")

    def export_block(self, pool: Pool, block: int, out: NDArray[np.uint8]) -> None:
        """Copy all that a block holds to host memory.

        Layout (`LAYOUT`), all float32 in the machine's byte order, little-endian wherever this
        runs: a global block is, for each KV source in ascending layer, its compressed rows
        [64 / ratio, head_dim] and then its index keys [64 / ratio, index_head_dim]; a window
        block is [layers + draft stages, 64, head_dim]; a state block is
        [ratio-2 sources, 2, head_dim].

        Args:
            out: uint8 [float_bytes_per_block of the pool], 4-byte aligned.
        Raises:
            IndexError: there is no such block.
        """
        for part, held in self._parts(pool, block, out):
            part.copy_(held)

    def import_block(self, pool: Pool, block: int, data: NDArray[np.uint8]) -> None:
        """Fill a block with what `export_block` gave.

        Raises:
            IndexError: there is no such block.
        """
        for part, held in self._parts(pool, block, data):
            held.copy_(part)

    def _parts(
        self, pool: Pool, block: int, data: NDArray[np.uint8]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Pairs of equal shape: a view of `data`, and what the pool holds."""
        floats, at = torch.from_numpy(data.view(np.float32)), 0
        for rows in self._blocks(pool):
            held = rows[:, self._check(pool, block)]
            yield floats[at : at + held.numel()].view(held.shape), held
            at += held.numel()
        assert at == len(floats), f"{4 * at} bytes are a {pool.name} block, not {len(data)}"

    def _check(self, pool: Pool, block: int) -> int:
        if not 0 <= block < self.num_blocks[pool]:
            raise IndexError(f"{pool.name} block {block} is not within 0..{self.num_blocks[pool]}")
        return block

    def _blocks(self, pool: Pool) -> list[Tensor]:
        """Views [outer, blocks, rows, …] of every tensor of the pool."""
        count = self.num_blocks[pool] + 1
        if pool is Pool.WINDOW:
            return [self.window.unflatten(1, (count, BLOCK_TOKENS))]
        if pool is Pool.STATE:
            return [self.pairs.unflatten(0, (1, count))]
        return [
            rows.unflatten(0, (1, count, -1))
            for source in self.config.kv_source_layer_ids
            for rows in (self.compressed[source], self.index_keys[source])
        ]
