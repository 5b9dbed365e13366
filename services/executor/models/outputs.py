"""What goes in and comes out of a model besides `StepBatch`."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Tap = Callable[[str, Tensor], None]  # sees named intermediates: tests and inspection only


@dataclass(frozen=True)
class StepOutput:
    """Result of `DeepseekV41.forward`."""

    logits: Tensor  # [num_sampled, vocab_size], float32, in the order of batch.logit_tokens
    features: Tensor  # [num_tokens, targets * hidden_size], float32: what the draft stages read
    num_experts: int = -1  # that had rows, over all layers; -1: not counted


@dataclass(frozen=True)
class DraftBatch:
    """Anchors to draft from: sampled tokens that the main model has not seen yet.

    The main model must have run up to positions - 1 of each request, so that the draft stages'
    window rows are there.
    """

    anchors: Tensor  # [num_rows], int64: token ids
    positions: Tensor  # [num_rows], int64: position of each anchor
    window_blocks: Tensor  # [num_rows, max_blocks], int32, as in StepBatch


@dataclass(frozen=True)
class DraftOutput:
    """Drafts: ids[:, i] is the one for position + 1 + i."""

    ids: Tensor  # [num_rows, places], int64
    logits: Tensor  # [num_rows, places, vocab_size], float32
    confidence: Tensor  # [num_rows, places], float32: P(accepted | the earlier ones were)
