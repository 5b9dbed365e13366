"""What was learned of drafts, from one scheduler process to the next."""

from pathlib import Path

import pytest

from services.scheduler.draft_costs import EVERY_S, DraftCosts

DAY_S = 86_400.0


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now_s = 1_764_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_next_process_knows_it_for_a_time(tmp_path: Path, clock: Clock) -> None:
    costs = DraftCosts(tmp_path / "draft-costs", "scheduler-0", ttl_s=DAY_S, clock=clock)
    assert costs.learned() == {}
    asked: list[float] = []

    def learned() -> dict[str, list[float]]:
        asked.append(clock.now_s)
        return {"engine 1 5": [1.0, 0.5]}

    costs.look(learned)
    assert not asked  # not yet
    clock.now_s += EVERY_S
    costs.look(learned)
    costs.look(learned)
    assert len(asked) == 1
    clock.now_s += DAY_S - 1
    again = DraftCosts(tmp_path / "draft-costs", "scheduler-0", ttl_s=DAY_S, clock=clock)
    assert again.learned() == {"engine 1 5": [1.0, 0.5]}
    clock.now_s += 2
    late = DraftCosts(tmp_path / "draft-costs", "scheduler-0", ttl_s=DAY_S, clock=clock)
    assert late.learned() == {}
    again.keep({"other 1 5": [0.25]})  # what is too old goes with the next word
    last = DraftCosts(tmp_path / "draft-costs", "scheduler-0", ttl_s=DAY_S, clock=clock)
    assert last.learned() == {"other 1 5": [0.25]}


def test_a_damaged_file_is_no_file(tmp_path: Path, clock: Clock) -> None:
    for text in ('{"a": ', '{"a": {"at_s": 1, "learned": "x"}}', "[]", ""):
        (tmp_path / "scheduler-0").write_text(text)
        costs = DraftCosts(tmp_path, "scheduler-0", ttl_s=DAY_S, clock=clock)
        assert costs.learned() == {}


def test_nothing_is_kept_where_nothing_shall_be(tmp_path: Path, clock: Clock) -> None:
    costs = DraftCosts(tmp_path / "none", "scheduler-0", ttl_s=0, clock=clock)
    costs.keep({"engine": [1.0]})
    assert not (tmp_path / "none").exists()


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_text("in the way")
    costs = DraftCosts(tmp_path / "file", "scheduler-0", ttl_s=DAY_S, clock=clock)
    costs.keep({"engine": [1.0]})
    assert costs.learned() == {"engine": [1.0]}  # of this process
