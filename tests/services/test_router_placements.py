"""Where requests go, and what the router remembers of them."""

from hypothesis import given
from hypothesis import strategies as st

from deepmesh.wire.messages import AckRow, BlockEvents, ErrorCode, Failed, Generate, KvKind
from services.router import placements
from services.router.placements import Placements, Send
from services.router.replicas import LOADING_S
from tests.services.router_rig import (
    ROWS,
    generate,
    items,
    over,
    place,
    points,
    router,
    stats,
    tell,
    visit,
    words,
)

SYSTEM = words(1024, 1)


def sent(sends: list[Send]) -> list[tuple[str, Generate | Failed]]:
    return [(send.name, send.message) for send in sends]


# ---------------------------------------------------------------- what is cached


def test_a_prompt_goes_where_its_prefix_can_be_resumed() -> None:
    made = router(0, 0, 0)
    tell(made, "s1", points(SYSTEM, 1024), first=True)
    routes = [made.generate("t", generate(n, [*SYSTEM, n]), 0.0)[0].route for n in range(2)]
    for route in routes:
        assert route is not None
        assert (route.replica, route.reason, route.hit_tokens) == ("s1", "hit", 1024)
    salted = {visit(made, generate(n, [*SYSTEM, n], salt=b"%d" % n)) for n in range(2, 11)}
    assert salted == {"s0", "s2"}  # the other one has two


def test_what_was_evicted_attracts_nothing() -> None:
    made = router(0, 0)
    tell(made, "s1", points(SYSTEM, 128, 1024), first=True)
    assert visit(made, generate(1, [*SYSTEM, 1])) == "s1"
    tell(made, "s1", dropped=points(SYSTEM, 128, 1024))
    tell(made, "s0", points(SYSTEM, 512))
    assert visit(made, generate(2, [*SYSTEM, 2])) == "s0"


def test_a_new_beginning_forgets_what_was_said_before() -> None:
    made = router(0, 0)
    tell(made, "s1", points(SYSTEM, 1024), first=True)
    tell(made, "s1", points(words(512, 9), 512), first=True)
    tell(made, "s0", points(SYSTEM, 512), first=True)
    assert visit(made, generate(1, [*SYSTEM, 1])) == "s0"
    assert made.replicas.counts["resyncs"] == 3
    assert made.replicas.num_points() == (2, 0)


def test_a_burst_of_one_prompt_meets_where_the_first_went() -> None:
    """Nobody can have said yet that it is there."""
    made = router(0, 0, 0)
    first = place(made, generate(1, [*SYSTEM, 1], max_tokens=1))
    over(made, generate(1))
    assert {visit(made, generate(n, [*SYSTEM, n])) for n in range(2, 8)} == {first}


def test_a_replica_that_came_back_is_taken_to_be_empty() -> None:
    made = router(0, 0)
    first = visit(made, generate(1, [*SYSTEM, 1]))
    tell(made, first, points(SYSTEM, 1024))
    made.replica_down(first, 0.0)
    other = "s1" if first == "s0" else "s0"
    made.replicas.up(first)
    made.heartbeat(first, stats(), 0.0)
    tell(made, other, points(SYSTEM, 128), first=True)
    assert visit(made, generate(2, [*SYSTEM, 2])) == other


def test_a_busy_replica_gives_a_hot_prefix_away_and_then_both_have_it() -> None:
    made = router(0, 0)
    tell(made, "s0", points(SYSTEM, 1024), first=True)
    names: list[str] = []
    for n in range(100):
        names.append(place(made, generate(n, [*SYSTEM, n], max_tokens=32)))
        tell(made, names[-1], points(SYSTEM, 1024))
    assert names[0] == "s0"
    assert made.replicas.decisions["bound"] == 1
    loads = made.replicas.loads_ms(0.0)
    assert max(loads.values()) <= 1.05 * sum(loads.values()) / 2


def test_what_a_kvstore_has_makes_a_prompt_cheaper_everywhere() -> None:
    """A load from there costs something: what is on a device is worth more."""
    made = router(0, 0)
    packed = points(SYSTEM, 1024)
    made.replicas.blocks("kvstore-0", BlockEvents(True, items(packed), []))
    (send,) = made.generate("t", generate(1, [*SYSTEM, 1]), 0.0)
    assert send.route is not None
    assert (send.route.hit_tokens, send.route.store_tokens) == (0, 1024)
    assert send.route.work.prefill_tokens < 0.3 * 1025
    other = "s1" if send.name == "s0" else "s0"
    over(made, generate(1))
    tell(made, other, points(SYSTEM, 1024), first=True)
    assert visit(made, generate(2, [*SYSTEM, 2])) == other
    made.replicas.store_down("kvstore-0")
    (send,) = made.generate("t", generate(3, [*SYSTEM, 3], salt=b"x"), 0.0)
    assert send.route is not None
    assert send.route.store_tokens == 0


