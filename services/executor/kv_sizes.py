"""Bytes of the KV pools in the packed formats, from the config alone. No torch."""

from dataclasses import dataclass

from services.executor.model_config import BLOCK_TOKENS, ModelConfig


@dataclass(frozen=True)
class KvSizes:
    """All in bytes of the packed formats (FP8 window, FP4 compressed rows and index keys)."""

    per_token: int  # growing part: compressed rows and index keys of all sources
    global_block: int
    window_block: int
    state_block: int
    resumable_point: int  # window rows and small state kept at a point to resume from

    @property
    def per_block(self) -> tuple[int, int, int]:
        """In the order of `messages.Pool`: global, window, state."""
        return self.global_block, self.window_block, self.state_block


def window_row_bytes(config: ModelConfig) -> int:
    """One window row of one layer: FP8 and a UE8M0 scale for every 32 channels."""
    return config.head_dim + config.head_dim // 32


def compressed_entry_bytes(config: ModelConfig) -> int:
    """FP4 row with an E4M3 scale per 16 channels, and its index key with UE8M0 per 32."""
    row = config.head_dim // 2 + config.head_dim // 16
    key = config.index_head_dim // 2 + config.index_head_dim // 32
    return row + key


def kv_sizes(config: ModelConfig) -> KvSizes:
    """Sizes of the three pools (docs/architecture.md, KV classes)."""
    entry = compressed_entry_bytes(config)
    entries = sum(BLOCK_TOKENS // config.compress_ratios[i] for i in config.kv_source_layer_ids)
    layers = config.num_hidden_layers + config.num_stages
    pairs = len(config.pair_source_layer_ids)
    # An open pair is k and g of one token in float32; the Engram ids are int32.
    state = pairs * 2 * config.head_dim * 4
    if config.engram_layer_ids:
        state += config.context_ids * 4
    return KvSizes(
        per_token=entries * entry // BLOCK_TOKENS,
        global_block=entries * entry,
        window_block=BLOCK_TOKENS * layers * window_row_bytes(config),
        state_block=state,
        resumable_point=config.sliding_window * layers * window_row_bytes(config) + state,
    )


def exact_halo(config: ModelConfig) -> int:
    """Tokens to recompute for exact window rows of every layer: W + (L - 1)(W - 1)."""
    window = config.sliding_window
    return window + (config.num_hidden_layers - 1) * (window - 1)
