"""Copies of prompts between two executors: a mapped file or frames, checked, or not at all."""

import queue
import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deepmesh.config import (
    Config,
    ExecutorConfig,
    KvstoreConfig,
    LinksConfig,
    MeshConfig,
    RouterConfig,
    SchedulerConfig,
)
from deepmesh.key_folder import make_keys
from deepmesh.wire.messages import (
    Capacity,
    KvKind,
    KvMove,
    KvStatus,
    LoadBlocks,
    OpDone,
    Pool,
    StoreBlocks,
)
from services.executor.handover_area import HandoverArea, Key
from services.executor.handover_memory import PAGE_BYTES, HostMemory
from services.executor.kv_copy import BlockCopy, Place
from services.executor.kv_transfer import KvTransfers
from services.executor.window import HostWindow, OpenHostWindow

SIZES = (9000, 5000, 64)  # bytes of a block, by pool
OURS, THEIRS = "executor-1-0", "executor-0-0"


class Device:
    """Blocks by pool and number; copies run when the test lets them."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Pool, int], bytes] = {}
        self.copies: queue.Queue[BlockCopy] = queue.Queue()

    def export_block(self, pool: Pool, block: int, out: Place) -> None:
        assert isinstance(out, np.ndarray)
        out[:] = np.frombuffer(self.blocks[pool, block], np.uint8)

    def import_block(self, pool: Pool, block: int, data: Place) -> None:
        assert isinstance(data, np.ndarray)
        self.blocks[pool, block] = data.tobytes()


class Executor:
    """The transfers of one executor, beside a device."""

    def __init__(self, config: Config, name: str, **place: object) -> None:
        self.device = Device()
        self.transfers = KvTransfers(
            config,
            name,
            submit=self.device.copies.put,
            wake=lambda: None,
            chunk_bytes=20_000,
            **place,  # pyright: ignore[reportArgumentType]  # of the two that differ
        )
        self.transfers.loaded(CAPACITY)
        self._is_open = True

    def close(self) -> None:
        """It is gone."""
        if self._is_open:
            self._is_open = False
            self.transfers.close()

    def run(self, order: StoreBlocks | LoadBlocks, *, timeout_s: float = 60.0) -> OpDone:
        """Give an order and wait for its end."""
        self.transfers.order(order)
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with suppress(queue.Empty):
                self.device.copies.get(timeout=0.005).run(self.device)
            if (done := self.transfers.poll()) is not None:
                return done.message
        raise TimeoutError(order)


CAPACITY = Capacity(
    engine_epoch=1,
    rank=0,
    num_global_blocks=64,
    num_window_blocks=8,
    num_state_blocks=8,
    num_slots=1,
    max_model_len=64,
    vocab_size=64,
    window=64,
    block_bytes=SIZES,
)


def config_of(folder: Path, *, way: str, room: int, keys: str = "") -> Config:
    return Config(
        mesh=MeshConfig(run_dir=str(folder)),
        links=LinksConfig(heartbeat_s=0.1, timeout_s=10.0, keys=keys),
        router=RouterConfig(count=1),
        scheduler=SchedulerConfig(count=2, roles=["prefill", "decode"]),
        executor=ExecutorConfig(
            handover="device" if way == "a window" else "host",
            handover_bytes=room,
            handover_address=f"tcp://127.0.0.1:{free_port()}" if keys else "",
        ),
        kvstore=KvstoreConfig(
            shared_dir=str(folder / "shared") if way == "a mapped file" else "off"
        ),
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def pair(
    folder: Path, *, way: str = "a mapped file", room: int = 4 << 20, keys: str = ""
) -> Iterator[tuple[Executor, Executor]]:
    """The prefill side's executor and the decode side's, linked."""
    folder.mkdir(exist_ok=True)
    config = config_of(folder, way=way, room=room, keys=keys)
    address = config.handover_address(0, 0)
    with ExitStack() as stack:
        source = Executor(config, THEIRS, serves_at=address)
        stack.callback(source.close)
        target = Executor(config, OURS, pulls_from=[address])
        stack.callback(target.close)
        nothing = LoadBlocks(0, 1, 0, [block(0, 0)], store=THEIRS)
        wait_for(lambda: target.run(nothing).status is KvStatus.MISS)
        yield source, target


def wait_for(holds: Callable[[], bool], timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < until, "it does not come about"


def block(number: int, at: int) -> KvMove:
    return KvMove(number.to_bytes(16, "big"), KvKind.BLOCK, [(Pool.GLOBAL, at)])


def point(number: int, window: int, state: int) -> KvMove:
    parts = [(Pool.WINDOW, window), (Pool.STATE, state)]
    return KvMove(number.to_bytes(16, "big"), KvKind.POINT, parts)


def prompt(device: Device | None, offset: int, count: int = 5) -> list[KvMove]:
    """Blocks 1..count and a point; with a device, its blocks are filled."""
    moves = [*(block(n, offset + n) for n in range(1, count + 1)), point(count, offset, offset)]
    if device is not None:
        draw = np.random.default_rng(offset)
        for move in moves:
            for pool, at in move.blocks:
                device.blocks[pool, at] = draw.bytes(SIZES[pool])
    return moves


def export(moves: list[KvMove], op_id: int = 1) -> StoreBlocks:
    return StoreBlocks(op_id, 1, 0, moves, store=THEIRS)


def pull(moves: list[KvMove], op_id: int = 2) -> LoadBlocks:
    return LoadBlocks(op_id, 1, 0, moves, store=THEIRS)


def payload(device: Device, moves: list[KvMove]) -> list[bytes]:
    return [device.blocks[part] for move in moves for part in move.blocks]


@pytest.mark.parametrize("way", ["a mapped file", "a window", "frames", "encrypted frames"])
def test_what_is_copied_out_is_pulled_bit_for_bit(tmp_path: Path, way: str) -> None:
    shared, keys = way == "a mapped file", ""
    if way == "encrypted frames":
        keys = str(tmp_path / "keys")
        make_keys(Path(keys))
    with pair(tmp_path, way=way, keys=keys) as (source, target):
        ours, theirs = prompt(source.device, 0), prompt(None, 20)
        made = source.run(export(ours))
        assert (made.status, made.done) == (KvStatus.OK, b"\x01" * 6)
        before = payload(source.device, ours)
        source.device.blocks.clear()  # the copy is all that is left
        got = target.run(pull(theirs))
        assert (got.status, got.done) == (KvStatus.OK, b"\x01" * 6)
        assert payload(target.device, theirs) == before
        assert (tmp_path / "shared" / f"{THEIRS}.handover").exists() == shared
    assert not (tmp_path / "shared").exists()


def test_a_damaged_copy_is_not_loaded(tmp_path: Path) -> None:
    with pair(tmp_path) as (source, target):
        source.run(export(prompt(source.device, 0)))
        path = tmp_path / "shared" / f"{THEIRS}.handover"
        data = bytearray(path.read_bytes())
        data[PAGE_BYTES + 17] ^= 1
        path.write_bytes(data)
        theirs = prompt(None, 20)
        got = target.run(pull(theirs))
        assert got.status is KvStatus.MISS
        assert got.done.count(0) == 1
        assert len(target.device.blocks) == 6  # of 7 parts: the damaged one never got there


def test_copies_are_released_one_by_one_and_shared_beginnings_last(tmp_path: Path) -> None:
    with pair(tmp_path, way="frames") as (source, target):
        source.run(export(prompt(source.device, 0, count=3), op_id=1))
        source.run(export(prompt(source.device, 0, count=5), op_id=2))
        source.transfers.release([1])
        assert target.run(pull(prompt(None, 20, count=5))).status is KvStatus.OK
        assert target.run(pull(prompt(None, 20, count=3))).status is KvStatus.MISS  # its point
        source.transfers.release([2])
        wait_for(lambda: target.run(pull([block(1, 1)])).status is KvStatus.MISS)


def test_copies_end_with_the_engine_epoch(tmp_path: Path) -> None:
    with pair(tmp_path) as (source, target):
        source.run(export(prompt(source.device, 0)))
        source.transfers.begin_epoch()
        wait_for(lambda: target.run(pull(prompt(None, 20))).done == bytes(6))


def test_without_room_a_copy_is_refused_and_keeps_nothing(tmp_path: Path) -> None:
    with pair(tmp_path, room=10 * PAGE_BYTES) as (source, target):
        made = source.run(export(prompt(source.device, 0)))
        assert (made.status, made.done) == (KvStatus.FULL, bytes(6))
        assert target.run(pull([block(1, 1)])).status is KvStatus.MISS
        small = prompt(source.device, 0, count=1)
        assert source.run(export(small, op_id=3)).status is KvStatus.OK


def test_an_executor_that_is_gone_ends_the_pull(tmp_path: Path) -> None:
    with pair(tmp_path) as (source, target):
        source.run(export(prompt(source.device, 0)))
        source.close()
        assert target.run(pull(prompt(None, 20))).status is KvStatus.ERROR


def area_of(folder: Path, max_bytes: int, kind: str = "file") -> HandoverArea:
    if kind == "window":
        return HandoverArea(HostWindow(max_bytes))
    return HandoverArea(HostMemory(folder / "area", max_bytes))


def keep(area: HandoverArea, op_id: int, key: Key, payload: NDArray[np.uint8]) -> bool:
    """As an op does, and the device."""
    room = area.take(len(payload))
    if room is None:
        return False
    at, place = room
    assert isinstance(place, np.ndarray)
    place[:] = payload
    area.keep(op_id, key, [(Pool.GLOBAL, len(payload))], at)
    return True


@pytest.mark.parametrize("kind", ["file", "window"])
def test_memory_that_is_still_read_is_not_given_to_others(tmp_path: Path, kind: str) -> None:
    area = area_of(tmp_path, 4 * PAGE_BYTES, kind)
    first = np.full(3 * PAGE_BYTES, 7, np.uint8)
    key, other = (b"a" * 16, KvKind.BLOCK), (b"b" * 16, KvKind.BLOCK)
    try:
        assert keep(area, 1, key, first)
        found = area.begin_read(key)
        assert found is not None
        area.release(1)
        assert area.begin_read(key) is None
        assert area.take(2 * PAGE_BYTES) is None
        assert area.read(found[0]) == first.tobytes()
        area.end_read(found[1])
        assert keep(area, 2, other, np.zeros(4 * PAGE_BYTES, np.uint8))
        area.release(2)
        assert area.used_bytes == 0
    finally:
        area.close()


def test_a_place_is_one_run_and_comes_back_however_its_op_ends(tmp_path: Path) -> None:
    """Random orders of taking, keeping and giving back: no two overlap, and none is lost."""
    draw = random.Random(4)
    area = area_of(tmp_path, 64 * PAGE_BYTES)
    open_: dict[int, int] = {}
    kept: dict[int, tuple[int, int]] = {}
    try:
        for number in range(400):
            match draw.randrange(4):
                case 0 | 1:
                    size = draw.randrange(1, 9 * PAGE_BYTES)
                    if (room := area.take(size)) is not None:
                        taken = [*open_.items(), *kept.values()]
                        assert all(room[0] >= at + n or at >= room[0] + size for at, n in taken)
                        open_[room[0]] = size
                case 2 if open_:
                    at = draw.choice(list(open_))
                    if draw.random() < 0.5:
                        open_.pop(at)
                        area.give_back(at)
                    else:
                        kept[number] = (at, open_.pop(at))
                        key = (number.to_bytes(16, "big"), KvKind.BLOCK)
                        area.keep(number, key, [(Pool.GLOBAL, kept[number][1])], at)
                case 3 if kept:
                    gone = draw.choice(list(kept))
                    del kept[gone]
                    area.release(gone)
                case _:
                    pass
        for at in open_:
            area.give_back(at)
        area.clear()
        assert area.used_bytes == 0
        whole = area.take(64 * PAGE_BYTES)
        assert whole is not None
        area.give_back(whole[0])
    finally:
        area.close()


def test_a_machine_without_memory_says_so(tmp_path: Path) -> None:
    def none(fd: int, offset: int, size: int) -> None:
        if offset:
            raise OSError(28, "No space left on device")

    area = HandoverArea(HostMemory(tmp_path / "area", 32 << 20, allocate=none))
    try:
        assert area.take(20 << 20) is None
        assert len(area) == 0
    finally:
        area.close()


def test_a_window_that_is_not_there_is_not_opened() -> None:
    window = HostWindow(4 * PAGE_BYTES)
    opened = OpenHostWindow(window.name, window.num_bytes)
    window.set_head(b"nonce")
    assert opened.head(5) == b"nonce"
    with pytest.raises(ValueError, match="has less than"):
        OpenHostWindow(window.name, window.num_bytes + 1)
    place = opened.place(PAGE_BYTES, 8)
    with pytest.raises(ValueError, match="read-only"):
        place[:] = 1  # only its owner writes
    window.close()
    assert not place.any(), "what is looked at stays mapped"
    with pytest.raises(OSError, match="No such file"):
        OpenHostWindow(window.name, window.num_bytes)


@pytest.mark.parametrize("way", ["a mapped file", "a window"])
@pytest.mark.parametrize("fault", ["gone", "epoch", "released", "damaged", "deadline"])
def test_whenever_it_fails_no_block_counts_that_is_not_whole(
    tmp_path: Path, way: str, fault: str
) -> None:
    """Between any two copies of the receiver's device the other side fails in each way."""
    for after in range(4):
        with pair(tmp_path / str(after), way=way) as (source, target):
            ours, theirs = prompt(source.device, 0, count=9), prompt(None, 20, count=9)
            source.run(export(ours))
            wanted = payload(source.device, ours)
            order, found = pull(theirs), list[bytes]()
            target.transfers.order(order)
            done: OpDone | None = None
            number, until = 0, time.monotonic() + 60.0
            while done is None:
                assert time.monotonic() < until, (fault, after)
                if number == after:
                    number += 1
                    fail(source, target, fault)
                with suppress(queue.Empty):
                    target.device.copies.get(timeout=0.005).run(target.device)
                    number += 1
                told = target.transfers.poll()
                done = told.message if told is not None else None
            for move, is_done in zip(theirs, done.done, strict=True):
                parts = [target.device.blocks.get(part, b"") for part in move.blocks]
                found += parts if is_done else [b""] * len(parts)
            assert all(a in (b"", b) for a, b in zip(found, wanted, strict=True))
            assert (done.status is KvStatus.OK) == (found == wanted), (fault, after)
            if fault != "gone":  # nothing is held for good on the other side
                area = source.transfers._server.area  # pyright: ignore
                source.transfers.begin_epoch()
                target.close()
                wait_for(lambda area=area: area.used_bytes == 0)


