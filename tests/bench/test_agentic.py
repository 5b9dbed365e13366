"""The trace that stands for agents, its ideal, and how runs are judged."""

import statistics
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from bench.agentic import base_config, input_over_output, judge, output_ids, setups
from bench.agentic_trace import Shape, Turn, ideal_hits, make_skewed, make_trace
from bench.load.pinned import MODEL
from deepmesh.report import Json

TRACE = make_trace(Shape(), 0, output_ids(MODEL))


def test_it_has_the_shape_of_public_traces() -> None:
    assert statistics.median(map(len, TRACE)) == 33
    hits, prompts = ideal_hits(TRACE, 1)
    assert hits / prompts == pytest.approx(0.94, abs=0.01)
    assert input_over_output(TRACE) == pytest.approx(131, rel=0.05)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another() -> None:
    shape = Shape(sessions=3, turn_share=0.2)
    assert make_trace(shape, 5, [7]) == make_trace(shape, 5, [7])
    assert make_trace(shape, 5, [7]) != make_trace(shape, 6, [7])


def test_a_turn_begins_with_all_that_came_before_unless_the_context_was_full() -> None:
    cut = 0
    for session in TRACE:
        for before, turn in pairwise(session):
            if turn.prompt[: len(before.whole)] != before.whole:
                system = Shape().system_tokens
                assert turn.prompt[:system] == before.prompt[:system]
                cut += 1
            assert len(turn.whole) <= Shape().context_tokens
    assert 0 < cut < 0.1 * sum(map(len, TRACE))


def test_the_ideal_is_what_the_definition_says() -> None:
    trace = make_trace(Shape(3, 5, 60, 0.2), 1, [1])
    for grid in (1, 8):
        seen: list[list[int]] = []
        expected = total = 0
        for number in range(max(map(len, trace))):
            for session in trace:
                if number < len(session):
                    turn = session[number]
                    common = max((_common(turn.prompt, other) for other in seen), default=0)
                    expected += min(common, len(turn.prompt) - 1) // grid * grid
                    total += len(turn.prompt)
                    seen.append(turn.whole[:-1])
        assert ideal_hits(trace, grid) == (expected, total)


def _common(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


def test_most_of_the_skewed_requests_begin_alike() -> None:
    made = make_skewed(Shape(), 0, [7])
    starts = Counter(tuple(session[0].prompt[:100]) for session in made)
    assert {len(session) for session in made} == {1}
    assert 0.5 <= starts.most_common(1)[0][1] / len(made) <= 0.7


def test_a_prompt_never_hits_its_last_token() -> None:
    turn = Turn([1, 2, 3, 4], 9, 1)
    assert ideal_hits([[turn], [turn]], 1) == (3, 8)
    assert ideal_hits([[turn], [turn]], 4) == (0, 8)


def test_every_setup_is_a_mesh_that_can_be(tmp_path: Path) -> None:
    made = setups(base_config(tmp_path, MODEL), Shape())
    assert list(made) == [
        *("no cache", "device", "memory", "disk", "round robin", "router"),
        *("skewed", "1P1D"),
    ]
    assert not made["no cache"].scheduler.prefix_cache
    assert made["disk"].kvstore.memory_bytes < made["memory"].kvstore.memory_bytes
    assert made["router"].router.policy != made["round robin"].router.policy
    assert [made["1P1D"].role(index) for index in range(2)] == ["prefill", "decode"]


def test_runs_are_judged_by_the_limits_of_their_setup() -> None:
    cases: list[dict[str, Json]] = [
        {"setup": "no cache", "share_of_ideal": 0.0, "ttft_ms_p50_later": 100.0},
        {"setup": "device", "share_of_ideal": 0.96, "ttft_ms_p50_later": 19.0},
        {"setup": "router", "share_of_ideal": 0.89, "ttft_ms_p50_later": 21.0},
        {"setup": "skewed", "busiest_over_mean": 1.1},
    ]
    found = {
        (str(j["setup"]), str(j["key"])): j["met"] for j in judge(cases) if isinstance(j, dict)
    }
    assert found == {
        ("device", "share_of_ideal"): True,
        ("device", "no_cache_over_later"): True,
        ("router", "share_of_ideal"): False,
        ("skewed", "busiest_over_mean"): True,
        ("router", "no_cache_over_later"): False,
    }
