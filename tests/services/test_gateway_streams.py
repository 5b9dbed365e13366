"""`Streams` alone: a fake clock and links that only record."""

import pytest

from deepmesh.wire.link import Mail, Peer, PeerDown, PeerUp
from deepmesh.wire.messages import (
    DELTA_ADMITTED,
    AnyMessage,
    Cancel,
    Credit,
    Delta,
    DeltaBatch,
    ErrorCode,
    ResponseFailed,
    ResponseFinished,
    ServiceStats,
    Submit,
)
from services.gateway.stream import Stream
from services.gateway.streams import StreamLimits, Streams
from services.gateway.tokenizers import Tokenizers

CREDIT_EVENTS = StreamLimits().credit_events


class FakeLink:
    """A dialer whose other end is a list."""

    def __init__(self, name: str) -> None:
        self.peer: Peer | None = Peer("tokenizer", name, f"{name}/1", b"i", "")
        self.sent: list[AnyMessage] = []

    def send(self, message: AnyMessage) -> bool:
        if self.peer is None:
            return False
        self.sent.append(message)
        return True


class Bench:
    """Streams over two fake links, at a time that the test says."""

    def __init__(self, num_links: int = 1, **limits: float) -> None:
        self.now = 1000.0
        self.links = [FakeLink(f"tokenizer-{i}") for i in range(num_links)]
        self.tokenizers = Tokenizers(self.links)
        self.hops: list[Mail] = []
        self.streams = Streams(
            self.tokenizers,
            StreamLimits(**limits),  # type: ignore[arg-type]
            clock=lambda: self.now,
            on_hop=lambda mail, traceparent: self.hops.append(mail),
        )

    def open(self, rid: bytes = b"r" * 16, body: bytes = b"{}") -> Stream:
        return self.streams.open(Submit(rid, "chat", body, seed=1))

    def mail(self, message: AnyMessage, link: int = 0) -> None:
        peer = self.links[link].peer
        assert peer is not None
        self.streams.handle(Mail(peer, message, [], 1, 2))

    def events(self, stream: Stream, first: int, count: int, link: int = 0) -> None:
        delta = Delta(stream.rid, first, [b"e"] * count, DELTA_ADMITTED)
        self.mail(DeltaBatch([delta]), link)

    def down(self, link: int = 0) -> None:
        peer = self.links[link].peer
        assert peer is not None
        self.links[link].peer = None
        self.streams.handle(PeerDown(peer, "test"))

    def up(self, link: int = 0, key: str = "new") -> None:
        peer = Peer("tokenizer", f"tokenizer-{link}", key, b"i", "")
        self.links[link].peer = peer
        self.streams.handle(PeerUp(peer))

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.streams.sweep()


def code_of(stream: Stream) -> ErrorCode | None:
    return stream.end.code if isinstance(stream.end, ResponseFailed) else None


def test_a_new_request_waits_for_a_tokenizer_only_for_a_short_time() -> None:
    bench = Bench(place_s=5, deadline_s=120)
    bench.down()
    stream = bench.open()
    bench.pass_time(4.9)
    assert stream.end is None
    bench.pass_time(0.1)

    assert code_of(stream) is ErrorCode.DEADLINE
    bench.up()
    assert bench.links[0].sent == []


def test_a_new_request_is_placed_as_soon_as_a_tokenizer_is_up() -> None:
    bench = Bench()
    bench.down()
    stream = bench.open()
    bench.up()

    assert bench.links[0].sent == [Submit(stream.rid, "chat", b"{}", seed=1)]


def test_a_lost_request_waits_for_the_whole_deadline_since_its_last_progress() -> None:
    bench = Bench(deadline_s=120)
    stream = bench.open()
    bench.pass_time(100)
    bench.events(stream, 0, 1)
    bench.down()
    bench.pass_time(119)
    assert stream.end is None
    bench.pass_time(1)

    assert code_of(stream) is ErrorCode.DEADLINE


def test_a_placed_request_may_take_any_time() -> None:
    bench = Bench(deadline_s=120)
    stream = bench.open()
    bench.pass_time(10_000)

    assert stream.end is None


def test_events_of_a_former_tokenizer_are_not_taken() -> None:
    bench = Bench(num_links=2)
    stream = bench.open()
    former = bench.links[0].peer
    assert former is not None
    bench.down()
    bench.streams.handle(Mail(former, DeltaBatch([Delta(stream.rid, 0, [b"x"])]), [], 1, 2))
    bench.streams.handle(Mail(former, ResponseFinished(stream.rid, 200), [], 1, 2))

    assert (stream.events, stream.end) == ([], None)
    bench.events(stream, 0, 1, link=1)
    assert stream.events == [b"e"]


