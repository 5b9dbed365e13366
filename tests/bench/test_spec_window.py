"""What `bench spec` counts: steps in which all requests decode, and enough of them."""

from collections.abc import Iterator

import pytest

from bench.checkpoints import Checkpoint
from bench.determinism.outputs import Output
from bench.spec import RECORDED
from bench.spec_acceptance import read_acceptance
from bench.spec_runs import (
    END_TOKENS,
    LEAST_TOKENS,
    LENGTHS,
    NONE,
    WINDOW_STEPS,
    ZERO,
    Policies,
    random_jobs,
)
from bench.spec_window import LEAST_STEPS, Counts, EmptyWindow, Window
from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import StepCosts
from services.executor.model_config import load_config
from services.executor.random_model import write_random_model
from tests.core.driver import Driver

ROWS = 64
SLOTS = ROWS + ROWS // 2  # that an executor has for so many rows
DEAR = StepCosts(base_ns=1000, prefill_token_ns=2000, decode_row_ns=100)
LONGEST, MOST = 40, 12
ALL_DRAFTS = str(max(LENGTHS))


# ------------------------------------------------------------ the core, run after run


def entering(*, settles: bool, share: float) -> list[int]:
    """Requests of a second run that have a token, from the first of them on, after each step.

    `settles`: the steps in flight when the first run is aborted end before the second begins.
    """
    config = SchedulerConfig(
        max_rows=ROWS, step_tokens=512, chunk_tokens=32, prefix_cache=False, prefill_share=share
    )
    room = {"num_slots": SLOTS, "num_global_blocks": 512, "num_window_blocks": 1024}
    driver = Driver(config, num_state_blocks=512, costs=DEAR, **room)  # type: ignore[arg-type]
    driver.audits = False
    running = [driver.ask(8, 64) for _ in range(ROWS)]
    while not all(request.output for request in running):
        driver.step()
    driver.tick()  # the next steps are on their way
    assert driver.steps
    for request in running:
        driver.abort(request)
    while settles and driver.steps:
        driver.body()
        driver.tail()
    again = [driver.ask(8, 64) for _ in range(ROWS)]
    counts: list[int] = []
    while not counts or counts[-1] < ROWS:
        driver.step()
        if count := sum(bool(request.output) for request in again):
            counts.append(count)
    return counts


@pytest.mark.parametrize("share", [0.1, 1.0])
def test_all_requests_enter_in_one_step_if_the_run_before_has_settled(share: float) -> None:
    assert entering(settles=True, share=share) == [ROWS]


def test_an_aborted_run_has_its_slots_until_its_steps_end() -> None:
    assert entering(settles=False, share=1.0)[0] == SLOTS - ROWS


def test_prompts_behind_those_that_decode_are_rationed_unless_they_may_take_all() -> None:
    rationed, free = (entering(settles=False, share=share) for share in (0.1, 1.0))
    assert rationed[0] == free[0] == SLOTS - ROWS
    assert len(rationed) > 4 * len(free)


# ------------------------------------------------------------ the window alone


class Played:
    """A run whose steps the test makes up."""

    def __init__(self, rows: int) -> None:
        self.outputs = {row: Output() for row in range(rows)}
        self.num_answered, self.is_aborted = 7, False  # not the first run of this rig
        self.drafts: tuple[list[int], list[int]] = [3], [1]
        self.clock_s = 0.0  # a clock may begin with 0

    def clock(self) -> float:
        return self.clock_s

    def abort(self) -> None:
        self.is_aborted = True

    def step(self, *tokens: int) -> None:
        """So many of each request."""
        for row, count in enumerate(tokens):
            self.outputs[row].ids += bytes(4 * count)
        self.num_answered += 1
        self.clock_s += 0.5


def played(*steps: tuple[int, ...]) -> tuple[Window, Played]:
    """A window that has seen these steps, the first of them when the clock was 0."""
    run = Played(len(steps[0]))
    window = Window(run.clock, longest=LONGEST, most_steps=MOST)
    run.clock_s = -0.5
    for tokens in steps:
        run.step(*tokens)
        window.look(run)
    return window, run


def test_it_opens_with_the_last_request_and_counts_steps() -> None:
    window, run = played((1, 0), (1, 1), *[(1, 2)] * MOST, (6, 6))
    assert run.is_aborted
    found = window.found()
    assert (found.steps, found.tokens, found.seconds) == (MOST, 3 * MOST, 0.5 * MOST)


def test_it_counts_from_a_clock_that_says_0() -> None:
    window, _ = played((1, 1), *[(1, 1)] * MOST)
    assert window.found().seconds == 0.5 * MOST


def test_it_closes_before_drafts_are_cut() -> None:
    window, run = played((1, 1), *[(6, 1)] * 7)
    assert run.is_aborted
    assert window.found().steps == 7
    assert max(output.num_tokens for output in run.outputs.values()) == 43


def test_it_goes_on_until_then() -> None:
    window, run = played((1, 1), *[(6, 1)] * 6)
    assert not run.is_aborted
    with pytest.raises(EmptyWindow, match="the run ended before"):
        window.found()


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([(1, 0), *[(8, 0)] * 5], "1 requests had no token yet .* give more --tokens"),
        ([(1, 1), *[(8, 1)] * 5], "5 steps in which .* give more --tokens"),
        ([(1, 0), *[(8, 0)] * 4, (8, 1)], "0 steps in which .* give more --tokens"),
    ],
)
def test_a_window_of_hardly_any_step_is_an_error(steps: list[tuple[int, ...]], text: str) -> None:
    window, run = played(*steps)
    assert run.is_aborted
    with pytest.raises(EmptyWindow, match=text):
        window.found()


def test_counts_between_two_moments_go_by_place() -> None:
    before = Counts(1.0, 5, 10, [4], [2])
    after = Counts(3.0, 9, 30, [9, 3], [6, 1])
    assert after.since(before) == Counts(2.0, 4, 20, [5, 3], [4, 1])


def test_the_least_tokens_hold_a_whole_window_of_the_luckiest_request() -> None:
    assert WINDOW_STEPS * (1 + max(LENGTHS)) <= LEAST_TOKENS - END_TOKENS - 1
    assert LEAST_STEPS <= WINDOW_STEPS


# ------------------------------------------------------------ run after run on an executor


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("spec") / "nano"
    write_random_model(folder, "v41-nano")
    return Checkpoint("nano", folder, load_config(folder))


@pytest.fixture
def policies(nano: Checkpoint) -> Iterator[Policies]:
    made = Policies(nano, read_acceptance(RECORDED), ROWS, LEAST_TOKENS)
    yield made
    made.close()


def test_each_of_many_runs_is_counted_for_enough_steps(
    policies: Policies, nano: Checkpoint
) -> None:
    jobs = random_jobs(nano.config, ROWS, LEAST_TOKENS, 0.0)
    wanted = policies.learn(jobs)
    for policy in (NONE, ZERO, ALL_DRAFTS):
        for _ in range(2):
            run = policies.run(policy, jobs)
            assert run.counts.steps >= LEAST_STEPS
            assert run.verifying == ROWS * run.counts.steps  # all of them, in every step
            assert all(ids == wanted[i][: len(ids)] for i, ids in run.outputs.items())
            lengths = {len(ids) for ids in run.outputs.values()}
            assert len(lengths) == 1 or policy == ALL_DRAFTS  # they began in the same step
            each = [run.verifying] * max(LENGTHS) if policy == ALL_DRAFTS else []
            assert run.counts.verified == each  # nowhere were drafts cut
