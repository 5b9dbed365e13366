"""`KvCache`: the three paged pools of one device, and whole-block operations on them."""

import torch
from torch import Tensor

from deepmesh.wire.messages import Pool
from services.executor.kv_sizes import kv_sizes
from services.executor.model_config import BLOCK_TOKENS, ModelConfig


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

    def read_block(self, pool: Pool, block: int) -> list[Tensor]:
        """Copies of all that a block holds, for transfer or comparison."""
        return [rows[:, self._check(pool, block)].clone() for rows in self._blocks(pool)]

    def write_block(self, pool: Pool, block: int, parts: list[Tensor]) -> None:
        """Put back what `read_block` gave."""
        for rows, part in zip(self._blocks(pool), parts, strict=True):
            rows[:, self._check(pool, block)] = part

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
