"""Which replica the router chooses, and what it remembers of its choices."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from deepmesh.wire.messages import AckRow, ErrorCode, Failed, Generate, ReplicaStats, ServiceStats
from deepmesh.wire.packed import pack_ids
from services.router import placements
from services.router.placements import Placements, Send
from services.router.policy import BOUND, Candidate, choose
from services.router.prefixes import MAX_CHUNKS, PrefixSketch, prefix_chain


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
    assert choose([Candidate("a", 10, affinity=128), Candidate("b", 9)], 0, 130) == "a"
    assert choose([Candidate("a", 20, affinity=128), Candidate("b", 9)], 0, 130) == "b"


def test_a_small_part_of_the_prompt_is_not_worth_a_longer_queue() -> None:
    busy, idle = Candidate("a", 10, affinity=128), Candidate("b", 8)
    assert choose([busy, idle], 0, prompt_tokens=256) == "a"
    assert choose([busy, idle], 0, prompt_tokens=8192) == "b"


def test_what_cannot_be_chosen_does_not_count_in_the_mean() -> None:
    """A full replica and one that drains would make 9 look like little."""
    made = router(0, 9, 100, 90)
    made.heartbeat("s3", stats(90, draining=True))
    assert {placed_at(made, n) for n in range(9)} == {"s0"}


def test_an_attempt_that_follows_a_refusal_goes_elsewhere() -> None:
    made = router(0, 5)
    assert placed_at(made, 1) == "s0"
    made.ack([AckRow(generate(1).rid, 0)])  # its tokenizer has heard of it
    assert placed_at(made, 1, attempt=2) == "s1"
    assert placed_at(made, 1, attempt=3) == "s0"
    assert made.num_requests == 1
    assert made.loads() == {"s0": 1, "s1": 5}


# ---------------------------------------------------------------- prefixes


def long(number: int, shared: int, length: int = 1000, salt: bytes = b"") -> Generate:
    """A prompt whose first `shared` tokens are those of all others."""
    ids = [7] * shared + [1000 + number] * (length - shared)
    rid = number.to_bytes(16, "big")
    return Generate(rid, 1, "tokenizer-0", pack_ids(ids), length, salt=salt)


def place(router: Placements, message: Generate) -> str:
    (send,) = router.generate("tokenizer-0", message)
    assert isinstance(send.message, Generate)
    router.ack([AckRow(message.rid, 0, done=True)])
    return send.name


def test_prompts_with_a_common_beginning_meet_at_one_replica() -> None:
    made = router(0, 0, 0)
    first = place(made, long(1, 900))
    assert {place(made, long(n, 900)) for n in range(2, 8)} == {first}
    others = {place(made, long(n, 100)) for n in range(8, 14)}  # less than a chunk in common
    assert others == {"s0", "s1", "s2"}
    assert len({place(made, long(n, 900, salt=b"%d" % n)) for n in range(14, 20)}) == 3


def test_a_prefix_does_not_bind_to_a_busy_replica_or_a_former_life() -> None:
    made = router(0, 0)
    first = place(made, long(1, 900))
    other = "s1" if first == "s0" else "s0"
    made.heartbeat(first, stats(40))
    assert place(made, long(2, 900)) == other
    made.heartbeat(first, stats(0))
    made.replica_down(first)
    made.replica_up(first)
    made.heartbeat(first, stats(0))
    assert {place(made, long(n, 900)) for n in range(3, 7)} == {other}


def test_what_the_sketch_knows_is_bounded() -> None:
    sketch = PrefixSketch(max_known=10)
    chains = [prefix_chain(long(n, 0)) for n in range(3)]  # 7 chunks each
    for chain in chains:
        sketch.note(chain, "s0")
    assert sketch.known_tokens(chains[2], "s0") == 7 * 128
    assert sketch.known_tokens(chains[1], "s0") == 3 * 128  # its beginning is kept longest
    assert sketch.known_tokens(chains[0], "s0") == 0
    assert sketch.known_tokens(chains[2], "s1") == 0
    assert len(prefix_chain(long(1, 0, length=100_000))) == MAX_CHUNKS


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
