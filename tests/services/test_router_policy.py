"""Which replica the router chooses, and what it remembers of its choices."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deepmesh.wire.messages import AckRow, ErrorCode, Failed, Generate, ReplicaStats, ServiceStats
from services.router import placements
from services.router.placements import Placements, Send
from services.router.policy import BOUND, Candidate, choose


def generate(number: int, attempt: int = 1) -> Generate:
    return Generate(number.to_bytes(16, "big"), attempt, "tokenizer-0", b"\0" * 8, 2)


def stats(requests: int = 0, *, ready: bool = True, draining: bool = False) -> ServiceStats:
    return ServiceStats(ready, requests, [ReplicaStats("s", ready, draining=draining)])


def router(*loads: int, room: int = 100) -> Placements:
    made = Placements(room)
    for index, load in enumerate(loads):
        made.replica_up(f"s{index}")
        made.heartbeat(f"s{index}", stats(load))
    return made


def placed_at(router: Placements, number: int, attempt: int = 1) -> str:
    (send,) = router.generate("tokenizer-0", generate(number, attempt))
    assert isinstance(send.message, Generate), send
    return send.name


# ---------------------------------------------------------------- the choice


def test_the_least_loaded_is_chosen_and_equals_take_turns() -> None:
    two = [Candidate("a", 3), Candidate("b", 2)]
    assert {choose(two, turn) for turn in range(4)} == {"b"}
    equals = [Candidate("a", 2), Candidate("b", 2), Candidate("c", 5)]
    assert [choose(equals, turn) for turn in range(4)] == ["a", "b", "a", "b"]


def test_a_cached_prefix_counts_within_the_bound_only() -> None:
    assert choose([Candidate("a", 10, affinity=128), Candidate("b", 9)], 0) == "a"
    assert choose([Candidate("a", 20, affinity=128), Candidate("b", 9)], 0) == "b"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 500)), min_size=1), st.integers(0))
def test_no_choice_exceeds_the_bound(loads: list[tuple[int, int]], turn: int) -> None:
    candidates = [Candidate(str(i), load, known) for i, (load, known) in enumerate(loads)]
    load = candidates[int(choose(candidates, turn))].load
    least = min(c.load for c in candidates)
    assert load == least or load + 1 <= BOUND * (sum(c.load for c in candidates) + 1) / len(loads)


# ---------------------------------------------------------------- what is remembered


def test_its_own_requests_count_before_the_next_heartbeat() -> None:
    made = router(0, 0, 3)
    counts = Counter(placed_at(made, number) for number in range(9))
    assert counts == {"s0": 4, "s1": 4, "s2": 1}


def test_requests_of_others_count_as_of_the_last_heartbeat() -> None:
    made = router(0, 0)
    assert [placed_at(made, n) for n in range(4)] == ["s0", "s1", "s0", "s1"]
    made.heartbeat("s0", stats(2))
    made.heartbeat("s1", stats(5))  # two of ours, three of somebody else's
    assert {placed_at(made, n) for n in range(4, 7)} == {"s0"}


def test_an_end_takes_the_load_away() -> None:
    made = router(0, 0)
    assert [placed_at(made, n) for n in range(3)] == ["s0", "s1", "s0"]
    made.ack([AckRow(generate(n).rid, 5, done=True) for n in (0, 2)])
    assert made.num_requests == 1
    assert made.loads() == {"s0": 0, "s1": 1}


def test_a_request_sent_again_goes_where_it_went_but_not_for_ever() -> None:
    made = router(0, 0)
    first = placed_at(made, 1)
    assert placed_at(made, 1) == first
    assert placed_at(made, 1) != first
    assert made.num_requests == 1


def test_an_older_attempt_is_not_sent() -> None:
    made = router(0)
    placed_at(made, 1, attempt=2)
    assert made.generate("tokenizer-0", generate(1, attempt=1)) == []


def test_draining_and_unready_replicas_get_nothing() -> None:
    made = router(0, 0, 9)
    made.heartbeat("s0", stats(draining=True))
    made.heartbeat("s1", stats(ready=False))
    assert {placed_at(made, n) for n in range(5)} == {"s2"}


def test_without_a_ready_replica_requests_wait_in_order() -> None:
    made = router()
    assert made.generate("tokenizer-0", generate(1)) == []
    made.replica_up("s0")
    assert made.generate("tokenizer-0", generate(2)) == []
    assert made.heartbeat("s0", stats(ready=False)) == []
    assert made.heartbeat("s0", stats()) == [Send("s0", generate(1)), Send("s0", generate(2))]
    assert made.heartbeat("s0", stats()) == []


def test_what_was_not_accepted_goes_elsewhere_when_its_replica_dies() -> None:
    made = router(0, 0)
    assert [placed_at(made, n) for n in range(4)] == ["s0", "s1", "s0", "s1"]
    made.ack([AckRow(generate(0).rid, 0)])  # accepted: its tokenizer has the tokens so far
    assert made.replica_down("s0") == [Send("s1", generate(2))]
    assert made.num_requests == 3
    assert made.replica_down("s1") == []
    made.replica_up("s1")
    assert {send.message.rid for send in made.heartbeat("s1", stats())} == {
        generate(n).rid for n in (1, 2, 3)
    }


def test_full_replicas_refuse_at_once() -> None:
    made = router(0, 0, room=1)
    assert {placed_at(made, 1), placed_at(made, 2)} == {"s0", "s1"}
    (send,) = made.generate("tokenizer-0", generate(3))
    assert isinstance(send.message, Failed)
    assert (send.name, send.message.code) == ("tokenizer-0", ErrorCode.OVERLOADED)
    assert send.message.retry_after_s > 0
    assert made.num_requests == 2


def test_the_queue_without_replicas_is_bounded() -> None:
    made = router()
    for number in range(placements.MAX_WAITING):
        assert made.generate("tokenizer-0", generate(number)) == []
    (send,) = made.generate("tokenizer-0", generate(placements.MAX_WAITING))
    assert isinstance(send.message, Failed)


def test_a_lost_tokenizer_s_requests_are_forgotten() -> None:
    made = router()
    made.generate("tokenizer-0", generate(1))
    made.generate("tokenizer-1", generate(2))
    made.tokenizer_down("tokenizer-0")
    made.replica_up("s0")
    assert made.heartbeat("s0", stats()) == [Send("s0", generate(2))]


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("generate"), st.integers(0, 5), st.integers(1, 3)),
            st.tuples(st.just("accepted"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("over"), st.integers(0, 5), st.just(0)),
            st.tuples(st.just("down"), st.integers(0, 1), st.just(0)),
            st.tuples(st.just("up"), st.integers(0, 1), st.just(0)),
        ),
        max_size=60,
    )
)
def test_in_any_order_nothing_leaks(events: list[tuple[str, int, int]]) -> None:
    made, up = Placements(1000), set[str]()
    for what, number, attempt in events:
        name = f"s{number}"
        sends: list[Send] = []
        match what:
            case "generate":
                sends = made.generate("tokenizer-0", generate(number, attempt))
            case "accepted":
                made.ack([AckRow(generate(number).rid, 0)])
            case "over":
                made.ack([AckRow(generate(number).rid, 0, done=True)])
            case "down" if name in up:
                up.remove(name)
                sends = made.replica_down(name)
            case "up" if name not in up:
                up.add(name)
                made.replica_up(name)
                sends = made.heartbeat(name, stats())
            case _:
                pass
        assert all(send.name in up for send in sends)
    made.ack([AckRow(generate(number).rid, 0, done=True) for number in range(6)])
    assert made.num_requests == 0
    assert made.kept_bytes == 0
    assert made.loads() == {name: 0 for name in up}
