"""A replica that cannot have a request says so, and the request goes on at another one."""

import pytest

from deepmesh.wire.messages import (
    Accepted,
    Ack,
    AckRow,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    ReplicaStats,
    ResponseFailed,
    ServiceStats,
    TokenBatch,
    TokenRow,
)
from deepmesh.wire.packed import pack_ids
from tests.services.test_tokenizer_core import OUTPUT, RID, Desk, whole

REFUSALS = [ErrorCode.OVERLOADED, ErrorCode.MISMATCH]


def generates(desk: Desk) -> list[tuple[str, Generate]]:
    """Generate messages so far and who got them, taken out."""
    found = [(n, m) for n, m in desk.to_scheduler if isinstance(m, Generate)]
    desk.to_scheduler = [(n, m) for n, m in desk.to_scheduler if not isinstance(m, Generate)]
    return found


def refuse(desk: Desk, name: str, code: ErrorCode = ErrorCode.OVERLOADED, pos: int = 0) -> None:
    desk.scheduler(Failed(RID, code, f"{name} cannot", final_pos=pos), name)


def tokens(desk: Desk, name: str, pos: int, ids: list[int]) -> None:
    desk.scheduler(TokenBatch(1, 1, [TokenRow(RID, pos, pack_ids(ids))]), name)


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refused_request_is_tried_at_each_other_replica_once(code: ErrorCode) -> None:
    desk = Desk()
    desk.up("scheduler-1")
    desk.up("scheduler-2")
    desk.submit()
    tried: list[str] = []
    for _ in range(3):
        ((name, generate),) = generates(desk)
        tried.append(name)
        assert generate.attempt == len(tried)
        assert not desk.ends
        refuse(desk, name, code)
        assert (name, Ack([AckRow(RID, 0, done=True)])) in desk.to_scheduler
    assert sorted(tried) == ["scheduler-0", "scheduler-1", "scheduler-2"]
    assert desk.ends == [ResponseFailed(RID, code, f"{tried[-1]} cannot")]
    assert not generates(desk)


def test_a_replica_that_drains_too_long_hands_its_request_over_in_mid_stream() -> None:
    desk = Desk()
    desk.up("scheduler-1")
    desk.submit()
    ((first, _),) = generates(desk)
    desk.scheduler(Accepted(RID, 1, first), first)
    tokens(desk, first, 0, OUTPUT[:4])
    refuse(desk, first, pos=6)  # its last two tokens are on their way, or lost
    ((second, again),) = generates(desk)
    assert second != first
    assert again.confirmed_ids == pack_ids(OUTPUT[:4])
    desk.scheduler(Accepted(RID, again.attempt, second), second)
    tokens(desk, second, 4, OUTPUT[4:])
    desk.scheduler(Finished(RID, FinishReason.STOP, len(OUTPUT)), second)
    assert desk.events() == whole()


def test_one_that_was_accepted_since_may_go_back() -> None:
    desk = Desk()
    desk.up("scheduler-1")
    desk.submit()
    ((first, _),) = generates(desk)
    refuse(desk, first)
    ((second, again),) = generates(desk)
    desk.scheduler(Accepted(RID, again.attempt, second), second)
    refuse(desk, second)
    assert [name for name, _ in generates(desk)] == [first]


def test_a_replica_known_to_drain_is_no_way_out() -> None:
    desk = Desk()
    desk.up("scheduler-1", replica=ReplicaStats("scheduler-1", False, draining=True))
    desk.submit()
    ((name, _),) = generates(desk)
    assert name == "scheduler-0"
    refuse(desk, name)
    assert [type(end) for end in desk.ends] == [ResponseFailed]


def test_with_a_router_it_goes_back_to_the_router() -> None:
    desk = Desk()
    desk.up("scheduler-1")
    desk.core.router_up("router-0", desk.clock)
    desk.submit()
    assert [(n, g.attempt) for n, g in generates(desk)] == [("router-0", 1)]
    refuse(desk, "scheduler-1")
    assert [(n, g.attempt) for n, g in generates(desk)] == [("router-0", 2)]
    done = [
        row.done
        for name, m in desk.to_scheduler
        if name == "router-0" and isinstance(m, Ack)
        for row in m.rows
    ]
    assert not any(done), "the router would forget whom to avoid"


def test_an_engine_with_another_vocabulary_is_reported_and_comes_last() -> None:
    desk = Desk(scheduler=False, vocabulary="ours")
    foreign = ReplicaStats("scheduler-0", True, vocab_size=99, vocabulary="theirs")
    peer = desk.up("scheduler-0", replica=foreign)
    (told,) = desk.core.stats().replicas
    assert not told.ready
    assert "scheduler-0 serves a model with vocabulary theirs of 99 tokens" in told.refused
    desk.up("scheduler-1", load=3, replica=ReplicaStats("scheduler-1", True, vocabulary="ours"))
    desk.submit()
    ((name, generate),) = generates(desk)
    assert (name, generate.vocabulary) == ("scheduler-1", "ours")
    peer.stats = ServiceStats(True, 0, [ReplicaStats("scheduler-0", True, vocabulary="ours")])
    assert [r.refused for r in desk.core.stats().replicas] == ["", ""]
