"""`deepmesh bench kvstore` as a user runs it, in small."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_it_prints_every_tier_and_op_in_the_form_that_all_share(tmp_path: Path) -> None:
    options = ["--json", "--rounds", "2", "--block-bytes", "11264"]
    done = subprocess.run(
        [sys.executable, "-m", "deepmesh.cli", "bench", "kvstore", *options],
        cwd=ROOT,
        env={**os.environ, "DEEPMESH_RESULTS": str(tmp_path), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    found = json.loads(done.stdout)
    assert found["command"] == "bench kvstore"
    assert found["ok"]
    seen = {(case["tier"], case["op"]) for case in found["cases"]}
    puts = {(tier, op) for tier in ("memory", "frames", "disk") for op in ("put", "put again")}
    gets = {(tier, "get") for tier in ("memory", "frames", "disk", "shared")}
    assert seen >= puts | gets | {("shared", "put")}
    for case in found["cases"]:
        assert case["gbps"] > 0
        assert case["latency_us_p50"] > 0
        assert case["bytes"] in (64 * 11264, 64 * 57_024 + 2_900_000)
