"""Throughput, latencies and load over the last seconds, once a second, for ten minutes."""

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from deepmesh.wire.messages import DeviceWork, ReplicaStats
from services.gateway.device_metrics import bandwidth_share, mfu
from services.gateway.exposition import kv_usage
from services.gateway.metrics import FIRST_BOUNDS, TOKEN_BOUNDS, Histogram, Metrics

KEPT_POINTS = 600
WINDOW_S = 10
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


class Sample(NamedTuple):
    """Counters at one moment."""

    at_s: float  # monotonic
    requests: int
    prompt_tokens: int
    output_tokens: int
    first: list[int]  # counts of all protocols' histograms
    between: list[int]
    devices: dict[tuple[str, int], DeviceWork]  # by replica and rank


class Figures:
    """Differences of counters that are kept anyway: nothing is done for a request or a token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._samples: deque[Sample] = deque(maxlen=WINDOW_S + 1)
        self.points: deque[dict[str, object]] = deque(maxlen=KEPT_POINTS)

    def tick(self, replicas: Sequence[ReplicaStats], now_s: float) -> None:
        """Once a second."""
        metrics = self._metrics
        self._samples.append(
            Sample(
                now_s,
                sum(metrics.requests.values()),
                sum(replica.prompt_tokens for replica in replicas),
                sum(replica.output_tokens for replica in replicas),
                _sum(metrics.first.values()),
                _sum(metrics.between.values()),
                {(each.name, work.rank): work for each in replicas for work in each.devices},
            )
        )
        self.points.append(self._point(replicas))

    def devices(self) -> list[dict[str, object]]:
        """Ranks that count their work, and the shares of their peaks that steps reached lately."""
        if not self._samples:
            return []
        old, new = self._samples[0].devices, self._samples[-1].devices
        found: list[dict[str, object]] = []
        for (replica, rank), now in sorted(new.items()):
            before = _before(now, old.get((replica, rank)))
            shares = mfu(now, before), bandwidth_share(now, before)
            found.append({"replica": replica, "rank": rank, **_named(*shares)})
        return found

    def _point(self, replicas: Sequence[ReplicaStats]) -> dict[str, object]:
        old, new = self._samples[0], self._samples[-1]
        took_s = max(new.at_s - old.at_s, 1e-9) if len(self._samples) > 1 else 1e9
        return {
            "at_ms": time.time() * 1e3,
            "requests_per_s": round(max(0, new.requests - old.requests) / took_s, 2),
            "prompt_tokens_per_s": round(max(0, new.prompt_tokens - old.prompt_tokens) / took_s, 1),
            "output_tokens_per_s": round(max(0, new.output_tokens - old.output_tokens) / took_s, 1),
            "running": sum(replica.running for replica in replicas),
            "waiting": sum(replica.waiting for replica in replicas),
            "kv_usage": round(max(map(kv_usage, replicas), default=0.0), 4),
            "ttft_ms": _quantiles(old.first, new.first, FIRST_BOUNDS),
            "itl_ms": _quantiles(old.between, new.between, TOKEN_BOUNDS),
            **_named(*_of_all(old.devices, new.devices)),
        }


def _before(now: DeviceWork, before: DeviceWork | None) -> DeviceWork | None:
    """None if the process is another one by now: it began to count anew."""
    return before if before is not None and before.steps <= now.steps else None


def _of_all(
    old: dict[tuple[str, int], DeviceWork], new: dict[tuple[str, int], DeviceWork]
) -> tuple[float | None, float | None]:
    """MFU and bandwidth share of all devices, each by the time that it was busy."""
    sums = [0.0] * 4  # FLOPs, what could have been, bytes, what could have been
    for key, now in new.items():
        before = _before(now, old.get(key)) or DeviceWork()
        busy_s = (now.busy_ns - before.busy_ns) / 1e9
        if now.peak_flops:
            sums[0] += now.flops - before.flops
            sums[1] += busy_s * now.peak_flops
        if now.peak_bytes:
            sums[2] += now.moved_bytes - before.moved_bytes
            sums[3] += busy_s * now.peak_bytes
    flops, most_flops, moved, most_bytes = sums
    return flops / most_flops if most_flops else None, moved / most_bytes if most_bytes else None


def _named(mfu: float | None, share: float | None) -> dict[str, float | None]:
    found = {"mfu": mfu, "bandwidth_share": share}
    return {name: None if value is None else round(value, 5) for name, value in found.items()}


def _sum(histograms: Iterable[Histogram]) -> list[int]:
    """Of histograms with the same bounds; empty if there are none."""
    return [sum(counts) for counts in zip(*(h.counts for h in histograms), strict=True)]


def _quantiles(
    old: Sequence[int], new: Sequence[int], bounds: Sequence[float]
) -> dict[str, float] | None:
    """In ms, of what came between two samples; None if nothing did."""
    before = old or [0] * len(new)
    counts = [b - a for a, b in zip(before, new, strict=True)]
    total = sum(counts)
    if not total:
        return None
    return {
        name: round(quantile(counts, q * total, bounds) * 1e3, 3) for name, q in QUANTILES.items()
    }


def quantile(counts: Sequence[int], rank: float, bounds: Sequence[float]) -> float:
    """The value of that rank: linear within its bin, as Prometheus does; the last bound is the
    most that can be said of what lies beyond it."""
    upto = list(accumulate(counts))
    at = bisect_left(upto, rank)
    if at >= len(bounds):
        return bounds[-1]
    below, least = (upto[at - 1], bounds[at - 1]) if at else (0, 0.0)
    return least + (bounds[at] - least) * (rank - below) / max(1, counts[at])
