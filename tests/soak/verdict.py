"""What a series of samples says: memory that grows, counts that do not come down, slower thirds.

Pure functions. Samples of one process follow each other closely, so their noise is not
independent: a plain regression would call chance a leak. Times are therefore cut into bins, and the
interval of the slope is widened by what neighbouring bins have in common.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmesh.report import Json

MAX_SLOPE_MB_H = 5.0
SMALLEST_GROWTH_MB = 0.25  # over a whole run: a few pages and an arena, whatever the interval says
# Of file descriptors, sockets, threads, maps: floor of the last over that of the first third. A
# tenth may be chance, as far as there are few.
MAX_MORE, MOST_MORE = 3, 8
MAX_SLOWER = {50: 1.2, 90: 1.3, 99: 1.6}  # last third over first, by percentile
LEAST_SLOWER_MS = 2.0  # differences below are of the clock
BINS = 24
MB = 1e6


@dataclass(frozen=True)
class Slope:
    """Of a straight line through samples, with its 95 % confidence interval, per hour."""

    mean: float
    low: float
    high: float


def slope_of(times_s: Sequence[float], values: Sequence[float]) -> Slope:
    """The change of a value an hour.

    Args:
        times_s: of the samples, increasing; at least three of them differ.
    """
    times, means = _bins(np.asarray(times_s) / 3600, np.asarray(values, dtype=float))
    count = len(times)
    assert count >= 3, "three samples at least"
    centred = times - times.mean()
    spread = float((centred**2).sum())
    slope = float((centred * (means - means.mean())).sum() / spread)
    rest = means - means.mean() - slope * centred
    power = float((rest**2).sum())
    alike = float((rest[1:] * rest[:-1]).sum() / power) if power else 0.0
    alike = min(max(alike, 0.0), 0.9)
    free = max(1.0, count * (1 - alike) / (1 + alike) - 2)  # independent bins, two of them fitted
    half = _student(free) * math.sqrt(power / free / spread)
    return Slope(slope, slope - half, slope + half)


def _bins(
    times: NDArray[np.float64], values: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Means of equal stretches of time; those without a sample are left out."""
    edges = np.linspace(times[0], times[-1], BINS + 1)
    place = np.clip(np.searchsorted(edges, times, side="right") - 1, 0, BINS - 1)
    filled = [place == number for number in range(BINS) if (place == number).any()]
    return (
        np.array([times[chosen].mean() for chosen in filled]),
        np.array([values[chosen].mean() for chosen in filled]),
    )


def _student(free: float) -> float:
    """Student's t for 95 %, two-sided: within 2 % from three degrees of freedom on."""
    return 1.96 + 2.37 / free + 2.8 / free**2 + (5.6 if free < 2 else 0.0)


@dataclass(frozen=True)
class Growth:
    """The memory of one process."""

    slope: Slope  # MB an hour
    hours: float

    @property
    def problem(self) -> str:
        """Why it is a leak; empty: it is none."""
        grown = self.slope.mean * self.hours
        if self.slope.mean >= MAX_SLOPE_MB_H:
            return f"memory grows by {self.slope.mean:.1f} MB/h"
        if self.slope.low > 0 and grown > SMALLEST_GROWTH_MB:
            low, high = self.slope.low, self.slope.high
            return f"memory grows by {low:.2f} to {high:.2f} MB/h"
        return ""


def growth_of(times_s: Sequence[float], num_bytes: Sequence[float]) -> Growth:
    """What the memory of a process does."""
    slope = slope_of(times_s, [each / MB for each in num_bytes])
    return Growth(slope, (times_s[-1] - times_s[0]) / 3600)


def thirds(times_s: Sequence[float], values: Sequence[float]) -> list[list[float]]:
    """The values of each third of the time."""
    start, length = times_s[0], max(times_s[-1] - times_s[0], 1e-9)
    found: list[list[float]] = [[], [], []]
    for time_s, value in zip(times_s, values, strict=True):
        found[min(2, int(3 * (time_s - start) / length))].append(value)
    return found


def floors(times_s: Sequence[float], counts: Sequence[float]) -> tuple[float, float]:
    """Of the first and the last third: its lowest tenth. Load comes and goes, a leak stays."""
    first, _, last = thirds(times_s, counts)
    return float(np.percentile(first, 10)), float(np.percentile(last, 10))


def count_problem(what: str, first: float, last: float) -> str:
    """Why a count is not flat; empty: it is."""
    if last - first > min(max(MAX_MORE, 0.1 * first), MOST_MORE):
        return f"{what} grew from {first:g} to {last:g}"
    return ""


def percentiles_of(parts: Sequence[Sequence[float]]) -> dict[int, list[float]]:
    """Of each third, by percent."""
    return {
        percent: [float(np.percentile(part, percent)) if len(part) else math.nan for part in parts]
        for percent in MAX_SLOWER
    }


def latency_problems(name: str, rows: Mapping[int, Sequence[float]]) -> list[str]:
    """Percentiles that are higher in the last third than in the first."""
    found: list[str] = []
    for percent, values in rows.items():
        first, last = values[0], values[-1]
        if math.isnan(first) or math.isnan(last):
            found.append(f"{name} p{percent}: a third without requests")
        elif last > first * MAX_SLOWER[percent] and last - first > LEAST_SLOWER_MS:
            found.append(f"{name} p{percent} rose from {first:.1f} to {last:.1f} ms")
    return found


def as_json(growth: Growth) -> dict[str, Json]:
    """For a report."""
    slope = growth.slope
    return {
        "mb_per_h": round(slope.mean, 3),
        "mb_per_h_low": round(slope.low, 3),
        "mb_per_h_high": round(slope.high, 3),
    }