def test_idle_streams_are_due_for_a_ping_and_busy_ones_are_not() -> None:
    bench = Bench(keepalive_s=10)
    idle, busy = bench.open(b"a" * 16), bench.open(b"b" * 16)
    bench.pass_time(9)
    bench.streams.begin_write(busy)
    bench.streams.end_write(busy)
    bench.pass_time(1)

    assert (idle.is_ping_due, busy.is_ping_due) == (True, False)


def test_credits_are_absolute_and_not_sent_for_every_event() -> None:
    bench = Bench()
    stream = bench.open()
    for _ in range(2 * CREDIT_EVENTS):
        bench.streams.taken(stream, 1)

    credits = [message for message in bench.links[0].sent if isinstance(message, Credit)]
    assert [credit.num_events for credit in credits] == [CREDIT_EVENTS, 2 * CREDIT_EVENTS]


def test_the_next_tokenizer_hears_of_all_events_taken() -> None:
    bench = Bench(num_links=2)
    stream = bench.open()
    bench.events(stream, 0, CREDIT_EVENTS + 1)
    bench.streams.taken(stream, CREDIT_EVENTS)
    bench.down()
    bench.streams.taken(stream, 1)

    submit, credit = bench.links[1].sent
    assert isinstance(submit, Submit)
    assert submit.next_event == CREDIT_EVENTS + 1
    assert credit == Credit(stream.rid, CREDIT_EVENTS + 1)


@pytest.mark.parametrize("num_events", [5, 9])
def test_a_buffer_is_bounded_in_events(num_events: int) -> None:
    bench = Bench(max_buffer_events=4)
    stream = bench.open()
    bench.events(stream, 0, num_events)

    assert code_of(stream) is ErrorCode.SLOW_CONSUMER
    assert bench.links[0].sent[-1] == Cancel(stream.rid)


def test_a_buffer_is_bounded_in_bytes() -> None:
    bench = Bench(max_buffer_bytes=10)
    stream = bench.open()
    bench.events(stream, 0, 10)
    assert stream.end is None
    bench.events(stream, 10, 1)

    assert code_of(stream) is ErrorCode.SLOW_CONSUMER


def test_a_write_that_hangs_ends_the_stream_even_behind_its_good_end() -> None:
    bench = Bench(slow_s=60)
    running, finished = bench.open(b"a" * 16), bench.open(b"b" * 16)
    for stream in (running, finished):
        bench.streams.begin_write(stream)
    bench.mail(ResponseFinished(finished.rid, 200))
    bench.pass_time(60)

    assert running.is_abandoned
    assert finished.is_abandoned
    assert code_of(running) is ErrorCode.SLOW_CONSUMER
    assert bench.links[0].sent[-1] == Cancel(running.rid)


def test_a_request_ends_once() -> None:
    bench = Bench()
    stream = bench.open()
    bench.mail(ResponseFinished(stream.rid, 200, b"first"))
    first = stream.end
    bench.mail(ResponseFinished(stream.rid, 200, b"second"))
    bench.mail(ResponseFailed(stream.rid, ErrorCode.INTERNAL, ""))
    bench.down()
    bench.pass_time(1000)
    bench.streams.fail_all(ErrorCode.OVERLOADED, "")

    assert stream.end is first
    bench.streams.close(stream)
    assert len(bench.streams) == 0
    assert not bench.tokenizers.num_placed
    assert [m for m in bench.links[0].sent if isinstance(m, Cancel)] == []


def test_closing_twice_cancels_once() -> None:
    bench = Bench()
    stream = bench.open()
    bench.streams.close(stream)
    bench.streams.close(stream)

    assert bench.links[0].sent[1:] == [Cancel(stream.rid)]


def test_a_cancel_for_a_lost_tokenizer_goes_out_when_it_is_back() -> None:
    bench = Bench()
    stream = bench.open()
    bench.links[0].peer, peer = None, bench.links[0].peer  # the loss is not yet known
    bench.streams.close(stream)
    assert peer is not None
    bench.streams.handle(PeerDown(peer, "test"))
    bench.up()

    assert bench.links[0].sent[1:] == [Cancel(stream.rid)]


