"""Capacity: what the table of kernel times adds up to, and what `simulate --capacity` prints."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from deepmesh.errors import UserError
from deepmesh.report import RESULTS_VARIABLE
from services.scheduler.sim.capacity import (
    DailyLoad,
    Experts,
    Table,
    interpolate,
    plan,
    read_table,
)

LOAD = DailyLoad(1e12, output_share=0.2, cached_share=0.5, context=8192, itl_ms=50)


def changed(table: Table, **fields: object) -> Table:
    return msgspec.structs.replace(table, **fields)


def test_devices_are_the_load_over_what_one_can_do() -> None:
    table = read_table()
    answer = plan(table, LOAD, 32)
    assert answer is not None
    a_second = 1e12 / 86400 * LOAD.peak
    assert answer.decode_devices * answer.decode_tokens_per_s == pytest.approx(0.2 * a_second)
    assert answer.prefill_devices * answer.prefill_tokens_per_s == pytest.approx(0.4 * a_second)
    needed = (answer.decode_devices + answer.prefill_devices) * 1.05
    assert needed <= answer.devices < needed + 32
    assert answer.devices % 32 == 0
    assert sum(answer.parts_ms.values()) == pytest.approx(answer.step_ms)


def test_rows_are_the_most_that_keep_the_limit() -> None:
    table = read_table()
    answer = plan(table, LOAD, 64)
    assert answer is not None
    assert answer.limited_by == "itl"
    assert answer.step_ms <= 50 < sum(table.step_us(answer.rows + 1, 8192, 64).values()) / 1e3
    patient = DailyLoad(1e12, output_share=0.2, cached_share=0.5, context=400_000, itl_ms=1e6)
    relaxed = plan(table, patient, 64)
    assert relaxed is not None
    assert relaxed.limited_by == "memory"
    assert relaxed.rows == table.max_rows(400_000, 64)


def test_what_does_not_fit_is_no_answer() -> None:
    table = read_table()
    assert plan(table, LOAD, 2) is None  # 145 GB of experts on each
    assert plan(table, DailyLoad(1e12, 0.2, 0.5, 8192, itl_ms=1), 64) is None


def test_experts_are_bound_by_bytes_with_few_rows_and_by_operations_with_many() -> None:
    table = changed(
        read_table(),
        read_bytes_per_s=1e12,
        product_flops_per_s=1e14,
        experts=Experts(1, 8, 1, 1e6, 1e6, 1.0, 1.0, 1.0, ""),
    )
    few, many = (table.step_us(rows, 8192, 8)["routed experts"] for rows in (1, 1000))
    assert few == pytest.approx(1.0)  # one expert, read once
    assert many == pytest.approx(10.0)  # 1,000 rows of 1e6 operations


def test_the_simulators_costs_give_back_the_table() -> None:
    table = read_table()
    for ranks in (8, 128):
        costs = table.step_costs(ranks)
        for rows in (1, 128):
            context = rows * 8192 / 1000 * costs.context_kilotoken_ns
            step = costs.base_ns + rows * costs.decode_row_ns + context
            wanted = 1e3 * sum(table.step_us(rows, 8192, ranks).values())
            assert step == pytest.approx(wanted, rel=1e-3)


def test_between_and_beyond_points() -> None:
    points = [(1, 10.0), (3, 20.0), (5, 60.0)]
    assert [interpolate(points, at) for at in (0.5, 1, 2, 3, 4, 7)] == [10, 10, 15, 20, 40, 100]


def test_a_table_that_is_none_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.json"):
        read_table(tmp_path / "none.json")
    wrong = tmp_path / "wrong.json"
    wrong.write_text('{"device": 3}')
    with pytest.raises(UserError, match=r"wrong\.json.*device"):
        read_table(wrong)


def test_the_command_prints_one_object(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "deepmesh.cli", "simulate", "--capacity", "--json"]
    done = subprocess.run(
        [*command, "--daily", "155e12", "--cached-share", "0.9"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, RESULTS_VARIABLE: str(tmp_path)},
    )
    found = json.loads(done.stdout)
    assert found["command"] == "simulate"
    assert [case["ranks"] for case in found["cases"]] == [8, 32, 64, 128]
    assert all(case["devices"] > 1000 for case in found["cases"])
    assert found["config"]["kinds"]["sparse attention"] == "measured"
    assert "1.55e+14 tokens a day" in done.stderr
