"""The service's decisions alone, on a fake clock: no sockets, no waiting."""

import dataclasses
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmesh.config import Config
from deepmesh.wire.link import Peer
from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    AnyMessage,
    Attach,
    Cancel,
    Credit,
    DeltaBatch,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    ReplicaStats,
    ResponseFailed,
    ResponseFinished,
    ServiceStats,
    StopAt,
    Submit,
    TokenBatch,
    TokenRow,
)
from deepmesh.wire.packed import pack_ids
from services.tokenizer.actions import REPORT_STEPS, Prepare, ToGateway, ToScheduler, Trace
from services.tokenizer.book import Clock
from services.tokenizer.core import Core
from services.tokenizer.placement import STALLED_S
from services.tokenizer.prepare import Preparer
from services.tokenizer.replies import MAX_ABORTS
from services.tokenizer.service import prepare
from services.tokenizer.spans import Stamps
from services.tokenizer.text_stream import Token
from tests.services.tokenizer_harness import EOS, HI, PLAIN, ids_of, make_config

CONFIG = make_config(Path("/nowhere"))
PREPARER = Preparer(CONFIG, now_s=lambda: 1_700_000_100)
RID = b"0123456789abcdef"
CHAT = {"model": "tiny", "messages": HI, "stream": True, **PLAIN}
OUTPUT = [*ids_of("One, two, Grüße 👋🏽, three and so on"), EOS]


class Desk:
    """A core whose peers are lists."""

    def __init__(
        self, config: Config = CONFIG, *, scheduler: bool = True, vocabulary: str = ""
    ) -> None:
        self.core = Core("tokenizer-0", config, vocabulary)
        self.clock = Clock(100.0, 10**18)
        self.to_gateway: list[AnyMessage] = []
        self.to_scheduler: list[tuple[str, AnyMessage]] = []
        self.spans: list[Trace] = []
        if scheduler:
            self.up()

    def up(
        self,
        name: str = "scheduler-0",
        incarnation: bytes = b"1",
        load: int = 0,
        replica: ReplicaStats | None = None,
    ) -> Peer:
        replicas = [replica or ReplicaStats(name, True)]
        peer = Peer("scheduler", name, name, incarnation, stats=ServiceStats(True, load, replicas))
        self.core.scheduler_up(peer, self.clock)
        self.act()
        return peer

    def down(self, name: str = "scheduler-0") -> None:
        self.core.scheduler_down(name, self.clock)
        self.act()

    def gateway(self, message: AnyMessage, name: str = "gateway-0") -> None:
        self.core.gateway_mail(message, Stamps(name, 1, 2), self.clock)
        self.act()

    def submit(self, body: object = CHAT, *, rid: bytes = RID, next_event: int = 0) -> None:
        raw = msgspec.json.encode(body)
        self.gateway(Submit(rid, "chat", raw, 7, created_s=1_700_000_000, next_event=next_event))

    def scheduler(self, message: AnyMessage, name: str = "scheduler-0") -> None:
        self.core.scheduler_mail(message, Stamps(name, 1, 2), self.clock)
        self.act()

    def tokens(self, pos: int, ids: list[int], rid: bytes = RID) -> None:
        self.scheduler(TokenBatch(1, 1, [TokenRow(rid, pos, pack_ids(ids))]))

    def wait(self, seconds: float) -> None:
        self.clock = Clock(self.clock.now + seconds, self.clock.wall_ns + int(seconds * 1e9))
        self.core.tick(self.clock)
        self.act()

    def sent(self, kind: type[AnyMessage]) -> list[AnyMessage]:
        """Messages of a type to schedulers so far, taken out."""
        found = [message for _, message in self.to_scheduler if isinstance(message, kind)]
        self.to_scheduler = [(n, m) for n, m in self.to_scheduler if not isinstance(m, kind)]
        return found

    def events_of(self, rid: bytes) -> list[bytes]:
        """Events of one stream so far."""
        batches = [m for m in self.to_gateway if isinstance(m, DeltaBatch)]
        deltas = [delta for batch in batches for delta in batch.deltas if delta.rid == rid]
        return [event for delta in deltas for event in delta.events]

    @property
    def ends(self) -> list[ResponseFinished | ResponseFailed]:
        return [m for m in self.to_gateway if isinstance(m, ResponseFinished | ResponseFailed)]

    def events(self, first: int = 0) -> list[bytes]:
        """All events that went to the gateway; they must be consecutive from `first` on."""
        events: list[bytes] = []
        for message in self.to_gateway:
            parts: list[tuple[int, list[bytes]]] = []
            if isinstance(message, DeltaBatch):
                parts = [(delta.first_event, delta.events) for delta in message.deltas]
            elif isinstance(message, ResponseFinished):
                parts = [(message.first_event, message.events)]
            for at, more in parts:
                assert not more or at == first + len(events)
                events += more
        return events

    def act(self) -> None:
        """Carry out what the core asks for."""
        while actions := self.core.take():
            for action in actions:
                match action:
                    case ToGateway(message=message):
                        self.to_gateway.append(message)
                    case ToScheduler(name=name, message=message):
                        self.to_scheduler.append((name, message))
                    case Prepare(submit=submit):
                        outcome = prepare(PREPARER, submit, self.core.context(8192))
                        self.core.prepared(submit.rid, outcome, 1, self.clock)
                    case Trace():
                        self.spans.append(action)


