"""Which scheduler a tokenizer chooses when there is no router."""

from deepmesh.wire.link import Peer
from deepmesh.wire.messages import ReplicaStats, ServiceStats
from services.tokenizer.placement import Schedulers


def peer(name: str, *, ready: bool = True, role: str = "both", fingerprint: str = "") -> Peer:
    replica = ReplicaStats(name, ready, role=role, fingerprint=fingerprint)
    stats = ServiceStats(ready, 0, [replica])
    return Peer("scheduler", name, name, b"i", stats=stats)


def chosen(schedulers: Schedulers) -> str:
    found = schedulers.choose()
    assert found is not None
    return found.name


def test_a_group_that_computes_prompts_for_others_is_the_last_resort() -> None:
    schedulers = Schedulers()
    schedulers.up(peer("scheduler-0", role="prefill"))
    assert chosen(schedulers) == "scheduler-0"
    schedulers.up(peer("scheduler-1", role="decode"))
    schedulers.placed["scheduler-1"] = 9
    assert chosen(schedulers) == "scheduler-1"
    schedulers.down("scheduler-1")
    schedulers.up(peer("scheduler-1", ready=False, role="decode"))
    assert chosen(schedulers) == "scheduler-0"


def test_of_equals_the_one_with_fewer_requests_is_chosen() -> None:
    schedulers = Schedulers()
    schedulers.up(peer("scheduler-0"))
    schedulers.up(peer("scheduler-1"))
    schedulers.placed["scheduler-0"] = 1
    assert chosen(schedulers) == "scheduler-1"


def test_an_answer_that_was_begun_goes_on_only_where_the_same_weights_are() -> None:
    schedulers = Schedulers()
    schedulers.up(peer("scheduler-0", fingerprint="new.1"))
    schedulers.up(peer("scheduler-1", fingerprint="old.2"))  # the same weights, another build
    schedulers.placed["scheduler-1"] = 9
    found = schedulers.choose(["scheduler-2"], "old.1")
    assert found is not None
    assert found.name == "scheduler-1"
    assert schedulers.choose(["scheduler-1"], "old.1") is None
    schedulers.up(peer("scheduler-3", ready=False))  # loads, and does not say what
    found = schedulers.choose(["scheduler-1"], "old.1")
    assert found is not None
    assert found.name == "scheduler-3"