def test_blocks_of_a_kvstore_without_a_point_are_no_hit() -> None:
    made = router(0)
    made.replicas.blocks("k", BlockEvents(True, items(points(SYSTEM, 1024), KvKind.BLOCK), []))
    (send,) = made.generate("t", generate(1, [*SYSTEM, 1]), 0.0)
    assert send.route is not None
    assert send.route.store_tokens == 0


# ---------------------------------------------------------------- loads


def test_its_own_requests_count_before_the_next_heartbeat() -> None:
    made = router(0, 0, 3)
    assert [place(made, generate(n)) for n in range(4)] == ["s0", "s1", "s0", "s1"]


def test_equal_devices_share_alike_however_they_were_profiled() -> None:
    made = router(0, 0)
    for name, token_ns in (("s0", 100_000), ("s1", 130_000)):
        made.heartbeat(name, stats(token_ns=token_ns), 0.0)
    names = [place(made, generate(n, 500)) for n in range(40)]
    assert names.count("s0") == 20
    assert set(made.replicas.decisions) <= {"turn", "load"}


def test_a_router_that_is_to_be_compared_with_looks_at_nothing() -> None:
    made = Placements(100, 16, is_aware=False)
    for name, load in (("s0", 0), ("s1", 90)):
        made.replicas.up(name)
        made.heartbeat(name, stats(load), 0.0)
    tell(made, "s0", points(SYSTEM, 1024), first=True)
    assert [place(made, generate(n, [*SYSTEM, n])) for n in range(4)] == ["s0", "s1", "s0", "s1"]


def test_long_prompts_count_more_than_many_short_ones() -> None:
    made = router(0, 0)
    long = place(made, generate(1, 4000))
    short = {place(made, generate(n, 100, max_tokens=1)) for n in range(2, 20)}
    assert short == {"s1" if long == "s0" else "s0"}


def test_an_end_takes_the_load_away() -> None:
    made = router(0, 0)
    assert [place(made, generate(n)) for n in range(3)] == ["s0", "s1", "s0"]
    over(made, generate(0), generate(2))
    assert made.num_requests == 1
    assert [load.num_ours for n in range(2) if (load := made.replicas.load(f"s{n}"))] == [0, 1]
    assert made.replicas.loads_ms(0.0)["s0"] < made.replicas.loads_ms(0.0)["s1"]


def test_what_cannot_be_chosen_does_not_count_in_the_mean() -> None:
    """A full replica and one that drains would make 9 look like little."""
    made = router(0, 9, 100, 90)
    made.heartbeat("s3", stats(90, draining=True), 0.0)
    assert {place(made, generate(n)) for n in range(8)} == {"s0"}


def test_draining_unready_and_paused_replicas_get_nothing() -> None:
    made = router(0, 0, 0, 9)
    made.heartbeat("s0", stats(draining=True), 0.0)
    made.heartbeat("s1", stats(ready=False), 0.0)
    made.heartbeat("s2", stats(paused=True), 0.0)
    assert {place(made, generate(n)) for n in range(5)} == {"s3"}
    made.heartbeat("s3", stats(draining=True), 0.0)
    assert place(made, generate(9)) == "s2"  # it will go on


# ---------------------------------------------------------------- roles


def test_a_prompt_is_computed_at_one_replica_and_decoded_at_another() -> None:
    made = router(0, 0, 0, 0, roles="ppdd")
    pairs: list[tuple[str, str]] = []
    for n in range(8):
        (send,) = made.generate("t", generate(n, 1000), 0.0)
        assert isinstance(send.message, Generate)
        pairs.append((send.name, send.message.prefill_at))
    assert {d for d, _ in pairs} == {"s2", "s3"}
    assert [p for _, p in pairs].count("s0") == [p for _, p in pairs].count("s1") == 4


def test_the_prompt_goes_to_the_side_that_has_its_beginning() -> None:
    made = router(0, 0, 0, roles="ppd")
    tell(made, "s1", points(SYSTEM, 1024), first=True)
    (send,) = made.generate("t", generate(1, [*SYSTEM, *words(600, 2)]), 0.0)
    assert send.route is not None
    assert (send.name, send.route.prefill_at, send.route.prefill_tokens) == ("s2", "s1", 600)


def test_little_of_a_prompt_is_computed_where_it_is_decoded() -> None:
    made = router(0, 0, roles="pd")
    tell(made, "s1", points(SYSTEM, 1024), first=True)
    (send,) = made.generate("t", generate(1, [*SYSTEM, *words(100, 2)]), 0.0)
    assert isinstance(send.message, Generate)
    assert (send.name, send.message.prefill_at) == ("s1", "")


