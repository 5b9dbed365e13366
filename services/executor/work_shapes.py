"""What a step of a model computes and moves, by its rows: FLOPs, and bytes of memory. No torch.

Counted is what the mathematics needs, not what a program happens to do: weights as the checkpoint
stores them, each once a step; experts that have rows; context rows as the packed KV formats are.
Activations, draft passes and collectives are left out.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.executor.context_parallel import token_work
from services.executor.kv_sizes import kv_sizes, window_row_bytes
from services.executor.model_config import ModelConfig
from services.executor.tensor_specs import TensorSpec, tensor_specs

_SCORING = (".indexer.wq_b.", ".indexer.weights_proj.")
_SHARED_ROWS = (".compressor.", ".indexer.wk.", ".indexer.k_norm.")
# Of the draft stages, every step feeds the window rows.
_FED = ("main_proj.weight", "main_proj.scale", "main_norm.weight", "kv_norm.weight")
_FED += ("attn.wkv.weight", "attn.wkv.scale")
_CHUNK = 1 << 16  # positions whose work is laid out at a time

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StepRows:
    """The rows of several steps, one behind the other. Every step has at least one."""

    first: Ints  # [steps]: the first row of each
    starts: Ints  # [rows]: first position
    counts: Ints  # [rows]: positions
    skips: Ints  # [rows]: first positions that leave out the upper layers
    logits: Ints  # [steps]: rows of logits
    touched: Floats  # [steps]: experts with rows, over all layers; negative: not counted
    expert_rows: Floats  # [steps]: rows of the experts held here; negative: those of its own tokens


@dataclass(frozen=True)
class _Half:
    """Layers below or above the split."""

    layers: int
    weight_bytes: int  # of everything but routed experts and scoring


class WorkShapes:
    """A model's shapes, and tables by position, so that a row costs two look-ups."""

    def __init__(self, config: ModelConfig, max_tokens: int, *, held_experts: int = 0) -> None:
        """
        Args:
            max_tokens: positions of a request, at most.
            held_experts: slots of routed experts of a layer on this rank; 0: all experts.
        """
        self._config = config
        split = config.candidate_source_layer_id
        specs = tensor_specs(config)
        experts = [spec for spec in specs if spec.expert == 0 and spec.name.startswith("layers.0.")]
        self.expert_bytes = sum(spec.num_bytes for spec in experts)
        self.expert_flops = 2.0 * sum(spec.num_parameters for spec in experts)  # of a row
        self.head_flops = 2.0 * config.vocab_size * config.hidden_size  # of a row of logits
        self.head_bytes = config.vocab_size * config.hidden_size * 2
        self._experts = held_experts or config.n_routed_experts
        layers = config.num_hidden_layers
        self._lower = _Half(split, sum(_dense(s) for s in specs if _is_lower(s, split)))
        upper = sum(_dense(s) for s in specs if not _is_lower(s, split))
        self._upper = _Half(layers - split, upper)
        self.token_bytes = _table_bytes(config, specs)
        self.write_bytes = kv_sizes(config).per_token
        self.write_bytes += (layers + config.num_stages) * window_row_bytes(config)
        self._scoring = _scoring(config, specs)
        self._table = _table(config, max_tokens)

    def count(self, rows: StepRows) -> tuple[Floats, Floats]:
        """FLOPs and bytes of each step."""
        config, table, last = self._config, self._table, len(self._table) - 1
        ends = np.minimum(rows.starts + rows.counts, last)
        starts = np.minimum(rows.starts, last)
        above = np.minimum(rows.starts + rows.skips, last)
        until = table[ends]
        # columns: FLOPs and bytes of the lower layers, then of the upper ones
        each = np.concatenate(
            (until[:, :2] - table[starts, :2], until[:, 2:] - table[above, 2:]), 1
        )
        sums = np.add.reduceat(each, rows.first)
        tokens = np.add.reduceat(rows.counts, rows.first).astype(np.float64)
        high = np.add.reduceat(rows.counts - rows.skips, rows.first).astype(np.float64)
        own = config.num_experts_per_tok * (self._lower.layers * tokens + self._upper.layers * high)
        counted = rows.expert_rows >= 0
        expert_rows = np.where(counted, rows.expert_rows, own)
        flops = sums[:, 0] + sums[:, 2] + self.head_flops * rows.logits
        flops += self.expert_flops * (expert_rows - own)  # those of its own tokens are in the table
        touched = np.where(
            rows.touched >= 0, rows.touched, self._likely(tokens, high, expert_rows, counted)
        )
        moved = sums[:, 1] + sums[:, 3] + self.expert_bytes * touched
        moved += self._lower.weight_bytes * (tokens > 0) + self._upper.weight_bytes * (high > 0)
        moved += self.token_bytes * tokens + self.write_bytes * tokens
        moved += self.head_bytes * (rows.logits > 0)
        moved += self._scoring_bytes(np.maximum.reduceat(rows.starts + rows.counts, rows.first))
        return flops.astype(np.float64), moved.astype(np.float64)

    def _likely(
        self, tokens: Floats, high: Floats, rows: Floats, counted: NDArray[np.bool_]
    ) -> Floats:
        """Experts with rows, had the router no favourites: of tokens that each choose some of all
        experts, or of rows that came to those held here."""
        config, layers = self._config, self._lower.layers + self._upper.layers
        missed = 1 - config.num_experts_per_tok / config.n_routed_experts
        ours = self._lower.layers * (1 - missed**tokens) + self._upper.layers * (1 - missed**high)
        came = layers * (1 - (1 - 1 / self._experts) ** (rows / layers))
        return self._experts * np.where(counted, came, ours)

    def _scoring_bytes(self, ends: Ints) -> Floats:
        """Weights of index sources that have more entries than they may choose."""
        found = np.zeros(len(ends))
        for least, num_bytes in self._scoring:
            found += num_bytes * (ends >= least)
        return found


