"""Index tensors of a prefill step: what the host knows is copied once, the rest made on the device.

Nothing waits for the device. A slot or a block that is not there is -1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.rope import RopeTable
from services.executor.batch import StepBatch
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.models.plan import Angles, Ropes

MAX_SCORES = 1 << 26  # of tokens for keys, held at once
MAX_SLICE = 16384  # tokens whose keys are scored at once


@dataclass(frozen=True)
class TokenSlice:
    """Neighbouring tokens whose compressed rows are chosen together."""

    first: int
    last: int  # behind the last one
    num_keys: int  # the most that one of them sees


@dataclass(frozen=True)
class PrefillRatio:
    """Compressed rows of one ratio."""

    entries: int  # of a block
    visible: Tensor  # [num_tokens], int32: a token sees the first so many entries
    ending: Tensor  # [n], int64: tokens that complete an entry
    write_slots: Tensor  # [n], int32
    angles: Angles  # of those entries
    slices: list[TokenSlice]


@dataclass(frozen=True)
class PrefillPairs:
    """Where open groups (ratio 2) come from and go to: all int64."""

    resumed: Tensor  # indices into `ending` whose even token was in an earlier step
    resumed_blocks: Tensor
    open_tokens: Tensor  # the last token of each row that begins a group, complete or not
    open_blocks: Tensor


@dataclass(frozen=True)
class PrefillStep:
    """All inputs of a forward but the ids of its rows' contexts."""

    ids: Tensor  # [num_tokens], int32
    last_ids: Tensor  # [num_tokens, engram order], int64, as `ngram_rows` takes them
    rows: Tensor  # [num_tokens], int32
    blocks: Tensor  # [num_rows, max_blocks], int32: of the global pool
    window_slots: Tensor  # [num_tokens, sliding_window], int32, oldest first
    window_writes: Tensor  # [num_tokens], int32
    plain: Angles  # [num_tokens, rope_dim / 2], float32
    compressed: Angles
    ratios: dict[int, PrefillRatio]
    pairs: PrefillPairs
    logit_tokens: Tensor  # [num_sampled], int64


