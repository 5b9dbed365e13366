"""`deepmesh simulate`: the same seed anywhere, workloads from files, and the wait of newcomers."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from deepmesh.errors import UserError
from deepmesh.report import RESULTS_VARIABLE
from services.scheduler.sim.measures import Record, first_chunk_waits
from services.scheduler.sim.picture import draw_timeline
from services.scheduler.sim.simulate import Outcome, Scenario, simulate
from services.scheduler.sim.traffic import arrivals
from services.scheduler.sim.workload_file import read

SMALL = ("--ranks", "2", "--rows", "8", "--steps", "40", "--seed", "7", "--json")


def run(*options: str, hash_seed: str = "0") -> dict[str, object]:
    with tempfile.TemporaryDirectory() as results:
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, RESULTS_VARIABLE: results}
        done = subprocess.run(
            [sys.executable, "-m", "deepmesh.cli", "simulate", *options],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment,
            check=True,
        )
    found: dict[str, object] = json.loads(done.stdout)
    return found


def simulated(policy: str, *, rows: int = 128, steps: int = 400) -> Outcome:
    scenario = Scenario(1, rows, 3, policy=policy, steps=steps)
    requests = arrivals("mixed", seed=3, ranks=1, rows=rows, costs=scenario.costs, utilisation=0.8)
    outcome = simulate(scenario, requests)
    assert outcome.ok, outcome.errors
    return outcome


def test_two_processes_have_the_same_events_whatever_their_hash_seeds() -> None:
    logs = set[str]()
    for hash_seed in ("1", "2"):
        (case,) = run(*SMALL, hash_seed=hash_seed)["cases"]  # type: ignore[misc]
        logs.add(case["event_log"])
        assert case["oracle_mismatches"] == case["audit_failures"] == case["unfinished"] == 0
        assert case["group_steps"] >= 40
    assert len(logs) == 1


def test_a_first_chunk_waits_for_the_steps_already_submitted_and_no_longer() -> None:
    ours = simulated("mixed").figures
    assert ours["first_chunk_excess_steps_p99"] <= 1
    prefill_first, decode_first = simulated("prefill-first"), simulated("decode-first", steps=200)
    assert decode_first.figures["first_chunk_excess_ms_p99"] > 10 * ours["step_ms_mean"]
    assert prefill_first.figures["itl_ms_p99"] > ours["itl_ms_p99"]


def test_waits_are_counted_from_the_end_of_what_was_submitted() -> None:
    outcome = simulated("mixed", rows=8, steps=60)
    waits = first_chunk_waits(outcome.record, outcome.tail_ns)
    assert len(waits) == len(outcome.record.ended)
    assert min(waits) >= 0
    assert max(waits) < outcome.record.spans[-1].end_ns
    assert first_chunk_waits(Record(), 0) == []


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    outcome = simulated("mixed", rows=8, steps=60)
    target = tmp_path / "steps.png"
    draw_timeline(outcome.record.spans, outcome.tail_ns, target)
    assert target.read_bytes().startswith(b"\x89PNG")


def test_a_workload_file_runs(tmp_path: Path) -> None:
    lines = [
        {"arrival_s": 0, "prompt_tokens": 300, "output_tokens": 5, "prefix": "p"},
        {
            "arrival_s": 0.1,
            "prompt_tokens": 300,
            "output_tokens": 7,
            "grammar": True,
            "priority": 1,
        },
    ]
    lines[0]["prefix_tokens"] = 256
    file = tmp_path / "two.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    found = run("--workload", str(file), "--steps", "0", "--json")
    (case,) = found["cases"]  # type: ignore[misc]
    assert (found["ok"], case["requests"], case["output_tokens"]) == (True, 2, 12)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "w:2: not JSON"),
        ("[1]", "w:2: not a JSON object"),
        ('{"arrival_s": 1, "prompt_tokens": 4}', "w:2: output_tokens is missing"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": true}', "w:2: output_tokens must"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 1}', "w:2: prompt_tokens must"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 4093}', "w:2: output_tokens and"),
        ('{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 1, "x": 1}', "w:2: unknown field"),
        ('{"arrival_s": 0, "prompt_tokens": 4, "output_tokens": 1}', "w:2: arrival_s goes back"),
        (
            '{"arrival_s": 1, "prompt_tokens": 4, "output_tokens": 1, "prefix_tokens": 2}',
            "w:2: prefix_tokens needs prefix",
        ),
    ],
)
def test_a_wrong_line_is_named_with_its_field(line: str, says: str) -> None:
    good = '{"arrival_s": 0.5, "prompt_tokens": 4, "output_tokens": 1}'
    with pytest.raises(UserError) as error:
        list(read([good, line], name="w", seed=0))
    assert str(error.value).startswith(says)
