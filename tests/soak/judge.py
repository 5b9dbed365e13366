"""What is judged of a soak, in words, figures and a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deepmesh.report import MAX_STEAL, Json
from tests.soak import verdict
from tests.soak.load import Load
from tests.soak.processes import COUNTS, Watch

FOREIGN = ("redis",)  # shown, not judged: not ours, and its memory has a limit of its own
MAX_REFUSED = 0.01  # of the requests at the steady load
MAX_OTHERS = 0.1  # of the CPU time of the machine, for processes that are not the mesh's
MB = 1e6


@dataclass
class Judged:
    """All findings."""

    cases: list[dict[str, Json]] = field(default_factory=list[dict[str, Json]])
    problems: list[str] = field(default_factory=list[str])

    @property
    def ok(self) -> bool:
        """Nothing is wrong."""
        return not self.problems

    def restarts(
        self, before: Mapping[str, int], after: Mapping[str, int], counts: Mapping[str, int]
    ) -> None:
        """Nothing may have ended."""
        for name, pid in before.items():
            if after.get(name) != pid:
                self.problems.append(
                    f"{name}: ended and was started again {counts.get(name, 0)} times"
                )

    def left(self, held: Mapping[str, float]) -> None:
        """What an idle mesh holds."""
        for name, value in held.items():
            self.problems.append(f"an idle mesh still holds {value:g} {name}")


def judge(
    watch: Watch,
    load: Load,
    *,
    from_s: float,
    rate: float,
    capacity: float,
    refused: int,
    cpu_s: Mapping[str, float],
    stolen: float,
    seconds: float,
) -> Judged:
    """The report's cases, and what is wrong."""
    judged = Judged()
    for name, series in watch.series.items():
        problems = [f"{name}: ended"] if name in watch.ended else []
        growth = verdict.growth_of(series.times_s, series.uss_bytes)
        pss = verdict.growth_of(series.times_s, series.pss_bytes)
        row: dict[str, Json] = {"process": name, "uss_mb": round(series.uss_bytes[-1] / MB, 1)}
        row |= verdict.as_json(growth)
        row["pss_mb_per_h"] = round(pss.slope.mean, 3)
        problems += [f"{name}: {growth.problem}"] if growth.problem else []
        for what in COUNTS:
            first, last = verdict.floors(series.times_s, series.counts[what])
            row[what] = [first, last]
            if problem := verdict.count_problem(what, first, last):
                problems.append(f"{name}: {problem}")
        row["ok"] = not problems
        judged.cases.append(row)
        if name not in FOREIGN:
            judged.problems += problems
    first, last = verdict.floors(watch.shared_times_s, watch.shared_files)
    judged.cases.append({"shared_files": [first, last]})
    if problem := verdict.count_problem("shared files", first, last):
        judged.problems.append(problem)
    judged.cases.append(
        _load_case(judged, load, from_s, rate, capacity, refused, cpu_s, stolen, seconds)
    )
    return judged


def _load_case(
    judged: Judged,
    load: Load,
    from_s: float,
    rate: float,
    capacity: float,
    refused: int,
    cpu_s: Mapping[str, float],
    stolen: float,
    seconds: float,
) -> dict[str, Json]:
    """Rates, errors, latencies by thirds."""
    asked = rate * seconds
    if refused > MAX_REFUSED * asked:
        judged.problems.append(f"{refused} of {asked:.0f} requests failed: {dict(load.errors)}")
    case: dict[str, Json] = {
        "capacity_requests_per_s": round(capacity, 2),
        "requests_per_s": round(rate, 2),
        "done": dict(load.done),
        "errors": dict(load.errors),
        "most_open": load.most_open,
        "cached_share": round(load.cached_tokens / max(1, load.prompt_tokens), 3),
        "stolen": round(stolen, 4),
        "cpu_s": {name: round(each, 1) for name, each in cpu_s.items()},
        "valid": stolen <= MAX_STEAL,
    }
    times = load.latencies
    for name, at, values in (
        ("ttft_ms", times.ttft_at, times.ttft),
        ("itl_ms", times.itl_at, times.itl),
    ):
        kept = [(a, v) for a, v in zip(at, values, strict=True) if a >= from_s]
        if not kept:
            judged.problems.append(f"{name}: no answer behind the warm-up")
            continue
        kept.sort()
        parts = verdict.thirds([a for a, _ in kept], [v for _, v in kept])
        rows = verdict.percentiles_of(parts)
        for percent, row in rows.items():
            case[f"{name}_p{percent}"] = [round(each, 2) for each in row]
        judged.problems += verdict.latency_problems(name, rows)
    return case


def table(judged: Judged) -> str:
    """For people."""
    heads = ("process", "USS MB", "MB/h", "95 %", "fds", "sockets", "threads", "maps")
    rows: list[tuple[str, ...]] = [heads]
    for case in judged.cases:
        if "process" not in case:
            continue
        spread = f"{case['mb_per_h_low']} to {case['mb_per_h_high']}"
        counts = [f"{case[w][0]:g}-{case[w][1]:g}" for w in COUNTS]  # type: ignore[index]
        rows.append(
            (str(case["process"]), str(case["uss_mb"]), str(case["mb_per_h"]), spread, *counts)
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    for key, value in judged.cases[-1].items():
        if key.startswith(("ttft", "itl", "capacity", "requests", "done", "errors", "cached")):
            lines.append(f"{key}: {value}")
    return "\n".join(lines)
