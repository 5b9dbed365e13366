"""Runs requests through a model in steps that the caller draws, over scattered blocks."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from deepmesh.wire.messages import Pool
from services.executor.batch import BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.models.outputs import StepOutput
from services.executor.weights import load_model

FIXTURE = Path(__file__).parent / "tiny-v41"

torch.set_num_threads(1)


@functools.cache
def fixture_model(numerics: str) -> DeepseekV41:
    """The random model of the fixture."""
    return load_model(FIXTURE, numerics)


def random_ids(count: int, seed: int) -> list[int]:
    """Ids of the fixture's vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 500, (count,), generator=generator).tolist()


@dataclass
class Request:
    """Ids to compute, and the blocks that they live in."""

    ids: Sequence[int]
    global_blocks: Sequence[int]
    window_blocks: Sequence[int]
    state_block: int
    done: int = 0

    def row(self, width: int, num_logits: int | None = None) -> BatchRow:
        """The next `width` ids as a row."""
        start = self.done
        return BatchRow(
            ids=self.ids[start : start + width],
            start=start,
            global_blocks=self.global_blocks,
            window_blocks=self.window_blocks,
            state_block=self.state_block,
            context=self.ids[max(0, start - 3) : start],
            num_logits=width if num_logits is None else num_logits,
        )


def cache_for(model: DeepseekV41, num_global: int, num_window: int, num_state: int) -> KvCache:
    """Pools that keep rows as the model's numerics want them."""
    packed = model.numerics != "exact"
    return KvCache(model.config, num_global, num_window, num_state, packed=packed)


def poisoned_cache(model: DeepseekV41, num_global: int, num_window: int, num_state: int) -> KvCache:
    """Pools full of NaN: reading anything before it is written shows."""
    cache = cache_for(model, num_global, num_window, num_state)
    for pool in Pool:
        for block in range(cache.num_blocks[pool]):
            cache.poison_block(pool, block)
    return cache


@dataclass
class Outputs:
    """All logits and features of one request, by position."""

    logits: Tensor
    features: Tensor


class Forward(Protocol):
    """A model, on whatever device."""

    def forward(self, batch: StepBatch, cache: KvCache) -> StepOutput:
        """See `DeepseekV41.forward`."""
        ...


def run_steps(
    model: Forward,
    cache: KvCache,
    requests: Sequence[Request],
    steps: Sequence[Sequence[tuple[int, int]]],
) -> list[Outputs]:
    """Each step is a list of (request, width); whatever is left runs in one last step."""
    logits: list[list[Tensor]] = [[] for _ in requests]
    features: list[list[Tensor]] = [[] for _ in requests]

    def step(parts: Sequence[tuple[int, int]]) -> None:
        left = [(i, min(width, len(requests[i].ids) - requests[i].done)) for i, width in parts]
        left = [(i, width) for i, width in left if width > 0]
        if not left:
            return
        out = model.forward(StepBatch.build([requests[i].row(w) for i, w in left]), cache)
        widths = [width for _, width in left]
        rows = zip(left, out.logits.split(widths), out.features.split(widths), strict=True)
        for (i, width), row_logits, row_features in rows:
            logits[i].append(row_logits)
            features[i].append(row_features)
            requests[i].done += width

    for parts in steps:
        step(parts)
    step([(i, len(request.ids)) for i, request in enumerate(requests)])
    return [Outputs(torch.cat(a), torch.cat(b)) for a, b in zip(logits, features, strict=True)]


def alone(model: DeepseekV41, ids: Sequence[int]) -> Outputs:
    """One request, whole, in one step."""
    blocks = range(-(-len(ids) // 64))
    cache = cache_for(model, len(blocks), len(blocks), 1)
    return run_steps(model, cache, [Request(ids, blocks, blocks, 0)], [])[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit (and so without NaN surprises)."""
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


def relative(a: Tensor, b: Tensor) -> float:
    """Error of a against b, relative to the norm of b."""
    return float((a - b).norm() / b.norm())