def test_prompts_that_wait_to_be_handed_over_are_little_load_where_they_wait() -> None:
    made = router(0, 0, 0, roles="pdd")
    made.heartbeat("s1", stats(2, role="decode", waiting_tokens=2000, context_tokens=200), 0.0)
    made.heartbeat("s2", stats(4, role="decode", context_tokens=200_000), 0.0)
    assert place(made, generate(1, 1000)) == "s1"
    made.replica_down("s0", 0.0)  # now it has to compute them itself
    assert place(made, generate(2, 1000)) == "s2"


def test_without_a_prefill_side_the_other_does_all() -> None:
    made = router(0, 0, roles="pd")
    made.replica_down("s0", 0.0)
    (send,) = made.generate("t", generate(1, 1000), 0.0)
    assert isinstance(send.message, Generate)
    assert (send.name, send.message.prefill_at) == ("s1", "")


def test_a_prefill_side_alone_takes_nothing() -> None:
    made = router(0, 0, roles="pd")
    made.replica_down("s1", 0.0)
    assert made.generate("t", generate(1, 1000), 0.0) == []
    made.replicas.up("s1")
    (send,) = made.heartbeat("s1", stats(role="decode"), 0.0)
    assert (send.name, send.message) == (
        "s1",
        Generate(**{**_fields(generate(1, 1000)), "prefill_at": "s0"}),
    )


def test_a_continuation_is_not_handed_over() -> None:
    made = router(0, 0, roles="pd")
    message = Generate(**{**_fields(generate(1, 1000)), "confirmed_ids": b"\1\0\0\0"})
    (send,) = made.generate("t", message, 0.0)
    assert send.message == message


def _fields(message: Generate) -> dict[str, object]:
    return {name: getattr(message, name) for name in message.__struct_fields__}


# ---------------------------------------------------------------- what is remembered


def test_an_attempt_that_follows_a_refusal_goes_elsewhere() -> None:
    made = router(0, 5)
    assert place(made, generate(1)) == "s0"
    made.ack([AckRow(generate(1).rid, 0)], 0.0)  # its tokenizer has heard of it
    assert place(made, generate(1, attempt=2)) == "s1"
    assert place(made, generate(1, attempt=3)) == "s0"
    assert made.num_requests == 1


def test_a_request_sent_again_goes_where_it_went_but_not_for_ever() -> None:
    made = router(0, 0)
    first = place(made, generate(1))
    assert place(made, generate(1)) == first
    assert place(made, generate(1)) != first
    assert made.num_requests == 1


def test_a_pair_sent_again_is_the_same_pair() -> None:
    made = router(0, 0, 0, 0, roles="ppdd")
    first = made.generate("t", generate(1, 1000), 0.0)
    again = made.generate("t", generate(1, 1000), 0.0)
    assert sent(first) == sent(again)


def test_an_older_attempt_is_not_sent() -> None:
    made = router(0)
    place(made, generate(1, attempt=2))
    assert made.generate("t", generate(1, attempt=1), 0.0) == []


def test_without_a_ready_replica_requests_wait_in_order() -> None:
    made = router()
    assert made.generate("t", generate(1), 0.0) == []
    made.replicas.up("s0")
    assert made.generate("t", generate(2), 0.0) == []
    assert made.num_waiting == 2
    assert made.heartbeat("s0", stats(ready=False), 0.0) == []
    sends = made.heartbeat("s0", stats(), 0.0)
    assert sent(sends) == [("s0", generate(1)), ("s0", generate(2))]
    assert made.heartbeat("s0", stats(), 0.0) == []


def test_who_is_ready_first_after_an_outage_does_not_get_all() -> None:
    made = router()
    messages = [generate(n) for n in range(40)]
    for message in messages:
        assert made.generate("t", message, 0.0) == []
    made.replicas.up("s0")
    made.replicas.up("s1")
    first = made.heartbeat("s0", stats(), 0.0)
    assert len(first) == ROWS
    assert made.generate("t", generate(99), 0.0) == []  # behind the others
    (send,) = made.ack([AckRow(messages[0].rid, 3, done=True)], 0.0)
    assert send.message == messages[ROWS]
    rest = made.heartbeat("s1", stats(), 0.0)
    assert made.num_waiting == 0
    assert [send.name for send in rest].count("s1") >= ROWS
    assert len(rest) == 40 - ROWS


