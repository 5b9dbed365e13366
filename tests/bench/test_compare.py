"""`bench compare`: which two runs, which figures, and when it fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Run = dict[str, object]


def decode(commit: str, *steps_ms: float, valid: bool = True, cpu: str = "x") -> Run:
    """A stored run with a case for each of `steps_ms`."""
    cases = [
        {
            "device": "cpu",
            "batch": 2**i,
            "step_ms": ms,
            "ours_tokens_per_s": 1e3 / ms,
            "samples_ms": [ms * (1 + 0.001 * k) for k in range(5)],
        }
        for i, ms in enumerate(steps_ms)
    ]
    machine = {"cpu": cpu, "cores": 2, "gpu": None}
    return {"command": "bench decode", "commit": commit, "machine": machine, "cases": cases} | {
        "ok": True,
        "valid": valid,
    }


def compare(folder: Path, name: str, runs: list[Run], *options: str) -> tuple[int, list[dict], str]:
    """Exit status, the figures that it printed, and stderr."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(run) + "\n" for run in runs))
    done = subprocess.run(
        [sys.executable, "-m", "deepmesh.cli", "bench", "compare", name, "--json", *options],
        cwd=ROOT,
        env={**os.environ, "DEEPMESH_RESULTS": str(folder), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, json.loads(done.stdout)["cases"] if done.stdout else [], done.stderr


def test_the_last_two_commits_are_compared_case_by_case(tmp_path: Path) -> None:
    runs = [decode("a", 99, 99), decode("b", 10, 20), decode("c", 30, 40), decode("c", 9, 20.5)]
    status, rows, said = compare(tmp_path, "decode", runs)
    assert status == 0
    assert [(row["old"], row["new"]) for row in rows] == [(10, 9), (20, 20.5)]
    assert rows[0]["better"] == pytest.approx(10 / 9, abs=1e-3)
    assert all(0 < row["noise"] < 0.01 for row in rows)
    assert "b -> c" in said


def test_a_regression_beyond_the_threshold_fails(tmp_path: Path) -> None:
    runs = [decode("a", 10, 20), decode("b", 10, 21.5)]
    status, rows, _ = compare(tmp_path, "decode", runs)
    assert status == 1
    assert [row["verdict"] for row in rows] == ["", "WORSE"]
    assert compare(tmp_path, "decode", runs, "--threshold", "0.1")[0] == 0


def test_noise_is_no_regression(tmp_path: Path) -> None:
    old, new = decode("a", 10), decode("b", 11)
    for run in (old, new):
        cases = run["cases"]
        assert isinstance(cases, list)
        cases[0]["samples_ms"] = [5, 8, 10, 12, 15]
    status, rows, _ = compare(tmp_path, "decode", [old, new])
    assert (status, rows[0]["verdict"]) == (0, "")
    assert rows[0]["noise"] > 0.1


def test_kernels_may_vary_more(tmp_path: Path) -> None:
    def kernels(commit: str, us: float) -> Run:
        case = {"op": "linear", "shape": "1x2x3", "threads": 1, "ours_us": us}
        return decode(commit) | {"cases": [case]}

    assert compare(tmp_path, "kernels", [kernels("a", 100), kernels("b", 110)])[0] == 0
    assert compare(tmp_path, "kernels", [kernels("a", 100), kernels("b", 120)])[0] == 1


def test_more_is_better_where_it_is(tmp_path: Path) -> None:
    def serve(commit: str, rate: float) -> Run:
        return decode(commit) | {"cases": [{"mode": "closed", "tokens_per_s": rate}]}

    assert compare(tmp_path, "serve", [serve("a", 100), serve("b", 120)])[0] == 0
    assert compare(tmp_path, "serve", [serve("a", 120), serve("b", 100)])[0] == 1


def test_runs_of_other_machines_and_invalid_ones_are_passed_over(tmp_path: Path) -> None:
    runs = [
        decode("a", 10),
        decode("b", 1, valid=False),
        decode("c", 1, cpu="y"),
        decode("d", 10.1),
    ]
    status, rows, _ = compare(tmp_path, "decode", runs)
    assert (status, rows[0]["old"], rows[0]["new"]) == (0, 10, 10.1)


def test_lines_and_commits_can_be_named(tmp_path: Path) -> None:
    runs = [decode("abc123", 10), decode("def456", 20), decode("eee", 30)]
    _, rows, _ = compare(tmp_path, "decode", runs, "--old", "abc", "--new", "def456")
    assert (rows[0]["old"], rows[0]["new"]) == (10, 20)
    _, rows, _ = compare(tmp_path, "decode", runs, "--old", "0", "--new", "-1")
    assert (rows[0]["old"], rows[0]["new"]) == (10, 30)


@pytest.mark.parametrize(
    ("runs", "options"),
    [
        ([], []),
        ([decode("a", 1)], []),
        ([decode("a", 1), decode("a", 1)], []),
        ([decode("a", 1), decode("b", 1)], ["--old", "nothing"]),
        ([decode("a"), decode("b", 1)], []),
    ],
)
def test_nothing_to_compare_is_said(tmp_path: Path, runs: list[Run], options: list[str]) -> None:
    status, rows, said = compare(tmp_path, "decode", runs, *options)
    assert (status, rows) == (2, [])
    assert said.startswith("deepmesh: ")