def whole() -> list[bytes]:
    """The undisturbed stream."""
    desk = Desk()
    desk.submit()
    desk.tokens(0, OUTPUT)
    desk.scheduler(Finished(RID, FinishReason.STOP, len(OUTPUT)))
    return desk.events()


WHOLE = whole()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_accident_leaves_the_same_bytes(data: st.DataObject) -> None:
    """Losses of either peer and of the tokenizer itself, at any token, in any order."""
    desk, known, position, incarnation = Desk(), list[bytes](), 0, b"1"
    desk.submit()
    while position < len(OUTPUT):
        step = data.draw(st.integers(1, 6))
        overlap = data.draw(st.integers(0, min(3, position)))
        ids = OUTPUT[position - overlap : position + step]
        desk.tokens(position - overlap, ids)
        position = min(position + step, len(OUTPUT))
        match data.draw(st.sampled_from(["go on", "tokenizer", "scheduler", "link", "gateway"])):
            case "tokenizer":
                known += desk.events(len(known))
                keep = data.draw(st.integers(0, len(known)))  # some were still on their way
                known = known[:keep]
                desk = Desk()
                desk.submit(next_event=len(known))
                if known:
                    (attach,) = desk.sent(Attach)
                    assert isinstance(attach, Attach)
                    assert attach.from_pos == 0
                    if data.draw(st.booleans()):
                        desk.scheduler(Accepted(RID, 4, "scheduler-0"))
                    else:
                        desk.scheduler(Failed(RID, ErrorCode.UNKNOWN, ""))
                position, incarnation = 0, b"1"
            case "scheduler":
                incarnation += b"+"
                desk.down()
                desk.up(incarnation=incarnation)
            case "link":
                desk.down()
                desk.up(incarnation=incarnation)
                if position < len(OUTPUT):
                    assert desk.sent(Attach)
            case "gateway":
                known += desk.events(len(known))
                desk.to_gateway.clear()
                desk.core.gateway_down("gateway-0", desk.clock)
                desk.tokens(position, OUTPUT[position : position + 2])
                position = min(position + 2, len(OUTPUT))
                assert not desk.to_gateway, "nothing before it asks"
                desk.submit(next_event=len(known))
            case _:
                desk.wait(data.draw(st.sampled_from([0.1, 3.0])))
    if not desk.ends:
        desk.scheduler(Finished(RID, FinishReason.STOP, len(OUTPUT)))
    assert known + desk.events(len(known)) == WHOLE
    assert len(desk.ends) == 1


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_batches_that_are_read_together_leave_the_same_bytes(data: st.DataObject) -> None:
    """Of two requests, in pieces that overlap; one of them asks for logprobs."""
    other = b"f" * 16
    bodies: dict[bytes, dict[str, object]] = {RID: CHAT, other: {**CHAT, "logprobs": True}}

    def row(rid: bytes, pos: int, ids: list[int]) -> TokenRow:
        probs = np.arange(pos, pos + len(ids), dtype="<f4").tobytes() if rid == other else b""
        return TokenRow(rid, pos, pack_ids(ids), probs)

    whole_rows = [row(rid, 0, OUTPUT) for rid in bodies]
    alone, desk = Desk(), Desk()
    for rid, body in bodies.items():
        alone.submit(body, rid=rid)
        desk.submit(body, rid=rid)
    alone.scheduler(TokenBatch(1, 1, whole_rows))

    position, step = dict.fromkeys(bodies, 0), 0
    while any(at < len(OUTPUT) for at in position.values()):
        waiting: list[TokenBatch] = []
        for _ in range(data.draw(st.integers(1, 4))):
            rows: list[TokenRow] = []
            for rid, at in position.items():
                back = data.draw(st.integers(0, min(2, at)))
                ids = OUTPUT[at - back : at + data.draw(st.integers(1, 3))]
                rows.append(row(rid, at - back, ids))
                position[rid] = max(at, at - back + len(ids))
            step += 1
            waiting.append(TokenBatch(step, 1, rows))
        desk.core.tokens(waiting, Stamps("scheduler-0", 1, 2), desk.clock)
        desk.act()

    for rid in bodies:
        assert desk.events_of(rid) == alone.events_of(rid)
    told = [ack.group_step for ack in desk.sent(Ack) if isinstance(ack, Ack) and ack.group_step]
    assert told == sorted(told)
    assert step - REPORT_STEPS < (told[-1] if told else 0) <= step


