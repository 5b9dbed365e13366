"""An answer that one model began goes on at replicas with its weights, or fails."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import ErrorCode, Failed, Generate, ResponseFailed, ResponseFinished
from deepmesh.wire.packed import unpack_ids
from tests.fakes import FakeScheduler
from tests.services.tokenizer_harness import EOS, HI, PLAIN, Bench, Running, bench, ids_of

OUTPUT = [*ids_of("One, two, three and so on for a while"), EOS]
CHAT = {"model": "tiny", "messages": HI, "stream": True, **PLAIN}
BEGUN = (b"", b"", b"", 0)  # of a row, before `prompt` and `fingerprint`


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Bench, FakeScheduler, FakeScheduler]]:
    """A tokenizer, a scheduler that has begun an answer with weights `old`, and another one."""
    with bench(tmp_path) as mesh:
        mesh.running.stop()
        config = msgspec.structs.replace(mesh.config, scheduler=SchedulerConfig(count=2))
        mesh.config = config
        second = FakeScheduler(mesh.stage, config.scheduler_address(1), name="scheduler-1")
        mesh.running = Running(config)
        mesh.stage.until(lambda: not mesh.gateway.is_up, "the old link to go")
        mesh.stage.until(lambda: len(mesh.gateway.stats.replicas) == 2, "both heartbeats")
        yield mesh, mesh.scheduler, second


def refused(scheduler: FakeScheduler, rid: bytes, final_pos: int) -> None:
    detail = "this answer was begun by another model"
    code = ErrorCode.MISMATCH
    scheduler.send(Failed(rid, code, detail, retry_after_s=1.0, final_pos=final_pos))


def begin(mesh: Bench, first: FakeScheduler, second: FakeScheduler) -> tuple[bytes, FakeScheduler]:
    """Five tokens, wherever it was placed, and then other weights; the other scheduler."""
    rid = mesh.gateway.submit("chat", CHAT)
    mesh.stage.until(lambda: first.has(Generate) or second.has(Generate), "one")
    here, other = (first, second) if first.has(Generate) else (second, first)
    generate = here.expect(Generate)
    assert generate.fingerprint == ""  # nothing has been answered yet
    here.accept(generate)
    here.tokens(rid, 0, OUTPUT[:5], *BEGUN, None, "old.1")  # type: ignore[arg-type]
    mesh.gateway.events(rid, 3)
    refused(here, rid, 5)
    return rid, other


def test_it_goes_on_elsewhere_with_the_name_of_its_engine(
    pair: tuple[Bench, FakeScheduler, FakeScheduler],
) -> None:
    mesh, first, second = pair
    rid, other = begin(mesh, first, second)
    again = other.expect(Generate)
    assert again.rid == rid
    assert again.fingerprint == "old.1"
    assert unpack_ids(again.confirmed_ids).tolist() == OUTPUT[:5]
    other.accept(again)
    other.tokens(rid, 5, OUTPUT[5:])
    other.finish(rid, len(OUTPUT))
    assert isinstance(mesh.gateway.reply(rid).end, ResponseFinished)


def test_it_fails_where_nobody_has_its_weights(
    pair: tuple[Bench, FakeScheduler, FakeScheduler],
) -> None:
    mesh, first, second = pair
    rid, other = begin(mesh, first, second)
    other.expect(Generate)
    refused(other, rid, 5)
    end = mesh.gateway.reply(rid).end
    assert isinstance(end, ResponseFailed)
    assert end.code is ErrorCode.MISMATCH
    assert end.retry_after_s == 1.0
