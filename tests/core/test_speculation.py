"""Verify rows: what is reserved, what comes back, and where the verify capacity comes from."""

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import RowMode, StepCosts
from services.scheduler.core.draft_counts import StepDrafts
from services.scheduler.core.speculation import (
    NUM_BINS,
    PROBE_SHARE,
    SHARES,
    Choice,
    VerifyCapacity,
    gains,
)
from services.scheduler.core.step_curve import SpeculationCosts, StepCurve
from tests.core.driver import CONFIG, Driver


def histogram(**counts: int) -> bytes:
    """Drafts by survival: low, middle, high."""
    bins = np.zeros(NUM_BINS, np.uint32)
    for name, at in (("low", 0), ("middle", NUM_BINS // 2), ("high", NUM_BINS - 1)):
        bins[at] = counts.get(name, 0)
    return bins.tobytes()


def test_a_verify_row_reserves_its_drafts_and_the_start_of_the_next_is_a_range() -> None:
    driver = Driver(draft_len=3)
    driver.ask(10, max_tokens=40)
    for _ in range(3):
        driver.step()
    driver.tick()
    newer = driver.rows()
    assert newer["mode"].tolist() == [RowMode.VERIFY]
    assert newer["q"].tolist() == [4]
    assert driver.core.engine is not None
    table = driver.core.engine.residency.table
    confirmed = int(table.confirmed_kv[0])
    assert newer["start_lo"].tolist() == [confirmed + 1]  # the row in flight accepts none, or all
    assert newer["start_hi"].tolist() == [confirmed + 4]
    assert int(table.num_global[0]) * 8 >= confirmed + 8
    descriptor = driver.all_steps[-1].descriptor
    assert (descriptor.n_draft_passes, descriptor.verify_capacity) == (3, 4)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("draft_len", [1, 5, 7])
def test_drafts_change_no_token_and_never_pass_the_limit(depth: int, draft_len: int) -> None:
    driver = Driver(replace(CONFIG, depth=depth), draft_len=draft_len)
    plain = Driver(replace(CONFIG, depth=depth))
    for length in (1, 7, 8, 9, 15, 16, 17, 31, 40):
        driver.ask(length, max_tokens=3 * length % 23 + 1)
        plain.ask(length, max_tokens=3 * length % 23 + 1)
    driver.run()
    plain.run()
    outputs = [request.output for request in driver.requests.values()]
    assert outputs == [request.output for request in plain.requests.values()]
    assert driver.device.rejected_drafts > 0
    assert len(driver.all_steps) < len(plain.all_steps)
    driver.assert_clean()


def test_tokens_behind_a_stop_in_the_same_row_are_thrown_away() -> None:
    plain = Driver()
    whole = plain.ask(10, max_tokens=60)
    plain.run()
    for at in range(2, 40):
        driver = Driver(draft_len=7)
        request = driver.ask(10, max_tokens=60, stop_at=at)
        while len(request.output) < at:
            driver.step()
        driver.stop_at(request, at)
        driver.run()
        assert request.output[:at] == whole.output[:at]
        driver.assert_clean()


def costs_of(*tiers: tuple[int, float], draft: float = 0.0) -> SpeculationCosts:
    return SpeculationCosts(tiers, draft, 0.0)


def test_without_costs_every_draft_is_verified_and_without_data_none() -> None:
    assert VerifyCapacity(draft_len=5).choose(8) == Choice(48, drafts=True)
    trimmed = VerifyCapacity(draft_len=5, costs=costs_of((8, 0.9), (16, 1.0), (48, 9.0)))
    assert trimmed.choose(8) == Choice(8, drafts=True)
    trimmed.observe(histogram(high=40))
    assert trimmed.choose(8).capacity == 8  # one step's data is not two steps old
    trimmed.observe(histogram(high=40))
    assert trimmed.choose(8).capacity == 16


def test_the_capacity_comes_from_data_two_steps_old() -> None:
    capacity = VerifyCapacity(draft_len=5, costs=costs_of((32, 0.9), (64, 1.0), (192, 2.0)))
    capacity.observe(histogram(high=160))
    capacity.observe(histogram(high=32, low=128))
    assert capacity.choose(32).capacity == 192  # from the first, where all drafts survived
    capacity.observe(histogram(high=32, low=128))
    assert capacity.choose(32).capacity == 64
    capacity.observe(b"")
    assert capacity.choose(32).capacity == 64  # a step without data leaves what is known


def test_how_old_data_is_counts_the_steps_in_flight() -> None:
    capacity = VerifyCapacity(draft_len=5, costs=costs_of((32, 0.9), (64, 1.0), (192, 2.0)))
    capacity.observe(histogram(high=160))
    capacity.observe(histogram(high=32, low=128))
    assert capacity.choose(32, in_flight=0).capacity == 192  # the newest is one step old
    assert capacity.choose(32, in_flight=1).capacity == 64


def test_few_rows_are_averaged_over_steps_and_do_not_choose_among_them() -> None:
    """A row alone verifies its first drafts: likelier ones of other steps are not to be had."""
    capacity = VerifyCapacity(draft_len=2, costs=costs_of((1, 0.9), (2, 1.0), (3, 1.15)))
    for _ in range(40):
        capacity.observe(histogram(high=2))
        capacity.observe(histogram(low=2))
    assert capacity.choose(1).capacity == 3  # half of the first drafts hold, and of the second ones


def test_the_group_stops_drafting_where_it_does_not_pay_and_tries_again() -> None:
    """A step of twice the tokens takes twice the time: what a draft brings it costs, too."""
    dear = VerifyCapacity(draft_len=1, costs=costs_of((8, 8e3), (16, 16e3), draft=4e3))
    for _ in range(2):
        dear.observe(histogram(middle=8))
    choices = [dear.choose(8) for _ in range(4000)]
    assert choices[0] == Choice(8, drafts=False)
    probes = [at for at, choice in enumerate(choices) if choice.drafts]
    assert len(probes) >= 3
    assert all(choices[at].capacity == 8 for at in probes)  # they verify nothing
    assert sum(4e3 for _ in probes) <= PROBE_SHARE * 4000 * 8e3 + 4e3
    for _ in range(2):
        dear.observe(histogram(high=8))  # and dearer still than the drafts are worth
    assert not dear.choose(8).drafts
    cheap = VerifyCapacity(draft_len=1, costs=costs_of((8, 8.0), (16, 10.0), draft=1.0))
    for _ in range(2):
        cheap.observe(histogram(high=8))
    assert cheap.choose(8) == Choice(16, drafts=True)


def step_of(rows: int, verified: int, accepted: int, draft_ns: int = 0) -> StepDrafts:
    """A step of one rank."""
    return StepDrafts(
        rows=rows,
        widest_rows=rows,
        widest_tokens=rows + verified,
        verified=verified,
        accepted=accepted,
        tokens=rows + accepted,
        draft_ns=draft_ns,
        draft_rows=rows if draft_ns else 0,
    )


def behind_trials(capacity: VerifyCapacity, rows: int) -> Choice:
    """What is chosen once a few steps have shown what verifying takes."""
    choices = [capacity.choose(rows) for _ in range(40)]
    return choices[-1]


def test_drafts_that_bring_less_than_they_promise_are_given_up() -> None:
    capacity = VerifyCapacity(draft_len=1, costs=costs_of((8, 8e3), (16, 10e3), draft=1e3))
    for _ in range(2):
        capacity.observe(histogram(high=8))
    assert capacity.choose(8) == Choice(16, drafts=True)
    for _ in range(60):
        capacity.saw(step_of(8, 8, 1, draft_ns=1000), 11_000)
    assert not behind_trials(capacity, 8).drafts
    for _ in range(200):
        capacity.saw(step_of(8, 8, 8, draft_ns=1000), 11_000)
    assert capacity.choose(8).drafts


def test_costs_follow_what_steps_take() -> None:
    """Twice as slow altogether changes no choice; verifying that turns out dear does."""
    capacity = VerifyCapacity(draft_len=1, costs=costs_of((8, 8e3), (16, 10e3), draft=1e3))
    for _ in range(2):
        capacity.observe(histogram(high=8))
    for _ in range(200):
        capacity.saw(step_of(8, 0, 0), 16_000)
        capacity.saw(step_of(8, 8, 8, draft_ns=2000), 22_000)
    assert capacity.choose(8) == Choice(16, drafts=True)
    for _ in range(400):
        capacity.saw(step_of(8, 0, 0), 16_000)
        capacity.saw(step_of(8, 8, 8, draft_ns=2000), 42_000)
    assert not behind_trials(capacity, 8).drafts
    again = VerifyCapacity(
        draft_len=1,
        costs=costs_of((8, 8e3), (16, 10e3), draft=1e3),
        learned=capacity.learned,
    )
    for _ in range(2):
        again.observe(histogram(high=8))
    assert not again.choose(8).drafts  # the next engine need not learn it anew


def test_steps_refine_the_curve_and_one_that_was_held_up_does_not() -> None:
    curve = StepCurve(costs_of((1, 1e3), (64, 64e3), draft=500.0))
    for _ in range(20):
        curve.saw(8, 8_000, verifies=False)
    curve.saw(8, 80_000_000, verifies=False)
    assert curve.step(8) < 1.3 * 8e3
    for _ in range(300):
        curve.saw(8, 12_000, verifies=False)
        curve.saw(32, 40_000, verifies=True)
        curve.saw_draft(8, 700)
    assert curve.step(8) == pytest.approx(12_000, rel=0.05)
    assert curve.step(32, verifies=True) == pytest.approx(40_000, rel=0.05)
    assert curve.draft(8) == pytest.approx(700, rel=0.05)
    copy = StepCurve(curve.costs, curve.learned)
    assert copy.step(13, verifies=True) == curve.step(13, verifies=True)


def simulated(
    length: int | None, rows: int, steps: int, right: float, seed: int, host_ns: float = 0.0
) -> float:
    """Tokens per time of a device: fixed draft length, or the policy (None)."""
    draw = np.random.default_rng(seed)
    costs = SpeculationCosts(
        tuple((n, 1e6 + 9e4 * n) for n in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 384)), 4e5, 2e4
    )
    policy = VerifyCapacity(draft_len=5, costs=costs)
    tokens, took, drafted = 0, 0.0, 0
    for _ in range(steps):
        fixed = Choice(rows * (1 + (length or 0)), drafts=bool(length))
        capacity, drafts = policy.choose(rows, in_flight=1) if length is None else fixed
        each = min(drafted, max(0, capacity - rows) // rows)
        hits = (draw.random((rows, 5)) < right).cumprod(1)[:, :each].sum()
        draft_ns = costs.draft(rows) * 1.3 if drafts else 0.0  # it was measured too well
        step_ns = costs.step(rows * (1 + each)) * 1.2 + draft_ns + host_ns
        tokens, took, drafted = tokens + rows + int(hits), took + step_ns, 5 * drafts
        said = min(1.0, right * 1.1)  # and drafts are surer of themselves than they should be
        bins = np.minimum((said ** np.arange(1, 6) * NUM_BINS).astype(int), NUM_BINS - 1)
        data = np.bincount(np.repeat(bins, rows), minlength=NUM_BINS).astype("<u4").tobytes()
        if length is None:
            policy.observe(data if drafts else b"")
            policy.saw(step_of(rows, rows * each, int(hits), int(draft_ns)), int(step_ns))
    return tokens / took


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("right", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("host_ns", [0.0, 3e6])  # that nobody had measured
def test_the_policy_is_no_loss_and_near_the_best_fixed_length(
    rows: int, right: float, host_ns: float
) -> None:
    policy = simulated(None, rows, 600, right, 1, host_ns)
    fixed = [simulated(length, rows, 600, right, 1, host_ns) for length in (0, 1, 3, 5)]
    assert policy >= 0.97 * fixed[0]
    assert policy >= 0.95 * max(fixed)


def test_costs_are_those_of_the_slowest_rank_and_a_line_between_tiers() -> None:
    one = StepCosts(verify=[(1, 10), (8, 24), (16, 60)], draft_base_ns=3, draft_row_ns=2)
    two = StepCosts(verify=[(1, 8), (8, 30)], draft_base_ns=5, draft_row_ns=1)
    costs = SpeculationCosts.of([one, two])
    assert costs is not None
    assert [costs.step(tokens) for tokens in (1, 8, 15)] == [10, 30, 50]
    assert costs.draft(4) == 13
    assert SpeculationCosts.of([one, StepCosts()]) is None


def test_the_likeliest_drafts_are_taken_first() -> None:
    counts = np.frombuffer(histogram(high=4, middle=4), np.uint32).astype(np.float64)
    high, middle = (NUM_BINS - 0.5) / NUM_BINS, (NUM_BINS // 2 + 0.5) / NUM_BINS
    wanted = {0.0: 0.0, 0.25: 2 * high, 0.5: 4 * high, 0.75: 4 * high + 2 * middle}
    found = dict(zip(SHARES.round(3).tolist(), (8 * gains(counts)).tolist(), strict=True))
    assert {share: found[share] for share in wanted} == pytest.approx(wanted)
    assert found[1.0] == pytest.approx(4 * high + 4 * middle)
    assert not gains(np.zeros(NUM_BINS)).any()
