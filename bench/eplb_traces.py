"""Routing traces for `bench eplb`: made up ones, and the tiny model's own."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
TOP_K = 6
TOPICS = 4
SMOOTH = 32
SUBJECT = 0.35  # standard deviation of what a topic adds to the logarithm of an expert's share


@dataclass(frozen=True)
class Trace:
    """Expected shares of the experts, [records, experts], rows sum to 1; top_k rows a token."""

    name: str
    shares: Array
    top_k: int = TOP_K
    counts: Array | None = None  # what came in truth, where it was recorded


def zipf(skew: float, num_experts: int, records: int, seed: int) -> Trace:
    """The same all the time; who is hot is drawn."""
    draw = np.random.default_rng(seed)
    shares = draw.permutation(np.arange(1, num_experts + 1) ** -skew)
    return Trace(f"zipf {skew:g}", np.tile(shares / shares.sum(), (records, 1)))


def drifting(skew: float, num_experts: int, records: int, seed: int, pace: float) -> Trace:
    """Every share wanders: within 128 records by a factor of e^±pace, another way each time."""
    draw = np.random.default_rng(seed)
    path = [-skew * np.log(draw.permutation(np.arange(1, num_experts + 1)))]
    for _ in range(0, records, 128):
        path.append(path[-1] + pace * draw.standard_normal(num_experts))
    at = np.arange(records) / 128
    low, part = at.astype(int), (at % 1)[:, None]
    logs = np.array(path)
    shares = _shares(logs[low] * (1 - part) + logs[low + 1] * part)
    return Trace(f"drifting {pace:g}", shares)


def bursty(skew: float, num_experts: int, records: int, seed: int) -> Trace:
    """Topics with experts of their own, whose part of the traffic comes and goes in bursts."""
    draw = np.random.default_rng(seed)
    base = -skew * np.log(draw.permutation(np.arange(1, num_experts + 1)))
    topics = _shares(base + SUBJECT * draw.standard_normal((TOPICS, num_experts)))
    level, parts = draw.standard_normal(TOPICS), list[Array]()
    for _ in range(records):
        level = 0.85 * level + 0.5 * draw.standard_normal(TOPICS)
        parts.append(np.exp(1.5 * level))
    mix = np.array(parts)
    return Trace(f"bursty {skew:g}", mix / mix.sum(1, keepdims=True) @ topics)


def _shares(logs: Array) -> Array:
    shares = np.exp(logs - logs.max(1, keepdims=True))
    return shares / shares.sum(1, keepdims=True)


Make = Callable[[int, int, int], Trace]  # experts, records, seed
SYNTHETIC: dict[str, Make] = {
    **{f"zipf {s:g}": lambda *args, s=s: zipf(s, *args) for s in (0.3, 0.5, 0.8, 1.0, 1.2)},
    "drifting 0.05": lambda *args: drifting(0.8, *args, pace=0.05),
    "drifting 0.2": lambda *args: drifting(0.8, *args, pace=0.2),
    "bursty 0.8": lambda *args: bursty(0.8, *args),
}


def draws(trace: Trace, tokens: int, draw: np.random.Generator) -> Array:
    """[records, experts]: rows of a step of so many tokens, drawn; or what was recorded."""
    if trace.counts is not None:
        return trace.counts
    return draw.multinomial(tokens * trace.top_k, trace.shares).astype(np.float64)


def recorded(model: Path, records: int, tokens: int, seed: int = 0) -> list[Trace]:
    """Each layer of a model, over steps of `tokens` prompt tokens from anywhere in the texts of
    the docs and sources, as `seed` says. Shares are the counts, smoothed over 32 records: what was
    expected is not known."""
    from bench.eplb_recording import record

    by_layer, top_k = record(model, records, tokens, seed)
    traces: list[Trace] = []
    for layer, counts in enumerate(by_layer):
        kernel = np.ones(SMOOTH) / SMOOTH
        half = SMOOTH // 2
        padded = np.concatenate((counts[:half][::-1], counts, counts[1 - half :][::-1]))
        smooth = np.stack([np.convolve(column, kernel, "valid") for column in padded.T], 1)
        shares = smooth / smooth.sum(1, keepdims=True)
        traces.append(Trace(f"tiny layer {layer}", shares, top_k, counts))
    return traces
