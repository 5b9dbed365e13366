"""Stores and loads of an executor against a real kvstore: contents, order, losses, epochs."""

import queue
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from deepmesh.config import Config
from deepmesh.wire.messages import (
    KvItem,
    KvKind,
    KvMove,
    KvStatus,
    Pool,
    StepStatus,
    SubmitStep,
)
from services.executor.fake import FakeEngine
from services.executor.interface import LiveRows, Sampled
from services.executor.kv_copy import (
    BlockBuffer,
    BlockCopy,
    CopyGroup,
    CopyQueue,
    Place,
    SideCopies,
)
from services.executor.slots import SlotTable
from tests.services import kvstore_harness
from tests.services.executor_kv_rig import POINT, PROMPT, block, make_config, name, rig

ROADS = [{}, {"shared_dir": "off"}, {"memory_bytes": 0, "disk_bytes": 16 << 20}]


@pytest.mark.parametrize("road", ROADS, ids=["mapped", "frames", "disk alone"])
def test_a_prefix_outlives_its_executor(tmp_path: Path, road: dict[str, object]) -> None:
    """The fake checks every cell that it reads: a wrong load would end in a step ERROR."""
    config = make_config(tmp_path, **road)
    with kvstore_harness.running(config):
        with rig(config) as first:
            request, moves, step = first.prefill()
            answer = first.done(first.store(*moves, after_step=step))
            assert (answer.status, answer.done) == (KvStatus.OK, b"\1\1\1")
            first.host.run(request)
            saved = [first.bytes_of(pool, at) for move in moves for pool, at in move.blocks]
        with rig(config) as second:
            places, tables, state = second.free_places()
            answer = second.done(second.load(*places))
            assert (answer.status, answer.done) == (KvStatus.OK, b"\1\1\1")
            got = [second.bytes_of(pool, at) for move in places for pool, at in move.blocks]
            assert got == saved
            again = second.host.admit(PROMPT, 6, start=POINT, tables=tables, state_block=state)
            second.host.run(again)
    assert again.output == request.output


def test_the_fake_finds_out_about_a_block_loaded_to_the_wrong_place(tmp_path: Path) -> None:
    """Also where its window does not reach: the first block of the prefix is that of another."""
    config = make_config(tmp_path)
    with kvstore_harness.running(config):
        with rig(config) as first:
            _, moves, step = first.prefill()
            other, others, step = first.prefill([7, *PROMPT[1:]])
            assert len(other.tables[Pool.GLOBAL]) == 2
            wrong = KvMove(name(0), KvKind.BLOCK, others[0].blocks)
            assert first.done(first.store(wrong, *moves[1:], after_step=step)).status is KvStatus.OK
        with rig(config) as second:
            places, tables, state = second.free_places()
            assert second.done(second.load(*places)).status is KvStatus.OK
            again = second.host.admit(PROMPT, 6, start=POINT, tables=tables, state_block=state)
            second.host.submit(second.host.row(again))
            result = second.host.take()
            assert result.status is StepStatus.ERROR
            assert "position 0 was written for other tokens" in result.error


