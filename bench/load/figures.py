"""Latencies and rates of a set of answers. Pure functions."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.load.http import Answer
from deepmesh.report import Json

PERCENTILES = (50, 90, 99)
MAX_KINDS = 8  # of errors, named in the report


@dataclass(frozen=True)
class Limits:
    """What a request must keep to count as good; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def as_json(self) -> dict[str, Json]:
        """Those that are set."""
        found = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: limit for name, limit in found.items() if limit is not None}

    def keeps(self, answer: Answer) -> bool:
        """Whether a good answer came in time."""
        pairs = (
            (self.ttft_ms, ttft_ms(answer)),
            (self.tpot_ms, tpot_ms(answer)),
            (self.e2e_ms, e2e_ms(answer)),
        )
        return all(limit is None or value <= limit for limit, value in pairs)


@dataclass
class Window:
    """What was measured: answers that were due between two moments, and who worked meanwhile."""

    start_s: float
    end_s: float
    answers: Sequence[Answer]  # all, those outside the window, too
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])  # by process

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s

    @property
    def due(self) -> list[Answer]:
        """Answers to what was due within it."""
        return [a for a in self.answers if self.start_s <= a.due_s <= self.end_s]

    @property
    def tokens(self) -> float:
        """Output tokens that came within it. A token whose bytes end no character brings no event:
        events count as many tokens as those of their answer do on average."""
        total = 0.0
        for answer in self.answers:
            if not answer.times:
                continue
            times = np.array(answer.times)
            inside = int(((times >= self.start_s) & (times <= self.end_s)).sum())
            total += inside * answer.num_tokens / len(times)
        return total


def ttft_ms(answer: Answer) -> float:
    """From when it was due to its first token; infinite without one."""
    return 1e3 * (answer.times[0] - answer.due_s) if answer.times else float("inf")


def tpot_ms(answer: Answer) -> float:
    """Mean time between its tokens; 0 with fewer than two."""
    if len(answer.times) < 2:
        return 0.0
    return 1e3 * (answer.times[-1] - answer.times[0]) / max(1, answer.num_tokens - 1)


def e2e_ms(answer: Answer) -> float:
    """From when it was due to its end."""
    return 1e3 * (answer.end_s - answer.due_s)


def gaps_ms(
    answers: Sequence[Answer], start_s: float = 0.0, end_s: float = float("inf")
) -> NDArray[np.float64]:
    """Times between consecutive events of a stream, of those that came within the bounds."""
    found = [np.zeros(0)]
    for answer in answers:
        times = np.array(answer.times)
        gaps = np.diff(times)
        found.append(gaps[(times[1:] >= start_s) & (times[1:] <= end_s)])
    return 1e3 * np.concatenate(found)


def percentile(values: Sequence[float] | NDArray[np.float64], percent: float) -> float | None:
    """Linear between neighbours, as numpy's; None without values."""
    return round(float(np.percentile(values, percent)), 3) if len(values) else None


def case_of(window: Window, limits: Limits) -> dict[str, Json]:
    """The figures of a run, by the keys of a report."""
    due = window.due
    good = [answer for answer in due if not answer.error]
    bad = Counter(answer.error for answer in due if answer.error)
    with_tokens = [answer for answer in good if answer.times]
    tokens = window.tokens
    kept = sum(limits.keeps(answer) for answer in good)
    columns = {
        "ttft_ms": [ttft_ms(answer) for answer in with_tokens],
        "itl_ms": gaps_ms(good),
        "tpot_ms": [tpot_ms(answer) for answer in with_tokens if len(answer.times) > 1],
        "e2e_ms": [e2e_ms(answer) for answer in good],
    }
    case: dict[str, Json] = {
        "requests": len(due),
        "errors": sum(bad.values()),
        "error_kinds": {kind: count for kind, count in bad.most_common(MAX_KINDS)},
        "seconds": round(window.seconds, 3),
        "prompt_tokens_mean": _mean([a.usage.prompt_tokens for a in good if a.usage]),
        "output_tokens_mean": _mean([a.num_tokens for a in good]),
        "tokens_per_s": round(tokens / window.seconds, 1) if window.seconds > 0 else 0.0,
        "requests_per_s": round(len(good) / window.seconds, 3) if window.seconds > 0 else 0.0,
    }
    for name, values in columns.items():
        for percent in PERCENTILES:
            case[f"{name}_p{percent}"] = percentile(values, percent)
    case["goodput"] = None
    if limits.as_json and window.seconds > 0:
        case["goodput"] = round(kept / window.seconds, 3)
    case["cpu_us_per_token"] = {
        name: round(1e6 * seconds / tokens, 2) for name, seconds in window.cpu_s.items() if tokens
    }
    return case


def _mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 1) if values else None