def test_generate_is_repeated_until_it_is_answered() -> None:
    desk = Desk()
    desk.submit()
    (first,) = desk.sent(Generate)
    desk.wait(1.0)
    assert not desk.sent(Generate)
    desk.wait(1.5)
    assert desk.sent(Generate) == [first]
    desk.scheduler(Accepted(RID, 1, "scheduler-0"))
    desk.wait(3.0)
    assert not desk.sent(Generate)


def test_a_number_that_the_recipe_cannot_hold_fails_its_request_alone() -> None:
    desk = Desk()
    raw = msgspec.json.encode({**CHAT, "stream": False})
    desk.gateway(Submit(RID, "chat", raw, 7, created_s=-1))
    desk.tokens(0, OUTPUT[:1])
    (end,) = desk.ends
    assert isinstance(end, ResponseFailed)
    assert end.code is ErrorCode.INTERNAL


class PanicException(BaseException):
    """As pyo3 raises it."""


class PanickingText:
    """The recipe panics at one of its calls."""

    stopped = False

    def __init__(self, at: str) -> None:
        self._at = at

    def start(self, cached_tokens: int) -> list[bytes]:
        return self._call("start")

    def push(self, token: Token) -> list[bytes]:
        return self._call("push")

    def finish(self, reason: FinishReason) -> list[bytes]:
        return self._call("finish")

    def body(self) -> bytes:
        return b""

    def _call(self, name: str) -> list[bytes]:
        if name == self._at:
            raise PanicException("called `Option::unwrap()` on a `None` value")
        return []


@pytest.mark.parametrize("at", ["start", "push", "finish"])
def test_a_panic_of_the_recipe_fails_its_request_alone(at: str) -> None:
    desk = Desk()
    desk.submit()
    desk.submit(rid=b"f" * 16)
    request = desk.core._book.get(RID)
    assert request is not None
    assert request.generation is not None
    request.generation = dataclasses.replace(request.generation, text=PanickingText(at))
    for rid in (RID, b"f" * 16):
        desk.tokens(0, OUTPUT, rid)
        desk.scheduler(Finished(rid, FinishReason.STOP, len(OUTPUT)))
    bad, good = desk.ends
    assert isinstance(bad, ResponseFailed)
    assert (bad.rid, bad.code) == (RID, ErrorCode.INTERNAL)
    assert "panicked" in bad.detail
    assert isinstance(good, ResponseFinished)


