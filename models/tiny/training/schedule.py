"""The phases of a training run: sizes, roundings, data and learning rate."""

from dataclasses import dataclass, replace

import torch

from models.tiny.training.model import Mode
from models.tiny.training.rows import Mixture


@dataclass(frozen=True)
class Phase:
    """One stretch of training with fixed shapes; `spans` are window widths and their shares."""

    name: str
    num_tokens: int
    num_rows: int
    mode: Mode
    mixture: Mixture
    spans: tuple[tuple[int, float], ...]
    lr_first: float
    lr_last: float
    shortest_reach: int  # tokens of the longest look-up at the start; grows to the whole row


DENSE_MODE = Mode(torch.bfloat16, is_sparse=False)
SPARSE_MODE = Mode(torch.bfloat16, is_sparse=True, rounds_weights=True, rounds_activations=True)

# Most rows see a narrow window: otherwise copying is learned through the window, and the compressed
# rows get no gradient.
DENSE = Phase(
    "dense",
    1024,
    32,
    DENSE_MODE,
    Mixture(text=0.18, random_repeats=0.10, recalls=0.10, long_lookups=0.15),
    spans=((8, 0.5), (16, 0.25), (64, 0.25)),
    lr_first=1.0,
    lr_last=0.7,
    shortest_reach=160,
)
SPARSE = Phase(
    "sparse",
    2048,
    16,
    SPARSE_MODE,
    Mixture(text=0.20, random_repeats=0.04, recalls=0.08, long_lookups=0.20),
    spans=((16, 0.15), (64, 0.85)),
    lr_first=0.7,
    lr_last=0.0,
    shortest_reach=2048,
)
DRAFT = Phase(
    "draft",
    2048,
    16,
    SPARSE_MODE,
    Mixture(text=0.10, random_repeats=0.0, recalls=0.02, long_lookups=0.08),
    spans=((64, 1.0),),
    lr_first=1.0,
    lr_last=0.0,
    shortest_reach=2048,
)


def small(phase: Phase) -> Phase:
    """Return a phase that a CPU can step through, to check the code."""
    mode = replace(phase.mode, dtype=torch.float32)
    return replace(phase, num_tokens=128, num_rows=8, mode=mode, shortest_reach=128)


def lr_share(phase: Phase, progress: float, step: int, num_warmup_steps: int = 100) -> float:
    """Return the share of the base learning rate at a point of the phase."""
    share = phase.lr_first + (phase.lr_last - phase.lr_first) * min(1.0, progress)
    return share * min(1.0, (step + 1) / num_warmup_steps)


def reach(phase: Phase, progress: float) -> int:
    """Return how long a look-up may be at a point of the phase."""
    return min(phase.num_tokens, int(phase.shortest_reach + 2 * progress * phase.num_tokens))
