"""The table of a host that is behind its device: bounds, and what corrects them."""

import numpy as np
import pytest

from deepmesh.grammars import make_grammar
from deepmesh.wire.messages import Capacity, StepResult, SubmitStep
from services.executor.gpu.ahead import AheadSlots, Shortfall
from services.executor.interface import LiveRows
from services.executor.turn import Turn
from tests.contract.executor_host import Host, Request, prompt
from tests.tiny import VOCAB_SIZE

CAPACITY = Capacity(1, 0, 16, 16, 8, 4, 128, VOCAB_SIZE, 64)


class Kept:
    """An executor that keeps the last step."""

    step: SubmitStep

    def load(self, order: object) -> Capacity:
        return CAPACITY

    def submit(self, step: object) -> None:
        assert isinstance(step, SubmitStep)
        self.step = step

    def poll(self, timeout_s: float) -> StepResult | None:
        return None

    def reset(self, engine_epoch: int) -> None: ...

    def close(self, timeout_s: float = 0) -> bool:
        return True


class Rig:
    def __init__(self) -> None:
        self.opened: list[int] = []
        self.ended: list[int] = []
        self.ahead = AheadSlots(
            CAPACITY,
            on_open=lambda init: self.opened.append(init.slot),
            on_append=lambda blocks: None,
            on_end=lambda slots: self.ended.extend(slots.tolist()),
        )
        self._kept = Kept()
        self.host = Host(self._kept, CAPACITY)

    def launch(self, *requests: Request) -> LiveRows:
        """A step with whatever comes next of each."""
        live, step_id = self.resolve(*requests)
        self.ahead.project(live, step_id)
        return live

    def resolve(self, *requests: Request) -> tuple[LiveRows, int]:
        self.host.submit(*[self.host.row(request) for request in requests])
        turn = Turn(self._kept.step, [])
        self.ahead.catch_up()
        turn.enter(self.ahead)
        return self.ahead.resolve(turn.rows), turn.step.step_id

    def hear(self, request: Request, *, gen: int = 0, short: int = 0, ended: bool = False) -> None:
        init = request.init
        gens = np.array([gen or init.gen], np.uint32)
        falls, slots = np.array([short]), np.array([init.slot])
        self.ahead.hear(Shortfall(slots, gens, falls, falls, np.array([ended])))


def test_rows_are_launched_as_far_as_they_can_get() -> None:
    rig = Rig()
    request = rig.host.admit(prompt(20), 4)
    starts = [rig.launch(request).starts.tolist() for _ in range(6)]
    assert starts == [[0], [20], [21], [22], [], []]  # four tokens, and no row behind them
    assert rig.opened == [request.init.slot]


def test_a_row_that_fell_short_moves_those_behind_it_back() -> None:
    rig = Rig()
    request = rig.host.admit(prompt(20), 9)
    for _ in range(3):
        rig.launch(request)
    rig.hear(request, short=1)
    assert rig.launch(request).starts.tolist() == [21]


def test_rows_that_may_miss_their_masks_go_on_at_the_end() -> None:
    """Any of them may be the last one that is left to compute."""
    rig = Rig()
    request = rig.host.admit(prompt(20), 4, grammar=make_grammar("regex", "a+"))
    starts = [rig.launch(request).starts.tolist() for _ in range(6)]
    assert starts == [[0], [20], [21], [22], [22], [22]]
    rig.hear(request, short=1)  # of six rows two gave nothing: the fifth is the last one
    rig.hear(request, short=1)
    assert rig.launch(request).starts.tolist() == [22]
    rig.hear(request, ended=True)
    assert rig.launch(request).starts.tolist() == []


def test_news_of_the_request_before_does_not_touch_the_next_one() -> None:
    rig = Rig()
    request = rig.host.admit(prompt(20), 9)
    rig.launch(request)
    rig.hear(request, gen=request.init.gen + 1, short=1, ended=True)
    assert rig.launch(request).starts.tolist() == [20]
    assert rig.ended == []


def test_the_device_is_told_once_that_a_request_is_over() -> None:
    rig = Rig()
    request, other = rig.host.admit(prompt(20), 9), rig.host.admit(prompt(7), 9)
    rig.launch(request, other)
    rig.hear(request, ended=True)
    rig.hear(request, ended=True)
    live = rig.launch(request, other)
    assert live.slots.tolist() == [other.init.slot]
    assert rig.ended == [request.init.slot]


def test_only_output_behind_the_newest_id_needs_no_look_at_the_host() -> None:
    rig = Rig()
    request = rig.host.admit(prompt(20), 9)
    again = rig.host.admit(prompt(24), 9, prompt_len=20)  # with output that is known
    for expected in ([False, False], [True, True]):
        live, step_id = rig.resolve(request, again)
        assert rig.ahead.newest(live).tolist() == expected
        rig.ahead.project(live, step_id)


def test_ids_that_only_the_device_knows_are_not_taken_from_the_host() -> None:
    rig = Rig()
    request = rig.host.admit(prompt(20), 9)
    rig.ahead.check_known(rig.launch(request))
    with pytest.raises(AssertionError, match="only the device knows its ids"):
        rig.ahead.check_known(rig.launch(request))