@pytest.mark.parametrize(
    ("param", "field"), [("prompt", "messages"), ("max_tokens", "max_completion_tokens")]
)
def test_a_field_that_a_scheduler_refuses_has_its_protocols_name(param: str, field: str) -> None:
    desk = Desk()
    desk.submit({**CHAT, "max_completion_tokens": 9})
    desk.scheduler(Failed(RID, ErrorCode.TOO_LONG, "no", param))
    assert desk.ends == [ResponseFailed(RID, ErrorCode.TOO_LONG, "no", field)]


def test_a_silent_scheduler_is_asked() -> None:
    desk = Desk()
    desk.submit()
    desk.scheduler(Accepted(RID, 1, "scheduler-0"))
    desk.tokens(0, OUTPUT[:3])
    desk.wait(6.0)
    assert desk.sent(Attach) == [Attach(RID, 1, "tokenizer-0", 3)]
    desk.sent(Generate)
    desk.scheduler(Failed(RID, ErrorCode.UNKNOWN, "gone"))
    (again,) = desk.sent(Generate)
    assert isinstance(again, Generate)
    assert (again.attempt, again.confirmed_ids) == (2, pack_ids(OUTPUT[:3]))
    desk.scheduler(Failed(RID, ErrorCode.UNKNOWN, "gone"))  # an echo of the same question
    assert not desk.sent(Generate)


def test_gaps_do_not_cause_a_storm() -> None:
    desk = Desk()
    desk.submit()
    for pos in range(5, 25):
        desk.tokens(pos, OUTPUT[:1])
    assert len(desk.sent(Attach)) == 1


def test_orphans_go_on_for_a_while_and_are_aborted() -> None:
    desk = Desk()
    desk.submit()
    desk.scheduler(Accepted(RID, 1, "scheduler-0"))
    desk.core.gateway_down("gateway-0", desk.clock)
    desk.wait(CONFIG.scheduler.orphan_s - 0.5)
    desk.tokens(0, OUTPUT[:3])
    assert not desk.sent(Abort)
    desk.wait(1.0)
    assert desk.sent(Abort) == [Abort(RID, 1)]
    assert not desk.ends
    assert desk.core.num_live == 0


def test_a_lost_engine_is_waited_for_until_the_deadline() -> None:
    desk = Desk()
    desk.submit()
    desk.scheduler(Accepted(RID, 1, "scheduler-0"))
    desk.tokens(0, OUTPUT[:3])
    desk.down()
    desk.wait(CONFIG.gateway.deadline_s - 1)
    assert not desk.ends
    desk.wait(2)
    (end,) = desk.ends
    assert isinstance(end, ResponseFailed)
    assert end.code is ErrorCode.ENGINE_RESTARTED


def test_a_slow_consumer_fails_alone() -> None:
    settings = msgspec.structs.replace(CONFIG.tokenizer, unacked_events=10, slow_consumer_s=30.0)
    desk = Desk(msgspec.structs.replace(CONFIG, tokenizer=settings))
    desk.submit()
    desk.submit(rid=b"another")
    desk.tokens(0, OUTPUT[:20])
    desk.wait(1)
    desk.wait(28)
    assert not desk.ends
    desk.wait(3)
    (end,) = desk.ends
    assert isinstance(end, ResponseFailed)
    assert (end.rid, end.code) == (RID, ErrorCode.SLOW_CONSUMER)
    assert desk.sent(Abort) == [Abort(RID, 1)]