class Gated(FakeEngine):
    """Computes nothing before it is told to."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.gate = threading.Event()

    def compute(self, live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
        self.gate.wait(20)
        return super().compute(live, slots, step)


def test_a_store_reads_what_its_step_has_written(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    engine = Gated(config)
    with kvstore_harness.running(config), rig(config, engine) as made:
        host = made.host
        host.submit(host.row(host.admit(PROMPT[:5], 2)))  # holds the stream
        _, moves, step = made.prefill()
        before = made.bytes_of(*moves[0].blocks[0])
        stored = made.store(*moves, after_step=step)
        made.wait_active(1)
        engine.gate.set()
        assert made.done(stored).status is KvStatus.OK
        written = made.bytes_of(*moves[0].blocks[0])
        assert written != before
        made.done(made.load(block(0, 60)))
        assert made.bytes_of(Pool.GLOBAL, 60) == written


def test_a_store_of_a_step_that_is_still_to_come_waits_for_it(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config), rig(config) as made:
        made.host.submit(made.host.row(made.host.admit(PROMPT, 2)))
        made.host.take()
        early = made.store(block(7, 5), after_step=made.host.step_id + 1)
        other = made.done(made.store(block(8, 6)))
        assert other.status is KvStatus.OK
        assert [op.op_id for op in made.remote.ops] == [other.op_id], "it had to wait"
        wanted = made.write(Pool.GLOBAL, 5, seed=1)
        made.host.submit()
        made.host.take()
        assert made.done(early).status is KvStatus.OK
        made.done(made.load(block(7, 9)))
        assert made.bytes_of(Pool.GLOBAL, 9) == wanted


def test_a_step_waits_for_one_copy_at_most() -> None:
    """Stores of a long prompt come between steps, not instead of them."""
    copies = CopyQueue()
    made = [
        BlockCopy([], to_device=False, engine_epoch=1, after_step=1, on_end=lambda _: None)
        for _ in range(3)
    ]
    for copy in made:
        copies.add(copy)
    copies.on_step(1)
    assert copies.take_ready(0, is_step_waiting=True) is None
    assert copies.take_ready(1, is_step_waiting=True) is made[0]
    assert copies.take_ready(1, is_step_waiting=True) is None, "the step's turn"
    assert copies.take_ready(1, is_step_waiting=True) is made[1]
    assert copies.take_ready(1, is_step_waiting=False) is made[2]


def test_a_load_does_not_wait_for_the_step_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config), rig(config) as made:
        wanted = made.write(Pool.GLOBAL, 1, seed=1)
        assert made.done(made.store(block(0, 1))).status is KvStatus.OK
        go_on, compute = threading.Event(), made.engine.compute

        def slow(live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
            go_on.wait(60)
            return compute(live, slots, step)

        monkeypatch.setattr(made.engine, "compute", slow)
        made.host.submit(made.host.row(made.host.admit(PROMPT, 2)))
        assert made.done(made.load(block(0, 60))).status is KvStatus.OK
        assert not go_on.is_set(), "the step runs still"
        assert made.bytes_of(Pool.GLOBAL, 60) == wanted
        go_on.set()
        made.host.take()


def test_loads_of_an_older_epoch_end_before_a_new_one_begins() -> None:
    began, go_on = threading.Event(), threading.Event()
    written: list[int] = []

    class Blocks:
        def import_block(self, pool: Pool, block: int, data: Place) -> None:
            began.set()
            go_on.wait(60)
            written.append(block)

        def export_block(self, pool: Pool, block: int, out: Place) -> None:
            raise AssertionError

    def load(at: int) -> BlockCopy:
        group = CopyGroup([BlockBuffer(Pool.GLOBAL, at, np.zeros(1, np.uint8))])
        return BlockCopy([group], to_device=True, engine_epoch=1, after_step=0, on_end=ended.put)

    ended: queue.SimpleQueue[BlockCopy] = queue.SimpleQueue()
    side = SideCopies(Blocks())
    for at in range(3):
        side.add(load(at))
    assert began.wait(60)
    side.cancel()
    waits = threading.Thread(target=side.settle)
    waits.start()
    assert waits.is_alive(), "one runs"
    go_on.set()
    waits.join()
    side.add(load(7))
    assert all(ended.get(timeout=60).ok for _ in range(2))
    assert written == [0, 7]
    assert side.close(60)


def test_a_file_that_only_looks_the_same_is_not_used(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config) as store:
        path = store.service._memory.path
        assert path is not None
        size = path.stat().st_size
        path.unlink()
        with path.open("wb") as other:
            other.truncate(size)
        with rig(config) as made:
            wanted = made.write(Pool.GLOBAL, 1, seed=1)
            assert made.done(made.store(block(0, 1))).status is KvStatus.OK
            assert made.done(made.load(block(0, 2))).status is KvStatus.OK
            assert made.bytes_of(Pool.GLOBAL, 2) == wanted
        assert not any(path.read_bytes()), "nothing was written into it"


def test_a_large_order_goes_in_chunks_and_its_memory_is_used_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config), rig(config, chunk_bytes=1024) as made:
        wanted = [made.write(Pool.GLOBAL, at, seed=at) for at in range(32)]
        answer = made.done(made.store(*(block(at, at) for at in range(32))))
        assert (answer.status, answer.done) == (KvStatus.OK, b"\1" * 32)
        answer = made.done(made.load(*(block(at, 32 + at) for at in range(32))))
        assert (answer.status, answer.done) == (KvStatus.OK, b"\1" * 32)
        assert [made.bytes_of(Pool.GLOBAL, 32 + at) for at in range(32)] == wanted
        assert sum(map(len, made.transfers._memory)) <= 6 * 1024


def test_many_orders_at_once_are_each_answered_once(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config), rig(config) as made:
        wanted = [made.write(Pool.GLOBAL, at, seed=at) for at in range(30)]
        for at in range(30):
            made.store(block(at, at))
        stored = [made.done(op) for op in range(1, 31)]
        loads = [made.load(block(at, 30 + at % 30), block(99, 62)) for at in range(30)]
        loaded = [made.done(op) for op in loads]
        assert {op.status for op in stored} == {KvStatus.OK}
        assert {(op.status, op.done) for op in loaded} == {(KvStatus.MISS, b"\1\0")}
        assert [made.bytes_of(Pool.GLOBAL, 30 + at) for at in range(30)] == wanted
        assert len(made.remote.ops) == 60


@pytest.mark.parametrize("shared", [True, False])
def test_a_damaged_payload_is_a_miss(tmp_path: Path, shared: bool) -> None:
    config = make_config(tmp_path, **({} if shared else {"shared_dir": "off"}))
    with kvstore_harness.running(config) as store, rig(config) as made:
        for at in range(2):
            made.write(Pool.GLOBAL, at, seed=at)
        made.done(made.store(block(0, 0), block(1, 1)))
        kvstore_harness.damage(store, KvItem(name(1), KvKind.BLOCK))
        before = made.bytes_of(Pool.GLOBAL, 11)
        answer = made.done(made.load(block(0, 10), block(1, 11)))
        assert (answer.status, answer.done) == (KvStatus.MISS, b"\1\0")
        assert made.bytes_of(Pool.GLOBAL, 11) == before, "nothing wrong is written"
        again = made.done(made.store(block(1, 1)))
        assert (again.status, again.done) == (KvStatus.OK, b"\1"), "the store had dropped it"
        assert made.done(made.load(block(1, 11))).status is KvStatus.OK


def test_a_payload_of_another_layout_is_a_miss(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config), rig(config) as made:
        with kvstore_harness.Client(config, "executor-9-9") as other:
            other.put(kvstore_harness.block(5, num_bytes=100))
        answer = made.done(made.load(block(5, 3)))
        assert (answer.status, answer.done) == (KvStatus.MISS, b"\0")


def test_a_pool_block_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config), rig(config) as made:
        assert made.done(made.store(block(0, 1000))).status is KvStatus.INVALID
        assert made.done(made.store(block(0, 1))).status is KvStatus.OK
        assert made.done(made.load(block(0, 1000))).status is KvStatus.INVALID


def test_without_a_kvstore_an_order_fails_at_once(tmp_path: Path) -> None:
    for count in (0, 1):  # none is configured; one is, and is not there
        config = make_config(tmp_path, count=count)
        with rig(config, linked=False) as made:
            answer = made.done(made.load(block(0, 1)))
            assert (answer.status, answer.done) == (KvStatus.ERROR, b"\0")


def test_a_kvstore_is_chosen_by_its_name(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.running(config), rig(config) as made:
        assert made.done(made.store(block(0, 1), store="kvstore-0")).status is KvStatus.OK
        assert made.done(made.store(block(0, 1), store="kvstore-7")).status is KvStatus.ERROR


def test_a_kvstore_that_dies_in_mid_op_fails_it_once_and_its_successor_serves(
    tmp_path: Path,
) -> None:
    config = make_config(tmp_path)
    with rig(config, linked=False) as made:
        with kvstore_harness.process(config) as store:
            made.wait_link()
            store.send_signal(signal.SIGSTOP)
            ops = [made.load(block(0, 1)), made.store(block(0, 1))]
            made.wait_active(2)
            store.kill()
        assert {made.done(op).status for op in ops} == {KvStatus.ERROR}
        with kvstore_harness.running(config):
            made.wait_link()
            wanted = made.write(Pool.GLOBAL, 1, seed=1)
            assert made.done(made.store(block(0, 1))).status is KvStatus.OK
            assert made.done(made.load(block(0, 2))).status is KvStatus.OK
            assert made.bytes_of(Pool.GLOBAL, 2) == wanted
        assert len(made.remote.ops) == 4


def test_a_new_epoch_abandons_ops_and_touches_none_of_their_blocks(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.process(config) as store, rig(config) as made:
        made.write(Pool.GLOBAL, 1, seed=1)
        made.done(made.store(block(0, 1)))
        before = made.bytes_of(Pool.GLOBAL, 2)
        store.send_signal(signal.SIGSTOP)
        old = made.load(block(0, 2))
        made.wait_active(1)
        made.begin_epoch(2)
        late = made.load(block(0, 2))  # of an epoch that is over
        fresh = made.load(block(0, 3), epoch=2)
        store.send_signal(signal.SIGCONT)
        assert made.done(fresh).status is KvStatus.OK
        assert made.bytes_of(Pool.GLOBAL, 2) == before
        assert [op.op_id for op in made.remote.ops if op.op_id in (old, late)] == []
        with kvstore_harness.Client(config, "executor-9-9") as client:
            assert client.stats()["open_transfers"] == 0, "what it had been shown was given back"


def test_an_op_ends_at_its_deadline(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with kvstore_harness.process(config) as store, rig(config) as made:
        made.write(Pool.GLOBAL, 1, seed=1)
        assert made.done(made.store(block(0, 1))).status is KvStatus.OK
        store.send_signal(signal.SIGSTOP)
        made.set_deadline(0.3)
        ops = [made.load(block(0, 2)) for _ in range(6)]  # more than are begun at once
        assert {made.done(op).status for op in ops} == {KvStatus.ERROR}
        made.set_deadline(30.0)
        store.send_signal(signal.SIGCONT)
        assert made.done(made.load(block(0, 2))).status is KvStatus.OK
        with kvstore_harness.Client(config, "executor-9-9") as client:
            assert client.stats()["open_transfers"] == 0, "late answers were declined"


def test_a_copy_that_waits_for_the_device_ends_at_its_deadline(tmp_path: Path) -> None:
    """The step takes longer than the op may: its blocks must not be touched afterwards."""
    config = make_config(tmp_path)
    engine = Gated(config)
    with kvstore_harness.running(config), rig(config, engine) as made:
        made.write(Pool.GLOBAL, 1, seed=1)
        assert made.done(made.store(block(0, 1))).status is KvStatus.OK
        before = made.bytes_of(Pool.GLOBAL, 40)
        step = made.host.submit(made.host.row(made.host.admit(PROMPT, 2)))
        made.set_deadline(0.3)
        assert made.done(made.load(block(0, 40), after_step=step)).status is KvStatus.ERROR
        engine.gate.set()
        made.host.take()
        made.host.submit()
        made.host.take()
        assert made.bytes_of(Pool.GLOBAL, 40) == before