def _layer(spec: TensorSpec) -> int:
    return int(spec.name.split(".")[1])


def _is_lower(spec: TensorSpec, split: int) -> bool:
    """Whether all tokens need it, those too that leave out the upper layers."""
    if not spec.name.startswith("layers."):
        return False
    is_shared_row = any(part in spec.name for part in _SHARED_ROWS)
    return _layer(spec) < split or (_layer(spec) == split and is_shared_row)


def _dense(spec: TensorSpec) -> int:
    """Bytes that a step reads, whatever its rows."""
    name = spec.name
    if name.startswith("mtp."):
        return spec.num_bytes if name.endswith(_FED) else 0
    is_rows = name in ("embed.weight", "head.weight") or ".engram.embed." in name
    is_other = spec.expert is not None or any(part in name for part in _SCORING)
    return 0 if is_rows or is_other or name.endswith("bias_vl") else spec.num_bytes


def _table_bytes(config: ModelConfig, specs: list[TensorSpec]) -> int:
    """Rows of tables that a token looks up."""
    columns = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    found = 2 * config.hidden_size
    for spec in specs:
        if ".engram.embed." in spec.name:
            found += columns * spec.num_bytes // spec.shape[0]
    return found


def _scoring(config: ModelConfig, specs: list[TensorSpec]) -> list[tuple[int, int]]:
    """Of each index source: the least context that makes it choose, and its weights' bytes."""
    found: list[tuple[int, int]] = []
    for layer in config.index_source_layer_ids:
        own = [spec for spec in specs if spec.name.startswith(f"layers.{layer}.")]
        weights = sum(s.num_bytes for s in own if any(part in s.name for part in _SCORING))
        found.append(((config.index_topk + 1) * config.compress_ratios[layer], weights))
    return found


def _table(config: ModelConfig, max_tokens: int) -> Floats:
    """[max_tokens + 1, 4]: all positions before p together; FLOPs and KV bytes read, lower layers
    first."""
    table = np.zeros((max_tokens + 1, 4))
    for start in range(0, max_tokens, _CHUNK):
        end = min(max_tokens, start + _CHUNK)
        work, into = token_work(config, start, end), table[start + 1 : end + 1]
        into[:, 0], into[:, 2] = 2.0 * work.encoder, 2.0 * work.decoder
        into[:, 1], into[:, 3] = _kv_read(config, np.arange(start, end))
    return np.cumsum(table, axis=0, out=table)


def _kv_read(config: ModelConfig, positions: Ints) -> tuple[Floats, Floats]:
    """Bytes of window rows, chosen compressed rows and scored index keys that a token reads."""
    halves = np.zeros((2, len(positions)))
    row_bytes = config.head_dim // 2 + config.head_dim // 16
    key_bytes = config.index_head_dim // 2 + config.index_head_dim // 32
    window = np.minimum(positions + 1, config.sliding_window) * float(window_row_bytes(config))
    for layer in range(config.num_hidden_layers):
        half = halves[0 if layer < config.candidate_source_layer_id else 1]
        half += window
        if ratio := config.compress_ratios[layer]:
            half += row_bytes * np.minimum((positions + 1) // ratio, config.index_topk)
        if layer in config.index_source_layer_ids:
            visible = (positions + 1) // config.compress_ratios[layer]
            keys = np.where(visible > config.index_topk, visible, 0)
            if config.uses_candidates(layer):
                most = config.candidate_topk_blocks * config.candidate_block_size
                keys = np.minimum(keys, most)
            half += key_bytes * keys
    return halves[0], halves[1]
