"""What changed between two stored runs of a benchmark, case by case.

`deepmesh bench compare decode` compares the last valid run of the newest commit in
bench/results/decode.jsonl with that of the commit before, on the same machine. `--old` and `--new`
choose lines by commit, or by number (-1 is the last). Exit 1 if a figure is worse by more than the
threshold and by more than the noise of its samples.
"""

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.tables import CONSOLE, show
from deepmesh.report import RESULTS_VARIABLE, ROOT, Json

# What names a case; whatever else it holds was measured.
KEYS = ("device", "preset", "op", "shape", "model", "layers", "batch", "context", "tokens")
KEYS += ("threads", "mode", "url", "concurrency", "rate", "ranks", "rows", "depth")
KEYS += ("scope", "speculation", "grammar", "work", "backend", "tier", "setup", "policy", "group")
KEYS += ("chats",)
# The figures that are compared: whether more is better, and where the samples behind them lie.
FIGURES = {
    "ours_us": (False, "samples_us"),
    "step_ms": (False, "samples_ms"),
    "ours_tokens_per_s": (True, "samples_ms"),
    "tokens_per_s": (True, ""),
    "gbps": (True, ""),
    "ttft_ms_p50": (False, ""),
    "itl_ms_p50": (False, ""),
    "itl_ms_p99": (False, ""),
    "goodput": (True, ""),
    "plan_apply_ms_p50": (False, ""),
    "plan_ms": (False, ""),
    "latency_us": (False, ""),
}
MORE_KEYS = {"overlap": ("step_ms",)}
# Figures that follow from another one which is compared, or were given.
DERIVED = {"decode": {"ours_tokens_per_s"}, "kernels": {"gbps"}, "overlap": {"step_ms"}}
THRESHOLDS = {"kernels": 0.15}
THRESHOLD = 0.05


class CompareError(ValueError):
    """There are no two runs to compare."""


@dataclass(frozen=True)
class Change:
    """One figure of one case: new / old, so that above 1 is always better."""

    case: str
    figure: str
    old: float
    new: float
    better: float
    noise: float  # of the ratio, from the spread of the samples; 0: not known

    def is_regression(self, threshold: float) -> bool:
        """Worse by more than the threshold, and by more than two standard errors."""
        return self.better < 1 - max(threshold, 2 * self.noise)


def read_runs(file: Path) -> list[dict[str, Json]]:
    """All stored runs, oldest first.

    Raises:
        CompareError: the file is missing or holds something else.
    """
    try:
        lines = file.read_text().splitlines()
        return [json.loads(line) for line in lines if line.strip()]
    except OSError as error:
        raise CompareError(f"{file}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise CompareError(f"{file}: not one JSON object a line: {error}") from error


def choose(
    runs: list[dict[str, Json]], old: str, new: str
) -> tuple[dict[str, Json], dict[str, Json]]:
    """The two runs that `old` and `new` name; empty: the last of the two newest commits.

    Raises:
        CompareError: there are none.
    """
    later = _named(runs, new) if new else _last(runs)
    same = [run for run in runs if run.get("machine") == later.get("machine")]
    earlier = [run for run in same if run is not later and run.get("commit") != later.get("commit")]
    return (_named(runs, old) if old else _last(earlier)), later


def _last(runs: list[dict[str, Json]]) -> dict[str, Json]:
    valid = [run for run in runs if run.get("valid", True)]
    if not valid:
        raise CompareError("there are no two valid runs of different commits on one machine")
    return valid[-1]


def _named(runs: list[dict[str, Json]], name: str) -> dict[str, Json]:
    try:
        return runs[int(name)] if name.lstrip("-").isdigit() and len(name) < 5 else _of(runs, name)
    except IndexError as error:
        raise CompareError(f"no run {name}: there are {len(runs)}") from error


def _of(runs: list[dict[str, Json]], commit: str) -> dict[str, Json]:
    return [run for run in runs if str(run.get("commit", "")).startswith(commit)][-1]


def changes(name: str, old: dict[str, Json], new: dict[str, Json]) -> Iterator[Change]:
    """Every figure that both runs have of the same case."""
    keys = KEYS + MORE_KEYS.get(name, ())
    before = {_case_name(case, keys): case for case in _cases(old)}
    for case in _cases(new):
        label = _case_name(case, keys)
        if label not in before:
            continue
        for figure, (more_is_better, samples) in FIGURES.items():
            a, b = before[label].get(figure), case.get(figure)
            if figure in DERIVED.get(name, ()) or not (_is_number(a) and _is_number(b)):
                continue
            a, b = float(str(a)), float(str(b))
            if a <= 0 or b <= 0:
                continue
            noise = math.hypot(*(_scatter(one.get(samples)) for one in (before[label], case)))
            yield Change(label, figure, a, b, b / a if more_is_better else a / b, noise)


def _cases(run: dict[str, Json]) -> list[dict[str, Json]]:
    cases = run.get("cases")
    return [case for case in cases if isinstance(case, dict)] if isinstance(cases, list) else []


def _case_name(case: dict[str, Json], keys: Sequence[str]) -> str:
    return " ".join(f"{key}={case[key]}" for key in keys if case.get(key) is not None)


def _is_number(value: Json) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scatter(samples: Json) -> float:
    """Relative standard error of the median, from the middle half of the samples."""
    if not isinstance(samples, list):
        return 0.0
    values = sorted(float(str(value)) for value in samples)
    if len(values) < 3:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4)
    return 0.93 * (high - low) / len(values) ** 0.5 / statistics.median(values)


def main() -> int:
    """0: nothing is worse; 1: something is; 2: nothing to compare."""
    parser = argparse.ArgumentParser(prog="deepmesh bench compare", description=__doc__)
    parser.add_argument("name", help="of the benchmark: its file in bench/results")
    parser.add_argument("--old", default="", help="commit or line")
    parser.add_argument("--new", default="", help="commit or line")
    parser.add_argument("--threshold", type=float, help="5 %% (kernels 15 %%) without it: 0.05")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    name: str = arguments.name
    folder = Path(os.environ.get(RESULTS_VARIABLE, ROOT / "bench" / "results"))
    threshold = arguments.threshold
    if threshold is None:
        threshold = THRESHOLDS.get(name, THRESHOLD)
    try:
        old, new = choose(read_runs(folder / f"{name}.jsonl"), arguments.old, arguments.new)
        found = list(changes(name, old, new))
        if not found:
            raise CompareError("the two runs have no case in common")
    except CompareError as error:
        print(f"deepmesh: {error}", file=sys.stderr)
        return 2
    worse = [change for change in found if change.is_regression(threshold)]
    rows: list[dict[str, Json]] = [
        {
            "case": change.case,
            "figure": change.figure,
            "old": change.old,
            "new": change.new,
            "better": round(change.better, 4),
            "noise": round(change.noise, 4),
            "verdict": "WORSE" if change in worse else "",
        }
        for change in found
    ]
    show(f"{name}: {old.get('commit')} -> {new.get('commit')}", tuple(rows[0]), rows)
    CONSOLE.print(f"{len(worse)} of {len(found)} figures worse by more than {threshold:.0%}")
    if arguments.json:
        ends: dict[str, Json] = {"old": old.get("commit"), "new": new.get("commit")}
        print(json.dumps({"command": "bench compare", **ends, "cases": rows, "ok": not worse}))
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
