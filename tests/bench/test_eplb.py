"""`bench eplb`: what it compares, small."""

import numpy as np
import pytest

from bench.eplb import WINDOW, Cell, judge_reads, noise_floor, run_trace, verdict
from bench.eplb_baselines import public_2025, time_greedy
from bench.eplb_traces import SYNTHETIC, Trace, draws
from deepmesh.report import Json
from services.scheduler.core.expert_places import check_places, copies_of, rank_loads


def number(case: dict[str, Json], key: str) -> float:
    value = case[key]
    assert isinstance(value, float)
    return value


@pytest.mark.parametrize("name", ["zipf 0.8", "bursty 0.8"])
def test_a_case_has_all_figures_and_they_are_in_order(name: str) -> None:
    case = run_trace(SYNTHETIC[name](64, 3 * WINDOW, 1), Cell(16, 16, 64))
    ours, bound = number(case, "ours_mean"), number(case, "lower_bound")
    assert bound - 1e-9 <= number(case, "ours_uncharged") < ours, "moves are charged"
    assert ours < number(case, "public2025_mean")
    assert ours < number(case, "timegreedy_mean")
    assert number(case, "ours_worst") >= ours
    assert number(case, "ours_sampled") > ours
    assert number(case, "plan_ms") > 0


def test_both_baselines_are_complete_and_greedy() -> None:
    counts = np.array([[38.0, 22.0, 10.0, 10.0, 5.0, 5.0]] * 2)
    for place in (public_2025, time_greedy):
        places = place(counts, 2, 4, 8)
        assert copies_of(places, 6).tolist() == [2, 2, 1, 1, 1, 1]
        by_rank = rank_loads(places, counts)
        assert (by_rank.max(1) / by_rank.mean(1)).tolist() == pytest.approx([1.0, 1.0], abs=0.07)
    check_places(time_greedy(counts, 2, 4, 8), 6)


def test_the_noise_floor_falls_with_the_tokens_and_rises_with_the_ranks() -> None:
    small, large = noise_floor(Cell(64, 64, 32), 6), noise_floor(Cell(64, 64, 512), 6)
    assert 1.15 < small < 1.2
    assert 1.03 < large < 1.05
    assert noise_floor(Cell(128, 128, 512), 6) > large


def test_reads_are_balanced_better_by_reads_than_by_rows() -> None:
    case = judge_reads(64, Cell(16, 16, 2))
    assert number(case, "busiest_by_reads") < number(case, "busiest_by_rows")


def test_drawn_rows_are_those_of_the_trace() -> None:
    trace = Trace("counted", np.full((4, 2), 0.5), 2, np.array([[3.0, 1.0]] * 4))
    assert draws(trace, 99, np.random.default_rng(0)).tolist() == [[3.0, 1.0]] * 4


def test_the_verdict_names_what_is_missed() -> None:
    case: dict[str, Json] = {
        **{"trace": "t", "experts": 384, "ranks": 64, "redundant": 64, "tokens_per_rank": 128},
        **{"ours_mean": 1.04, "public2025_mean": 1.1, "timegreedy_mean": 1.05},
        **{"lower_bound": 1.02},
    }
    assert verdict([case], plan_s=1.0)["met"] is True
    worse = case | {"ours_mean": 1.06, "trace": "u"}
    found = verdict([case, worse], plan_s=1.0)
    name = "u 384 64 64 128"
    assert found["met"] is False
    assert found["over_mark"] == [name]
    assert found["over_1.03_times_bound"] == [name]
    assert found["worse_than_a_baseline"] == [name]
    assert found["over_published"] == []
    assert verdict([case], plan_s=2.5)["met"] is False
