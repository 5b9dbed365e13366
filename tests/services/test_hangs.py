"""Who hangs is known by what it no longer does, and nobody is taken for hung by mistake."""

import os
from pathlib import Path

import pytest

from deepmesh.hangs import HangWatch
from deepmesh.health import ready_path

PIDS = {"tokenizer-0": 7, "scheduler-0": 8}


class Stage:
    """A watch on a fake clock; services are files that are touched or not."""

    def __init__(self, run_dir: Path, hang_s: float = 10.0) -> None:
        self.run_dir, self.now = run_dir, 1000.0
        self.watch = HangWatch(run_dir, hang_s)
        self._stamp = 1

    def touch(self, name: str) -> None:
        self._stamp += 1
        path = ready_path(self.run_dir, name)
        path.touch()
        os.utime(path, ns=(self._stamp, self._stamp))

    def wait(self, seconds: float, *alive: str, pids: dict[str, int] = PIDS) -> list[str]:
        """Time passes in small steps, in which the living touch their files; who hangs then."""
        found: list[str] = []
        for _ in range(int(seconds * 2)):
            self.now += 0.5
            for name in alive:
                self.touch(name)
            found = self.watch.hung(pids, self.now)
        return found


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_one_that_was_ready_and_shows_nothing_any_more_hangs(stage: Stage) -> None:
    assert stage.wait(5, "tokenizer-0", "scheduler-0") == []
    assert stage.wait(9.5, "tokenizer-0") == []
    assert stage.wait(1, "tokenizer-0") == ["scheduler-0"]
    assert stage.wait(1, "tokenizer-0", "scheduler-0") == []


def test_one_that_loads_or_has_ended_is_not_judged(stage: Stage) -> None:
    assert stage.wait(100, "tokenizer-0") == []  # the scheduler has no file yet
    stage.touch("scheduler-0")
    assert stage.wait(20, "tokenizer-0", pids={**PIDS, "scheduler-0": 0}) == []


def test_what_a_killed_process_left_is_not_its_successor_s(stage: Stage) -> None:
    assert stage.wait(20, "tokenizer-0", "scheduler-0") == []
    stage.watch.started("scheduler-0")
    assert stage.wait(60, "tokenizer-0", pids={**PIDS, "scheduler-0": 9}) == []


def test_a_machine_that_slept_kills_nobody(stage: Stage) -> None:
    assert stage.wait(5, "tokenizer-0", "scheduler-0") == []
    stage.now += 3600
    assert stage.wait(9, "tokenizer-0") == []
    assert stage.wait(2, "tokenizer-0") == ["scheduler-0"]


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    stage = Stage(tmp_path, hang_s=0)
    assert stage.wait(5, "scheduler-0") == []
    assert stage.wait(1000) == []
