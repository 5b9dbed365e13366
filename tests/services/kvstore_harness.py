"""A kvstore on a thread or as a process, and peers that speak to it over real links."""

import mmap
import random
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from deepmesh import telemetry
from deepmesh.config import Config, KvstoreConfig, LinksConfig, MeshConfig, TelemetryConfig
from deepmesh.run_dir import dump_toml
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    AnyMessage,
    Blocks,
    BlocksRead,
    GetBlocks,
    GetStoreStats,
    KvItem,
    KvKind,
    Pool,
    PutBlocks,
    PutDone,
    Reserve,
    Reserved,
    SharedFile,
    SharedFileSeen,
    StoreStats,
)
from deepmesh.wire.sockets import Dialer, Identity, Mail
from services.kvstore.service import KvStoreService

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
M = TypeVar("M", bound=AnyMessage)


def make_config(tmp_path: Path, **kvstore: object) -> Config:
    settings = {"count": 1, "memory_bytes": 4 << 20, "shared_dir": str(tmp_path / "shared")}
    return Config(
        mesh=MeshConfig(run_dir=str(tmp_path)),
        links=LinksConfig(heartbeat_s=0.2, timeout_s=20.0),
        kvstore=KvstoreConfig(**{**settings, **kvstore}),  # pyright: ignore
        telemetry=TelemetryConfig(enabled=False),
    )


class Running:
    """A service on a thread of its own."""

    def __init__(self, config: Config, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        tracer = telemetry.setup("kvstore", "kvstore-0", config)
        self.service = KvStoreService(config, index=0, tracer=tracer, clock=clock)
        self.thread = threading.Thread(target=self.service.run)
        self.thread.start()

    def join(self) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


@contextmanager
def running(config: Config, clock: Callable[[], float] = time.time) -> Iterator[Running]:
    run = Running(config, clock)
    try:
        yield run
    finally:
        run.service.stop()
        run.join()


@contextmanager
def process(config: Config) -> Iterator["subprocess.Popen[bytes]"]:
    """A store of its own: it may be stopped, continued and killed by signals."""
    path = Path(config.mesh.run_dir) / "mesh.toml"
    path.write_text(dump_toml(config))
    argv = [sys.executable, "-m", "services.kvstore", "--config", str(path)]
    child = subprocess.Popen(argv, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def block(number: int, num_bytes: int = 6000) -> tuple[KvItem, bytes]:
    """A global block and its payload."""
    payload = random.Random(number).randbytes(num_bytes)
    hash_ = number.to_bytes(16, "big")
    item = KvItem(hash_, KvKind.BLOCK, [(Pool.GLOBAL, num_bytes)], zlib.crc32(payload))
    return item, payload


def point(number: int, window_bytes: int = 9000) -> tuple[KvItem, bytes]:
    """A resumable point: two window blocks and a small state."""
    parts = [(Pool.WINDOW, window_bytes), (Pool.WINDOW, window_bytes), (Pool.STATE, 100)]
    payload = random.Random(-number).randbytes(2 * window_bytes + 100)
    return KvItem(number.to_bytes(16, "big"), KvKind.POINT, parts, zlib.crc32(payload)), payload


def damage(run: Running, item: KvItem) -> None:
    """Flip a bit of a payload where it lies in memory."""
    memory = run.service._memory
    (at, _), *_ = memory.extents(item.hash + bytes([item.kind]))
    memory._map[at] ^= 0x10


class Client:
    """A peer: an executor unless said otherwise."""

    def __init__(
        self, config: Config, name: str = "executor-0-0", service: str = "executor"
    ) -> None:
        me = Identity.new(service, name, config)
        self.link = Dialer(config.kvstore_address(0), me, config.links)
        self.inbox = Inbox(self.link)
        self.mail: list[Mail] = []
        self.map: mmap.mmap | None = None
        self._op_id = 0
        self._wait(lambda: self.link.peer is not None, "no link")

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self.map is not None:
            self.map.close()
        self.inbox.close()

    def op_id(self) -> int:
        self._op_id += 1
        return self._op_id

    def send(self, message: AnyMessage, attachments: Sequence[bytes] = ()) -> None:
        assert self.link.send(message, attachments)

    def expect(self, kind: type[M]) -> tuple[M, list[bytes]]:
        """The next message of a kind."""
        self._wait(lambda: any(isinstance(m.message, kind) for m in self.mail), kind.__name__)
        mail = next(m for m in self.mail if isinstance(m.message, kind))
        self.mail.remove(mail)
        assert isinstance(mail.message, kind)
        return mail.message, mail.attachments

    def ask(self, message: AnyMessage, kind: type[M], attachments: Sequence[bytes] = ()) -> M:
        self.send(message, attachments)
        return self.expect(kind)[0]

    def put(self, *things: tuple[KvItem, bytes]) -> PutDone:
        """By frames."""
        order = PutBlocks(self.op_id(), 1, [item for item, _ in things])
        return self.ask(order, PutDone, [payload for _, payload in things])

    def get(self, *items: KvItem) -> tuple[Blocks, list[bytes | None]]:
        """Payloads by frames or out of the shared file, as the store answers; checked."""
        self.send(GetBlocks(self.op_id(), [KvItem(i.hash, i.kind) for i in items]))
        answer, attached = self.expect(Blocks)
        payloads = [self._payload(item, attached) for item in answer.items]
        assert not attached
        if any(item.extents for item in answer.items):
            self.send(BlocksRead(answer.op_id))
        return answer, payloads

    def _payload(self, item: KvItem, attached: list[bytes]) -> bytes | None:
        if not item.tier:
            return None
        payload = self.read_shared(item) if item.extents else attached.pop(0)
        assert zlib.crc32(payload) == item.checksum
        return payload

    # ------------------------------------------------------------ the shared file

    def see_shared_file(self) -> SharedFile:
        """Map it and prove it."""
        offer, _ = self.expect(SharedFile)
        with Path(offer.path).open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), offer.num_bytes)
        self.send(SharedFileSeen(self.map[: offer.num_nonce_bytes]))
        return offer

    def put_shared(self, *things: tuple[KvItem, bytes]) -> tuple[Reserved, PutDone]:
        """Through the shared file; what is not given a place is left out."""
        op_id = self.op_id()
        reserved = self.ask(Reserve(op_id, [item for item, _ in things]), Reserved)
        order: list[KvItem] = []
        for (item, payload), place in zip(things, reserved.items, strict=True):
            if place.extents:
                self.write_shared(place, payload)
                order.append(
                    KvItem(item.hash, item.kind, item.parts, item.checksum, extents=place.extents)
                )
        return reserved, self.ask(PutBlocks(op_id, 1, order), PutDone)

    def write_shared(self, place: KvItem, payload: bytes) -> None:
        assert self.map is not None
        at = 0
        for offset, size in place.extents:
            self.map[offset : offset + size] = payload[at : at + size]
            at += size
        assert at == len(payload)

    def read_shared(self, item: KvItem) -> bytes:
        assert self.map is not None
        return b"".join(self.map[at : at + size] for at, size in item.extents)

    def stats(self) -> dict[str, int]:
        return dict(self.ask(GetStoreStats(self.op_id()), StoreStats).values)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not done():
            left = deadline - time.monotonic()
            assert left > 0, f"{what}: nothing came"
            self.mail += [e for e in self.inbox.wait(left) if isinstance(e, Mail)]
