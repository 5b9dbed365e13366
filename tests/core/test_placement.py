"""On which rank a request runs: predicted time, room, and what a cached prefix saves."""

from collections import Counter
from time import process_time

from msgspec.structs import replace

from deepmesh.wire.messages import StepCosts
from tests.core.driver import words
from tests.core.ranks import CONFIG, ROOMY, Ranks

COSTS = StepCosts(
    base_ns=1_000_000, prefill_token_ns=10_000, decode_row_ns=20_000, context_kilotoken_ns=10_000
)
KNOWN = replace(ROOMY, costs=COSTS)


def places(ranks: Ranks) -> list[int]:
    return [ranks.places[number][0] for number in sorted(ranks.places)]


def test_equal_requests_go_round_and_ties_to_the_lowest_rank() -> None:
    ranks = Ranks([ROOMY] * 3)
    for number in range(6):
        ranks.ask(words(20, seed=number))
    ranks.step()
    assert places(ranks) == [0, 1, 2, 0, 1, 2]


def test_pending_prefill_and_long_contexts_count_not_the_number_of_requests() -> None:
    for capacity in (ROOMY, KNOWN):
        ranks = Ranks([capacity] * 2)
        ranks.ask(words(3000, seed=1), max_tokens=100)
        ranks.step()
        for number in range(4):
            ranks.ask(words(20, seed=10 + number), max_tokens=100)
        ranks.step()
        assert places(ranks) == [0, 1, 1, 1, 1]


def test_a_slower_rank_gets_less() -> None:
    slow = replace(COSTS, prefill_token_ns=40_000, decode_row_ns=80_000)
    ranks = Ranks([KNOWN, replace(KNOWN, costs=slow)])
    for number in range(10):
        ranks.ask(words(40, seed=number), max_tokens=50)
    ranks.step()
    assert Counter(places(ranks)) == {0: 8, 1: 2}


def test_a_rank_without_room_is_passed_over_and_comes_back_when_it_has_some() -> None:
    ranks = Ranks([replace(ROOMY, num_global_blocks=20), ROOMY])
    ranks.ask(words(100, seed=1), max_tokens=50)
    for number in range(3):
        ranks.ask(words(100, seed=2 + number), max_tokens=50)
    ranks.run()
    assert places(ranks) == [0, 1, 1, 1]
    ranks.ask(words(100, seed=9), max_tokens=4)
    ranks.run()
    assert ranks.places[4] == [0]


def test_a_long_cached_prefix_draws_a_request_to_its_rank() -> None:
    prefix = words(1600, seed=1)
    ranks = Ranks([KNOWN] * 3)
    ranks.ask(words(20, seed=3), max_tokens=200)
    ranks.ask(prefix, max_tokens=2)
    for _ in range(30):
        ranks.step()
    follower = ranks.ask(prefix + words(30, seed=2), max_tokens=10)
    ranks.step()
    assert ranks.places[follower] == ranks.places[1] == [1]


def test_a_hot_prefix_does_not_pin_everybody_on_one_rank() -> None:
    """A hit of 160 tokens saves 1.6 ms once; a row too many costs 20 µs for 64 steps."""
    prefix = words(161, seed=1)
    ranks = Ranks([KNOWN] * 4)
    ranks.ask(prefix, max_tokens=2)
    ranks.run()
    for number in range(16):
        ranks.ask(prefix + words(10, seed=2 + number), max_tokens=200)
    ranks.step()
    share = Counter(places(ranks)[1:])
    assert len(share) == 4
    assert max(share.values()) <= 7


def test_placing_is_cheap_with_many_ranks_and_a_long_queue() -> None:
    """128 ranks, 1,000 waiting: bounded work for each that enters, none for those that wait."""
    config = replace(CONFIG, max_rows=4, max_waiting=2000)
    ranks = Ranks([replace(ROOMY, num_slots=8)] * 128, config, is_checked=False)
    for number in range(1512):
        ranks.ask(words(30, seed=number), max_tokens=2000)
    begin = process_time()
    ranks.step()
    entering = process_time() - begin
    assert ranks.core.stats().waiting == 1000
    begin = process_time()
    for _ in range(5):
        ranks.step()
    waiting = (process_time() - begin) / 5
    assert entering < 2.0  # 512 entered; about 0.1 s
    assert waiting < 0.5  # about 0.03 s, made-up answers of 128 ranks included