def test_load_is_what_this_gateway_placed_plus_what_heartbeats_say() -> None:
    bench = Bench(num_links=2)
    for link in bench.links:
        assert link.peer is not None
        link.peer.stats = ServiceStats(ready=True)
    assert bench.links[1].peer is not None
    bench.links[1].peer.stats = ServiceStats(ready=True, requests=2)
    for i in range(4):
        bench.open(bytes([i]) * 16)

    assert [len(link.sent) for link in bench.links] == [3, 1]


def test_a_ready_tokenizer_comes_before_an_idle_one_that_is_not() -> None:
    bench = Bench(num_links=2)
    assert bench.links[1].peer is not None
    bench.links[1].peer.stats = ServiceStats(ready=True, requests=50)
    bench.open()

    assert [len(link.sent) for link in bench.links] == [0, 1]


def test_bodies_beyond_the_budget_are_refused_while_no_tokenizer_is_up() -> None:
    bench = Bench(resume_bytes=10)
    bench.down()
    kept, refused = bench.open(b"a" * 16, bytes(10)), bench.open(b"b" * 16, b"x")

    assert kept.end is None
    assert code_of(refused) is ErrorCode.OVERLOADED


def test_one_hop_for_the_first_sign_and_one_for_the_end() -> None:
    bench = Bench()
    stream = bench.open()
    bench.mail(DeltaBatch([Delta(stream.rid, 0, [], DELTA_ADMITTED)]))
    for index in range(10):
        bench.events(stream, index, 1)
    bench.mail(ResponseFinished(stream.rid, 200))

    kinds = [type(mail.message).__name__ for mail in bench.hops]
    assert kinds == ["DeltaBatch", "DeltaBatch", "ResponseFinished"]


def test_a_take_is_bounded_and_keeps_the_order() -> None:
    bench = Bench()
    stream = bench.open()
    events = [bytes([i]) * 40_000 for i in range(4)]
    bench.mail(DeltaBatch([Delta(stream.rid, 0, events)]))
    pieces = [stream.take() for _ in range(4)]

    assert pieces == [(event, 1) for event in events]
    assert stream.buffered_bytes == 0


def test_a_request_that_keeps_killing_its_tokenizer_is_given_up() -> None:
    bench = Bench()
    stream = bench.open()
    for number in range(3):
        assert stream.end is None
        bench.pass_time(1)
        bench.down()
        if number < 2:
            bench.up(key=f"again-{number}")
            assert stream.placed
    assert code_of(stream) is ErrorCode.ENGINE_RESTARTED
    bench.up(key="last")
    assert not stream.placed
    assert not bench.tokenizers.num_placed


def test_a_request_that_moves_or_lives_long_is_no_suspect() -> None:
    bench = Bench()
    moves, lives = bench.open(b"m" * 16), bench.open(b"l" * 16)
    for number in range(6):
        bench.pass_time(1)
        bench.events(moves, number, 1)
        bench.pass_time(StreamLimits().suspect_s if number % 2 else 1)
        bench.down()
        bench.up(key=f"again-{number}")
        assert moves.placed
        assert lives.placed


def test_tokenizers_that_were_told_to_stop_throw_no_suspicion() -> None:
    bench = Bench()
    stream = bench.open()
    for number in range(6):
        bench.pass_time(1)
        (peer,) = bench.tokenizers.peers
        peer.stats = ServiceStats(False, requests=1)  # its last heartbeat
        bench.down()
        bench.up(key=f"next-{number}")
        assert stream.placed


def test_a_moved_request_of_which_nothing_comes_is_given_up_at_last() -> None:
    bench = Bench(deadline_s=120, stuck_s=1200)
    moved = bench.open(b"m" * 16)
    bench.pass_time(60)
    bench.down()
    bench.up()
    never_moved = bench.open(b"n" * 16)  # a plain answer may take as long as it takes
    bench.pass_time(1199)
    assert moved.end is None
    bench.pass_time(1)
    assert code_of(moved) is ErrorCode.DEADLINE
    assert bench.links[0].sent[-1] == Cancel(moved.rid)
    bench.pass_time(100_000)
    assert never_moved.end is None


def test_a_moved_request_that_moves_is_not_given_up() -> None:
    bench = Bench(deadline_s=120, stuck_s=1200)
    stream = bench.open()
    bench.down()
    bench.up()
    for number in range(4):
        bench.pass_time(1000)
        bench.events(stream, number, 1)
    assert stream.end is None
