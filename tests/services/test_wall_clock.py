"""Times of a device whose clock drifts, told by the wall clock."""

import random

import pytest

from services.executor.gpu.clock import TOLERANCE_NS, WINDOW, WallClock

STEP_NS = 10_000_000


@pytest.mark.parametrize("drift", [0.0, 20e-6, -20e-6])
def test_times_follow_a_clock_that_drifts(drift: float) -> None:
    """100 s of steps, of which the host hears 40 us to 1 ms later."""
    draw, start = random.Random(0), 1_800_000_000_000_000_000
    clock = WallClock(start)  # the device's clock begins at 0
    late = drift * WINDOW * STEP_NS  # a whole window may pass before it shows
    for step in range(10_000):
        end = step * STEP_NS
        device = round(end * (1 + drift))
        clock.heard(device, start + end + 40_000 + round(draw.random() ** 4 * 1e6))
        error = clock.at(device) - start - end
        assert abs(error) < 2 * TOLERANCE_NS + 2 * abs(late)


def test_a_steady_clock_is_left_alone() -> None:
    """A correction would show as a gap between two steps."""
    draw, clock = random.Random(1), WallClock(5)
    for step in range(20 * WINDOW):
        clock.heard(step * STEP_NS, 5 + step * STEP_NS + 30_000 + round(draw.random() * 3e6))
        assert clock.at(0) == 5
