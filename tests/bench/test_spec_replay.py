"""The draft policy replayed over recorded acceptance and measured costs: never a loss, and what the
best fixed length brings."""

import numpy as np
import pytest

from bench.spec import RECORDED
from bench.spec_acceptance import read_acceptance
from bench.spec_replay import Machine, Replay, machines, ratios
from services.executor.calibration import Calibration

STEPS = 300
MACHINES = {machine.name: machine for machine in machines()}
ACCEPTANCE = read_acceptance(RECORDED)


@pytest.mark.parametrize("name", ["tiny 1", "tiny 4", "tiny 16", "tiny 64", "medium 4"])
def test_the_policy_is_as_good_as_the_best_fixed_length_and_never_a_loss(name: str) -> None:
    machine = MACHINES[name]
    replay = Replay(machine, ACCEPTANCE, seed=1)
    replay.run(STEPS)
    assert replay.gain >= 0.95 * max(ratios(machine, ACCEPTANCE))


def test_drafts_that_pay_little_at_one_row_are_no_loss_while_that_is_found_out() -> None:
    replay = Replay(MACHINES["medium 1"], ACCEPTANCE, seed=1)
    replay.run(STEPS)
    assert replay.gain >= 0.95


def test_drafts_that_cost_more_than_they_bring_are_left_alone() -> None:
    tiny = MACHINES["tiny 4"]
    dear = Machine("dear", 4, tiny.costs, tuple((n, 3.0 * (1 + n)) for n in range(6)), 3.0)
    replay = Replay(dear, ACCEPTANCE, seed=1)
    replay.run(STEPS)
    assert sum(choice.drafts for choice in replay.choices) < 0.1 * STEPS
    assert replay.gain > 0.94


def test_confidences_that_are_too_low_by_far_mean_what_they_say_within_a_few_rows() -> None:
    """A temperature alone leaves 0.5 where it is."""
    draw, calibration = np.random.default_rng(0), Calibration(2)
    for _ in range(60):
        sure = draw.random((2, 2)).astype(np.float32)
        right = draw.random((2, 2)) < np.minimum(1.0, sure + 0.3)
        accepted = right.cumprod(1).sum(1)
        calibration.learn(sure, np.full(2, 2), accepted)
    half = calibration.apply(np.full((1, 2), 0.5, np.float32))
    assert 0.7 < half[0, 0] < 0.9
    low, high = calibration.apply(np.array([[0.1, 0.1], [0.9, 0.9]], np.float32))
    assert (low < half[0]).all()
    assert (half[0] < high).all(), "the order of a place's confidences stays"
    assert abs(calibration.error[0]) < 0.1


def test_nothing_is_learned_of_drafts_behind_a_wrong_one() -> None:
    calibration = Calibration(2)
    before = calibration.apply(np.full((1, 2), 0.5, np.float32))
    for _ in range(20):
        calibration.learn(np.full((1, 2), 0.5, np.float32), np.array([2]), np.array([0]))
    after = calibration.apply(np.full((1, 2), 0.5, np.float32))
    assert after[0, 0] < 0.2
    assert after[0, 1] == before[0, 1]
