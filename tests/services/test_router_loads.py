"""What a replica's work is taken to be, from own counts and from what it says."""

import pytest

from deepmesh.wire.messages import ReplicaStats
from services.router.loads import (
    FIRST_OUTPUTS,
    RELATIVE,
    STALE_S,
    Costs,
    Load,
    Outputs,
    Work,
    alike,
)
from tests.services.router_rig import KILOTOKEN_NS, ROW_NS, TOKEN_NS

WORK = Work(prefill_tokens=1000, context=1000, outputs=10)


def told(waiting_tokens: int = 0, context_tokens: int = 0) -> ReplicaStats:
    return ReplicaStats(
        "s",
        True,
        waiting_tokens=waiting_tokens,
        context_tokens=context_tokens,
        prefill_token_ns=TOKEN_NS,
        decode_row_ns=ROW_NS,
        context_kilotoken_ns=KILOTOKEN_NS,
    )


def profiled() -> tuple[Load, Costs]:
    load = Load()
    load.heard(told(), 0, 0.0)
    assert load.costs is not None
    return load, load.costs


def test_work_is_counted_by_the_replica_s_own_costs() -> None:
    load, costs = profiled()
    load.add(WORK, 0.0)
    assert load.prefill_ms(costs, 0.0) == pytest.approx(1000 * TOKEN_NS / 1e6)
    row_ms = ROW_NS / 1e6 + KILOTOKEN_NS / 1e6
    assert load.decode_ms(costs, 64.0) == pytest.approx(10 * row_ms)


def test_time_wears_prefill_work_off() -> None:
    load, costs = profiled()
    load.add(WORK, 0.0)  # 100 ms
    assert load.prefill_ms(costs, 0.04) == pytest.approx(60.0)
    load.add(WORK, 0.04)
    assert load.prefill_ms(costs, 0.05) == pytest.approx(150.0)
    assert load.prefill_ms(costs, 9.0) == 0.0


def test_a_heartbeat_corrects_the_count_and_keeps_what_it_cannot_know() -> None:
    load, costs = profiled()
    load.add(WORK, 0.0)
    load.accepted(WORK)
    load.add(WORK, 0.0)  # on its way
    load.heard(told(waiting_tokens=300), 1, 0.01)
    assert load.prefill_ms(costs, 0.01) == pytest.approx((300 + 1000) * TOKEN_NS / 1e6)


def test_a_request_that_goes_elsewhere_takes_its_work_along() -> None:
    load, costs = profiled()
    load.add(WORK, 0.0)
    load.add(WORK, 0.0)
    load.end(WORK, 0.0, was_accepted=False)
    assert load.prefill_ms(costs, 0.0) == pytest.approx(100.0)
    load.accepted(WORK)
    load.end(WORK, 0.0, was_accepted=True)  # it may be computed still: heartbeats will tell
    assert load.num_ours == 0
    assert load.decode_ms(costs, 64.0) == 0.0


def test_requests_of_others_count_by_what_they_hold() -> None:
    """After a restart the router knows of none of those that run."""
    load, costs = profiled()
    load.heard(told(context_tokens=8000), 4, 0.0)
    expected = 64.0 * (4 * ROW_NS + 8 * KILOTOKEN_NS) / 1e6
    assert load.decode_ms(costs, 64.0) == pytest.approx(expected)
    for _ in range(4):
        load.add(WORK, 0.0)
    load.heard(told(context_tokens=4000), 4, 0.0)
    assert load.num_others == 0


def test_without_a_profile_loads_can_be_compared_still() -> None:
    load = Load()
    load.heard(ReplicaStats("s", True), 0, 0.0)
    assert load.costs is None
    load.add(WORK, 0.0)
    assert load.prefill_ms(RELATIVE, 100.0) == 1000.0  # only a heartbeat knows
    load.accepted(WORK)
    load.heard(ReplicaStats("s", True, waiting_tokens=10), 1, 100.0)
    assert load.prefill_ms(RELATIVE, 100.0) == 10.0


def test_a_load_that_nobody_told_of_lately_is_not_known() -> None:
    assert not Load().is_known(0.0)
    load, _ = profiled()
    assert load.is_known(STALE_S)
    assert not load.is_known(STALE_S + 0.1)


def test_profiles_that_differ_by_noise_are_taken_for_equal_ones() -> None:
    common = alike([Costs(1.0, 2.0, 0.001), Costs(1.2, 2.2, 0.003)])
    assert common == pytest.approx(Costs(1.1, 2.1, 0.002))
    assert alike([Costs(1.0, 2.0), Costs(3.0, 2.0)]) is None
    assert alike([Costs(1.0, 2.0), Costs(1.0, 4.0)]) is None


def test_answers_are_taken_to_be_as_long_as_lately() -> None:
    outputs = Outputs()
    assert outputs.expected(1000) == FIRST_OUTPUTS
    assert outputs.expected(5) == 5
    for _ in range(200):
        outputs.ended(500)
    assert outputs.expected(1000) == pytest.approx(500, rel=0.01)