def test_one_that_never_loads_keeps_nobody_waiting() -> None:
    made = router(0)
    made.replicas.up("s1")
    made.heartbeat("s1", stats(ready=False), 0.0)
    for number in range(ROWS):
        assert place(made, generate(number)) == "s0"
    assert made.generate("t", generate(99), 0.0) == []
    (send,) = made.ack([AckRow(generate(3).rid, 5, done=True)], 0.0)
    assert send.name == "s0"
    made.heartbeat("s1", stats(ready=False), LOADING_S / 2)
    assert made.generate("t", generate(100), LOADING_S / 2) == []
    later = made.heartbeat("s1", stats(ready=False), 2 * LOADING_S)  # nobody waits for it now
    assert [send.name for send in later] == ["s0"]


def test_what_was_not_accepted_goes_elsewhere_when_its_replica_dies() -> None:
    made = router(0, 0)
    assert [place(made, generate(n)) for n in range(4)] == ["s0", "s1", "s0", "s1"]
    made.ack([AckRow(generate(0).rid, 0)], 0.0)  # accepted: its tokenizer has the tokens so far
    assert sent(made.replica_down("s0", 0.0)) == [("s1", generate(2))]
    assert made.num_requests == 3
    assert made.replica_down("s1", 0.0) == []
    made.replicas.up("s1")
    moved = made.heartbeat("s1", stats(), 0.0)
    assert {send.message.rid for send in moved} == {generate(n).rid for n in (1, 2, 3)}


def test_full_replicas_refuse_at_once() -> None:
    made = router(0, 0, room=1)
    assert {place(made, generate(1)), place(made, generate(2))} == {"s0", "s1"}
    (send,) = made.generate("t", generate(3), 0.0)
    assert isinstance(send.message, Failed)
    assert (send.name, send.message.code) == ("t", ErrorCode.OVERLOADED)
    assert send.message.retry_after_s > 0
    assert made.num_requests == 2


def test_the_queue_without_replicas_is_bounded() -> None:
    made = router()
    for number in range(placements.MAX_WAITING):
        assert made.generate("t", generate(number), 0.0) == []
    (send,) = made.generate("t", generate(placements.MAX_WAITING), 0.0)
    assert isinstance(send.message, Failed)


def test_a_lost_tokenizer_s_requests_are_forgotten() -> None:
    made = router()
    made.generate("tokenizer-0", generate(1), 0.0)
    made.generate("tokenizer-1", generate(2), 0.0)
    made.tokenizer_down("tokenizer-0", 0.0)
    made.replicas.up("s0")
    assert sent(made.heartbeat("s0", stats(), 0.0)) == [("s0", generate(2))]


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("generate"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("accepted"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("over"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("down"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("up"), st.integers(0, 2), st.just(0)),
        st.tuples(st.just("beat"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("points"), st.integers(0, 2), st.integers(0, 1)),
        st.tuples(st.just("tokenizer"), st.integers(0, 1), st.just(0)),
    ),
    max_size=60,
)
ROLES = ("both", "decode", "prefill")


@given(EVENTS)
def test_in_any_order_nothing_leaks(events: list[tuple[str, int, int]]) -> None:
    """No request, no byte, no load; and nothing is sent to who is not there."""
    made, up, now = Placements(1000, 16), set[str](), 0.0
    for what, number, more in events:
        name, tokenizer = f"s{number}", f"tokenizer-{number % 2}"
        now += 0.01
        sends: list[Send] = []
        match what:
            case "generate":
                sends = made.generate(tokenizer, generate(number, 700, more), now)
            case "accepted":
                made.ack([AckRow(generate(number).rid, 0)], now)
            case "over":
                made.ack([AckRow(generate(number).rid, 7, done=True)], now)
            case "down" if name in up:
                up.remove(name)
                sends = made.replica_down(name, now)
            case "up" if name not in up:
                up.add(name)
                made.replicas.up(name)
                sends = made.heartbeat(name, stats(role=ROLES[number]), now)
            case "beat" if name in up:
                sends = made.heartbeat(
                    name, stats(more, role=ROLES[number], waiting_tokens=100 * more), now
                )
            case "points":
                tell(made, name, points(SYSTEM, 1024), first=bool(more))
            case "tokenizer":
                made.tokenizer_down(tokenizer, now)
            case _:
                pass
        for send in sends:
            assert send.name in up
            assert isinstance(send.message, Generate)
            assert send.message.prefill_at in {"", *up} - {send.name}
    made.ack([AckRow(generate(number).rid, 0, done=True) for number in range(6)], now)
    assert (made.num_requests, made.num_waiting, made.kept_bytes) == (0, 0, 0)
    for name in up:
        made.heartbeat(name, stats(), now)
    assert all(load == 0.0 for load in made.replicas.loads_ms(now).values())
