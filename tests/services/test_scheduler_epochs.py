"""No instance of a scheduler uses an engine epoch again, however soon it follows another."""

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.epochs import MARGIN, EpochLog

LIVES = st.lists(
    st.tuples(
        st.integers(-5, 5),  # how far the clock has moved since the start before
        st.lists(st.integers(1, 3), max_size=5),  # epochs begun in each turn
        st.integers(0, MARGIN - 1),  # begun in the turn in which it was killed
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(LIVES)
def test_no_epoch_is_used_twice(lives: list[tuple[int, list[int], int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        used: list[int] = []
        now_s = 1_764_000_000
        for moved, turns, unnoted in lives:
            now_s += moved
            log = EpochLog(Path(folder) / "epochs", "scheduler-0", now_s)
            epoch = log.first
            used.append(epoch)
            for begun in turns:
                used += range(epoch + 1, epoch + begun + 1)
                epoch += begun
                log.note(epoch)
            used += range(epoch + 1, epoch + unnoted + 1)
        assert len(set(used)) == len(used)
        assert used == sorted(used)


def test_schedulers_count_apart_and_a_new_one_begins_with_the_clock(tmp_path: Path) -> None:
    assert EpochLog(tmp_path, "scheduler-0", 1000).first == 1000
    assert EpochLog(tmp_path, "scheduler-1", 1001).first == 1001
    assert EpochLog(tmp_path, "scheduler-0", 1000).first == 1000 + MARGIN
    assert EpochLog(tmp_path, "scheduler-0", 10**9).first == 10**9


def test_a_damaged_file_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "scheduler-0").write_text("x")
    assert EpochLog(tmp_path, "scheduler-0", 1000).first == 1000