def fail(source: Executor, target: Executor, fault: str) -> None:
    """What may happen to a prompt that is on its way."""
    server = source.transfers._server
    assert server is not None
    match fault:
        case "gone":
            source.close()
        case "epoch":
            source.transfers.begin_epoch()
        case "released":
            source.transfers.release([1])
        case "damaged":
            for copy in list(server.area._copies.values())[::2]:
                place = server.area.memory.place(copy.run[0], copy.num_bytes)
                place[3] ^= 1
        case _:  # the receiver's own
            for op in target.transfers._active:
                op.deadline_s = 0.0


def test_frames_take_the_place_of_a_window_that_cannot_be_opened(tmp_path: Path) -> None:
    """Another host, another user: what leaves the window is checked on the way out."""
    with pair(tmp_path, way="a window") as (source, target):
        source.run(export(prompt(source.device, 0)))
        for link in target.transfers._links:
            link.drop_file()
        server = source.transfers._server
        assert server is not None
        server._sees.clear()
        assert target.run(pull(prompt(None, 20))).status is KvStatus.OK
        fail(source, target, "damaged")
        got = target.run(pull(prompt(None, 40)))
        assert (got.status, got.done.count(0)) == (KvStatus.MISS, 3)
        assert not any(at == (Pool.GLOBAL, 41) for at in target.device.blocks)
        assert server.counters["damaged"] == 3
