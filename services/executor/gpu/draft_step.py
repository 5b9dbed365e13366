"""What a draft pass of one bucket reads and writes, at fixed addresses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.step.slots_portable import NO_SLOT, ROW_FIELDS
from services.executor.model_config import ModelConfig
from services.executor.models.plan import Angles


@dataclass(frozen=True)
class DraftStep:
    """A row is one request's anchor, the newest token, with a block of noise behind it."""

    rows: Tensor  # [places, rows, ROW_FIELDS], int32: what each place samples
    starts: Tensor  # [rows], int32: position of the anchor; -1 for a padding row
    ids: Tensor  # [rows · block, ], int32: anchor, noise, noise, …
    positions: Tensor  # [rows · block], int32; -1 for a padding row
    window_slots: Tensor  # [rows, sliding_window], int32: before the anchor, oldest first
    plain: Angles  # [rows · block, rope_dim / 2], float32
    block_slots: Tensor  # [rows · block, block], int64: rows of the block that a token is of
    drafts: Tensor  # [places, rows], int32: the result
    chances: Tensor  # [places, rows], float32: of the confidence head, before its sigmoid

    @property
    def num_rows(self) -> int:
        """Of the bucket."""
        return self.starts.shape[0]

    @property
    def places(self) -> int:
        """Drafts of a row."""
        return self.rows.shape[0]

    @staticmethod
    def empty(config: ModelConfig, num_rows: int, places: int, device: torch.device) -> "DraftStep":
        """All padding."""
        size, half = config.dspark_block_size, config.qk_rope_head_dim // 2
        tokens = num_rows * size

        def ints(*shape: int, value: int = -1) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        first = torch.arange(num_rows, device=device).repeat_interleave(size) * size
        return DraftStep(
            rows=ints(places, num_rows, ROW_FIELDS, value=NO_SLOT),
            starts=ints(num_rows),
            ids=ints(tokens, value=config.dspark_noise_token_id),
            positions=ints(tokens),
            window_slots=ints(num_rows, config.sliding_window),
            plain=(
                torch.zeros(tokens, half, device=device),
                torch.zeros(tokens, half, device=device),
            ),
            block_slots=first.unsqueeze(1) + torch.arange(size, device=device),
            drafts=ints(places, num_rows, value=0),
            chances=torch.zeros(places, num_rows, device=device),
        )
