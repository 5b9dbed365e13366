"""Which replica is chosen, of candidates whose loads and hits are known."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.policy import BOUND, Candidate, choose


def idle(name: str, hit: float = 0.0, load: float = 0.0) -> Candidate:
    """A replica that would compute 100 ms less what it has."""
    return Candidate(name, load, 100.0 * (1 - hit), 100.0)


def test_the_least_loaded_is_chosen_and_equals_take_turns() -> None:
    assert {choose([idle("a", load=300), idle("b", load=200)], t).name for t in range(4)} == {"b"}
    equals = [idle("a", load=200), idle("b", load=200), idle("c", load=500)]
    assert [choose(equals, turn).name for turn in range(4)] == ["a", "b", "a", "b"]
    assert choose(equals, 0).reason == "turn"


def test_of_equals_the_one_with_more_of_the_prompt_is_chosen() -> None:
    """As good by score: what it would save is what it is behind."""
    assert choose([idle("a"), idle("b", hit=0.5, load=50.0)], 0).name == "b"
    assert choose([idle("a"), idle("b", hit=0.5, load=50.0)], 1).name == "b"


def test_a_cached_prefix_is_worth_the_work_that_it_saves() -> None:
    assert choose([idle("a", hit=0.9, load=80.0), idle("b")], 0) == ("a", "hit")
    assert choose([idle("a", hit=0.9, load=95.0), idle("b")], 0) == ("b", "bound")


def test_under_load_it_counts_within_the_bound_only() -> None:
    near, far = idle("a", hit=0.9, load=1100.0), idle("a", hit=0.9, load=1900.0)
    assert choose([near, idle("b", load=1000.0)], 0) == ("a", "hit")
    assert choose([far, idle("b", load=1000.0)], 0) == ("b", "bound")


def test_a_small_part_of_the_prompt_is_not_worth_a_longer_queue() -> None:
    assert choose([idle("a", hit=0.1, load=1200.0), idle("b", load=1000.0)], 0) == ("b", "load")


def test_a_slower_replica_gets_less() -> None:
    slow, fast = Candidate("a", 100.0, 200.0, 200.0), Candidate("b", 100.0, 100.0, 100.0)
    assert {choose([slow, fast], turn).name for turn in range(4)} == {"b"}


def test_where_nothing_is_known_two_are_drawn_and_the_emptier_is_taken() -> None:
    """Loads are hours old: all of a burst would run to the one that was idle then."""
    candidates = [
        Candidate(f"r{n}", 0.0 if n == 3 else 900.0, num_ours=n % 2, is_known=False)
        for n in range(8)
    ]
    chosen = Counter(choose(candidates, 0, draw).name for draw in range(56))
    assert chosen["r3"] < 56 / 4
    assert len(chosen) >= 4
    even = sum(count for name, count in chosen.items() if int(name[1:]) % 2 == 0)
    assert even > 2 * (56 - even)  # they have fewer of ours
    assert {choose(candidates, 0, draw).reason for draw in range(56)} == {"two"}


def test_one_that_has_the_prompt_is_chosen_even_if_loads_are_unknown() -> None:
    candidates = [Candidate("a", 0.0, is_known=False), Candidate("b", 0.0, 0.2, is_known=False)]
    assert choose(candidates, 0, 7) == ("b", "hit")


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_replicas_will_do(count: int) -> None:
    candidates = [Candidate(f"r{n}", 0.0, is_known=False) for n in range(count)]
    names = {choose(candidates, 0, draw).name for draw in range(50)}
    assert names == {candidate.name for candidate in candidates}


LOADS = st.lists(
    st.tuples(st.floats(0, 5000), st.floats(0, 1), st.floats(1, 1000)), min_size=1, max_size=9
)


@given(LOADS, st.integers(0), st.integers(0))
def test_no_choice_exceeds_the_bound(
    loads: list[tuple[float, float, float]], turn: int, draw: int
) -> None:
    """Unless everybody does: then it goes where it does so least."""
    candidates = [
        Candidate(str(i), load, whole * (1 - hit), whole)
        for i, (load, hit, whole) in enumerate(loads)
    ]
    total = sum(c.load for c in candidates)
    unit = sum(c.whole for c in candidates) / len(candidates)

    def over(candidate: Candidate) -> float:
        bound = max(BOUND * (total + candidate.work) / len(candidates), unit)
        return candidate.load + candidate.work - bound

    chosen = candidates[int(choose(candidates, turn, draw).name)]
    assert over(chosen) <= max(0.0, min(map(over, candidates))) + 1e-3


@given(LOADS, st.integers(0, 99))
def test_who_is_worse_in_everything_is_not_chosen(
    loads: list[tuple[float, float, float]], turn: int
) -> None:
    candidates = [
        Candidate(str(i), load, whole * (1 - hit), whole)
        for i, (load, hit, whole) in enumerate(loads)
    ]
    chosen = candidates[int(choose(candidates, turn).name)]
    for other in candidates:
        better_load = other.load < chosen.load - 1e-2 and other.work <= chosen.work
        assert not better_load, (chosen, other)