class PrefillPlanner:
    """Makes the steps of one model; keeps the angles of all positions met so far."""

    def __init__(self, config: ModelConfig, ropes: Ropes, device: torch.device) -> None:
        self._config, self._device = config, device
        self._plain = _AngleTable(ropes.plain, device)
        self._compressed = _AngleTable(ropes.compressed, device)

    def __call__(self, batch: StepBatch, last_ids: Tensor) -> PrefillStep:
        """Work out the step of `batch`; `last_ids` as `last_compressed_ids` gives them."""
        config, positions = self._config, batch.positions
        row_of = torch.repeat_interleave(torch.arange(batch.num_rows), batch.row_starts.diff())
        sources = config.kv_source_layer_ids
        ratios = sorted({config.compress_ratios[layer] for layer in sources})
        endings = [((positions + 1) % ratio == 0).nonzero().squeeze(1) for ratio in ratios]
        pairs = _pairs(batch, row_of, endings[ratios.index(2)] if 2 in ratios else None)
        host = [batch.ids.int(), last_ids, row_of, positions, batch.logit_tokens, *endings, *pairs]
        tables = [batch.global_blocks.int(), batch.window_blocks.int()]
        on_device = iter(_upload([*host, *tables], self._device))
        ids, last, rows, at, wanted = (next(on_device) for _ in range(5))
        ends = [next(on_device) for _ in ratios]
        resumed, resumed_blocks, open_tokens, open_blocks = (next(on_device) for _ in range(4))
        blocks, windows = on_device
        highest = int(positions[-1]) if batch.num_rows == 1 else int(positions.max())
        ago = torch.arange(1 - config.sliding_window, 1, device=self._device)
        seen = at.unsqueeze(1) + ago
        return PrefillStep(
            ids=ids,
            last_ids=last,
            rows=rows.int(),
            blocks=blocks,
            window_slots=_slots(windows, rows.unsqueeze(1), seen, BLOCK_TOKENS),
            window_writes=_slots(windows, rows, at, BLOCK_TOKENS),
            plain=self._plain(at, highest),
            compressed=self._compressed(at, highest),
            ratios={
                ratio: self._ratio(batch, blocks, rows, at, end, ratio)
                for ratio, end in zip(ratios, ends, strict=True)
            },
            pairs=PrefillPairs(resumed, resumed_blocks, open_tokens, open_blocks),
            logit_tokens=wanted,
        )

    def _ratio(
        self,
        batch: StepBatch,
        blocks: Tensor,
        rows: Tensor,
        at: Tensor,
        ending: Tensor,
        ratio: int,
    ) -> PrefillRatio:
        entries = BLOCK_TOKENS // ratio
        visible = (at + 1) // ratio
        completed = visible[ending] - 1
        highest = int(batch.positions.max())
        return PrefillRatio(
            entries=entries,
            visible=visible.int(),
            ending=ending,
            write_slots=_slots(blocks, rows[ending], completed, entries),
            angles=self._compressed(completed * ratio, highest),
            slices=token_slices(((batch.positions + 1) // ratio).tolist()),
        )


def token_slices(visible: Sequence[int]) -> list[TokenSlice]:
    """Tokens in turn, as many at once as memory allows."""
    slices: list[TokenSlice] = []
    first, most = 0, 0
    for token, seen in enumerate(visible):
        now = max(most, seen)
        count = token + 1 - first
        if token > first and (count * now > MAX_SCORES or count > MAX_SLICE):
            slices.append(TokenSlice(first, token, most))
            first, now = token, seen
        most = now
    if len(visible):
        slices.append(TokenSlice(first, len(visible), most))
    return slices


class _AngleTable:
    """Angles of positions, on the device."""

    def __init__(self, table: RopeTable, device: torch.device) -> None:
        self._table, self._device = table, device
        self._held: Angles | None = None

    def __call__(self, positions: Tensor, highest: int) -> Angles:
        """Those of `positions`, on the device, none above `highest`."""
        if self._held is None or highest >= self._held[0].shape[0]:
            cos, sin = self._table.upto(highest)
            self._held = cos.to(self._device), sin.to(self._device)
        return self._held[0][positions], self._held[1][positions]


def _pairs(batch: StepBatch, row_of: Tensor, ending: Tensor | None) -> list[Tensor]:
    """`PrefillPairs`, in host memory: see `models.plan`."""
    if ending is None:
        return [torch.zeros(0, dtype=torch.int64)] * 4
    states = batch.state_blocks.long()
    resumed = (batch.row_starts[row_of[ending]] == ending).nonzero().squeeze(1)
    last = batch.row_starts[1:] - 1
    # also of a complete group: the last position of a row that could not sample comes again
    even = last - batch.positions[last] % 2
    is_kept = even >= batch.row_starts[:-1]
    return [resumed, states[row_of[ending[resumed]]], even[is_kept], states[is_kept]]


def _slots(table: Tensor, rows: Tensor, entry: Tensor, entries: int) -> Tensor:
    """Slots of the pool, int32, of entries of rows; shapes as `entry`."""
    at = entry.clamp_min(0)
    block = table[rows, at // entries]
    slot = block * entries + at % entries
    return torch.where((entry < 0) | (block < 0), -1, slot).int()


def _upload(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies on the device, of one transfer from pinned memory."""
    if device.type == "cpu":
        return parts
    sizes = [-(-part.numel() * part.element_size() // 8) * 8 for part in parts]
    held = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=True)
    for part, room in zip(parts, held.split(sizes), strict=True):
        if part.numel():  # an empty array of numpy may have strides of 0
            flat = part.contiguous().view(-1).view(torch.uint8)
            room[: flat.numel()] = flat
    sent = held.to(device, non_blocking=True).split(sizes)
    return [
        room[: part.numel() * part.element_size()].view(part.dtype).view(part.shape)
        for part, room in zip(parts, sent, strict=True)
    ]