def test_a_slow_consumer_that_reads_on_goes_on() -> None:
    settings = msgspec.structs.replace(CONFIG.tokenizer, unacked_events=10, slow_consumer_s=30.0)
    desk = Desk(msgspec.structs.replace(CONFIG, tokenizer=settings))
    desk.submit()
    desk.tokens(0, OUTPUT[:20])
    desk.wait(1)
    for credit in (2, 4, 6):  # still more than 10 behind, but moving
        desk.wait(28)
        desk.gateway(Credit(RID, credit))
        desk.wait(1)
    assert not desk.ends


def test_acks_follow_the_credit_up_to_a_slack() -> None:
    desk = Desk()
    desk.submit()
    letters = ids_of("a b c d e f g h i j " * 20)
    for pos, token in enumerate(letters):
        desk.tokens(pos, [token])
    acks = [row.pos for ack in desk.sent(Ack) if isinstance(ack, Ack) for row in ack.rows]
    assert 0 < acks[-1] <= 64
    desk.gateway(Credit(RID, 100))
    (ack,) = desk.sent(Ack)
    assert isinstance(ack, Ack)
    assert 100 < ack.rows[0].pos <= 164


def test_the_least_loaded_scheduler_gets_the_next_request() -> None:
    desk = Desk()
    desk.up("scheduler-1")
    for index in range(6):
        desk.submit(rid=bytes([index]) * 16)
    names = [name for name, message in desk.to_scheduler if isinstance(message, Generate)]
    assert sorted(names) == ["scheduler-0"] * 3 + ["scheduler-1"] * 3
    desk.to_scheduler.clear()
    for index in range(6):  # those of one are cancelled: it is the emptier one now
        if names[index] == "scheduler-1":
            desk.gateway(Cancel(bytes([index]) * 16))
    desk.to_scheduler.clear()
    desk.submit(rid=b"next")
    assert [name for name, _ in desk.to_scheduler] == ["scheduler-1"]


def test_a_scheduler_that_is_not_ready_comes_second() -> None:
    desk = Desk(scheduler=False)
    loading = Peer("scheduler", "scheduler-0", "k", b"1", stats=ServiceStats(True))
    desk.core.scheduler_up(loading, desk.clock)
    desk.up("scheduler-1")
    desk.submit()
    desk.submit(rid=b"other")
    assert [name for name, _ in desk.to_scheduler] == ["scheduler-1", "scheduler-1"]


def test_requests_of_a_lost_scheduler_move_at_once() -> None:
    desk = Desk()
    desk.submit()
    desk.tokens(0, OUTPUT[:3])
    desk.up("scheduler-1")
    desk.sent(Generate)
    desk.down()
    (again,) = desk.sent(Generate)
    assert isinstance(again, Generate)
    assert (again.attempt, again.confirmed_ids) == (2, pack_ids(OUTPUT[:3]))
    desk.tokens(3, OUTPUT[3:])  # from the lost one, late: not its request any more
    assert not desk.ends
    desk.up("scheduler-0", incarnation=b"2")
    assert not desk.sent(Generate)


def test_requests_of_a_scheduler_without_an_engine_move_after_a_while() -> None:
    desk = Desk()
    desk.submit()
    desk.tokens(0, OUTPUT[:3])
    desk.to_scheduler.clear()
    peer = desk.up()  # an executor of its group is away
    peer.stats = ServiceStats(True, 0, [ReplicaStats("scheduler-0", False)])
    for _ in range(3):
        desk.wait(STALLED_S / 2)
    assert not desk.sent(Generate)  # nobody else is there: it waits
    desk.up("scheduler-1", replica=ReplicaStats("scheduler-1", False))
    desk.wait(0.1)
    assert not desk.sent(Generate)  # one without an engine is no better
    desk.up("scheduler-1")
    desk.wait(0.1)
    assert ("scheduler-0", Abort(RID, 1)) in desk.to_scheduler
    (again,) = desk.sent(Generate)
    assert isinstance(again, Generate)
    assert (again.attempt, again.confirmed_ids) == (2, pack_ids(OUTPUT[:3]))
    desk.scheduler(Finished(RID, FinishReason.ABORT, 3))  # the old one obeys
    assert not desk.ends
    desk.wait(0.1)
    assert not desk.sent(Generate)
    desk.scheduler(Accepted(RID, 2, "scheduler-1"), "scheduler-1")
    late = TokenBatch(1, 1, [TokenRow(RID, 3, pack_ids(OUTPUT[3:]))])
    desk.scheduler(late, "scheduler-1")
    desk.scheduler(Finished(RID, FinishReason.STOP, len(OUTPUT)), "scheduler-1")
    assert desk.events() == WHOLE


def test_an_engine_that_comes_back_in_time_keeps_its_requests() -> None:
    desk = Desk()
    desk.up("scheduler-1")
    desk.submit()
    ((name, _),) = [each for each in desk.to_scheduler if isinstance(each[1], Generate)]
    peer = desk.up(name)
    desk.to_scheduler.clear()
    for is_ready in (False, True, False, True):
        peer.stats = ServiceStats(True, 0, [ReplicaStats(name, is_ready)])
        desk.wait(STALLED_S * 0.8)
    desk.wait(0.1)
    sent = [each for each in desk.to_scheduler if each[0] != name or isinstance(each[1], Abort)]
    assert sent == []


def test_a_link_that_flaps_does_not_restart_the_request() -> None:
    desk = Desk()
    desk.submit()
    desk.tokens(0, OUTPUT[:3])
    desk.sent(Generate)
    desk.down()
    desk.up()
    assert desk.sent(Attach) == [Attach(RID, 1, "tokenizer-0", 3)]
    assert not desk.sent(Generate)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_cancel_reaches_the_scheduler(is_known: bool) -> None:
    desk = Desk()
    if is_known:
        desk.submit()
    desk.gateway(Cancel(RID))
    (abort,) = desk.sent(Abort)
    assert isinstance(abort, Abort)
    assert abort.rid == RID
    desk.scheduler(Finished(RID, FinishReason.ABORT, 0))
    (ack,) = desk.sent(Ack)
    assert isinstance(ack, Ack)
    assert ack.rows[0].done
    assert not desk.ends


def test_an_unknown_request_is_not_acknowledged_away() -> None:
    """After a restart its gateway will ask for it: the scheduler must keep it."""
    desk = Desk()
    desk.scheduler(Finished(RID, FinishReason.STOP, 9))
    assert not desk.sent(Ack)


def test_a_stop_string_ends_it_here_and_there() -> None:
    desk = Desk()
    desk.submit({**CHAT, "stop": ["two"]})
    desk.tokens(0, OUTPUT)
    (stop,) = desk.sent(StopAt)
    assert isinstance(stop, StopAt)
    (end,) = desk.ends
    assert isinstance(end, ResponseFinished)
    assert end.completion_tokens == stop.n_keep
    desk.scheduler(Finished(RID, FinishReason.STOP, stop.n_keep))
    acks = [row for ack in desk.sent(Ack) if isinstance(ack, Ack) for row in ack.rows]
    assert acks[-1].done
    assert len(desk.ends) == 1


def test_an_abort_that_nobody_asked_for_here_was_not_meant_for_it() -> None:
    """Another tokenizer had it there before a link was lost, and gave it up."""
    desk = Desk()
    desk.submit()
    desk.tokens(0, OUTPUT[:2])
    (first,) = desk.sent(Generate)
    desk.scheduler(Finished(RID, FinishReason.ABORT, 2))
    (again,) = desk.sent(Generate)[-1:]
    assert isinstance(first, Generate)
    assert isinstance(again, Generate)
    assert again.attempt > first.attempt
    assert again.confirmed_ids == pack_ids(OUTPUT[:2])
    desk.tokens(2, OUTPUT[2:])
    desk.scheduler(Finished(RID, FinishReason.STOP, len(OUTPUT)))
    assert desk.events() == whole()


def test_a_request_that_is_aborted_again_and_again_fails() -> None:
    desk = Desk()
    desk.submit()
    for _ in range(MAX_ABORTS):
        desk.scheduler(Finished(RID, FinishReason.ABORT, 0))
        assert not desk.ends
    desk.scheduler(Finished(RID, FinishReason.ABORT, 0))
    (end,) = desk.ends
    assert isinstance(end, ResponseFailed)
    assert end.code is ErrorCode.ENGINE_ERROR


def test_an_orphan_that_is_aborted_is_not_begun_again() -> None:
    desk = Desk()
    desk.submit()
    desk.core.gateway_down("gateway-0", desk.clock)
    desk.sent(Generate)
    desk.scheduler(Finished(RID, FinishReason.ABORT, 0))
    assert not desk.sent(Generate)


def test_a_continuation_brings_the_logprobs_of_its_tokens() -> None:
    desk = Desk()
    desk.submit({**CHAT, "logprobs": True, "top_logprobs": 1})
    probs = np.array([-0.5, -0.25], "<f4").tobytes()
    row = TokenRow(RID, 0, pack_ids(OUTPUT[:2]), probs, pack_ids(OUTPUT[:2]), probs)
    desk.scheduler(TokenBatch(1, 1, [row]))
    desk.sent(Generate)
    desk.down()
    desk.up()
    desk.scheduler(Failed(RID, ErrorCode.UNKNOWN, "restarted"))  # the answer to our Attach
    (again,) = desk.sent(Generate)
    assert isinstance(again, Generate)
    found = (again.confirmed_ids, again.confirmed_logprobs)
    assert found == (pack_ids(OUTPUT[:2]), probs)
    assert (again.confirmed_top_ids, again.confirmed_top_logprobs) == (pack_ids(OUTPUT[:2]), probs)


def test_ended_requests_are_forgotten() -> None:
    desk = Desk()
    for index in range(600):
        rid = index.to_bytes(16, "big")
        desk.submit({**CHAT, "model": "unknown"}, rid=rid)
    assert len(desk.ends) == 600
    desk.submit()
    desk.tokens(0, OUTPUT)
    desk.scheduler(Finished(RID, FinishReason.STOP, len(OUTPUT)))
    desk.submit(next_event=3)  # the gateway missed some of it
    assert len(desk.ends) == 602
    desk.wait(60)
    assert desk.core.num_live == 0
    desk.submit(next_event=3)
    assert desk.sent(Attach), "a forgotten request is asked for upstream"


def test_the_smallest_limit_wins() -> None:
    desk = Desk(scheduler=False)
    assert desk.core.context(8192) == 8192
    stats = ServiceStats(True, 0, [ReplicaStats("scheduler-0", True, max_model_len=1000)])
    peer = Peer("scheduler", "scheduler-0", "k", b"1", stats=stats)
    desk.core.scheduler_up(peer, desk.clock)
    assert desk.core.context(8192) == 1000
    desk.submit({**CHAT, "max_tokens": 5000})
    (generate,) = desk.sent(Generate)
    assert isinstance(generate, Generate)
    assert generate.max_tokens == 1000 - generate.prompt_len


def test_spans() -> None:
    desk = Desk()
    desk.submit()
    desk.scheduler(Accepted(RID, 1, "scheduler-0"))
    desk.tokens(0, OUTPUT)
    desk.scheduler(Finished(RID, FinishReason.STOP, len(OUTPUT)))
    names = [span.name for span in desk.spans]
    assert names == ["hop", "tokenize", "hop", "hop", "hop", "detokenize", "finish"]
    hops = [span.attributes["message"] for span in desk.spans if span.name == "hop"]
    assert hops == ["Submit", "Accepted", "TokenBatch", "Finished"]
    last = desk.spans[-2]
    assert last.attributes["tokens"] == len(OUTPUT)
    assert last.attributes["events"] == len(WHOLE)
    assert float(last.attributes["busy_us"]) > 0
