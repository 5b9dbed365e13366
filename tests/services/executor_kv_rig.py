"""A fake executor and a kvstore on threads of their own, and a scheduler that a test plays."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from deepmesh.config import (
    Config,
    ExecutorConfig,
    KvstoreConfig,
    LinksConfig,
    MeshConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from deepmesh.wire.messages import (
    BlockOp,
    KvKind,
    KvMove,
    LoadBlocks,
    OpDone,
    OpKind,
    Pool,
    Reset,
    StoreBlocks,
)
from services.executor.fake import FakeEngine
from services.executor.kv_transfer import KvTransfers
from tests.contract.executor_host import Host, Request
from tests.contract.remote_executor import RemoteExecutor
from tests.services import test_executor_service as executor_service

ROOT = Path(__file__).parents[2]
PROMPT = [600 + n % 97 for n in range(200)]
POINT = 128  # tokens below the resumable point


def make_config(run_dir: Path, *, step_ms: float = 0.0, **kvstore: object) -> Config:
    settings = {"count": 1, "memory_bytes": 8 << 20, "shared_dir": str(run_dir / "shared")}
    return Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(ROOT / "models/tiny")),
        links=LinksConfig(heartbeat_s=0.2, timeout_s=20.0),
        scheduler=SchedulerConfig(max_rows=8, max_model_len=512),
        executor=ExecutorConfig(
            kind="fake", global_blocks=64, window_blocks=64, fake_step_ms=step_ms
        ),
        kvstore=KvstoreConfig(**{**settings, **kvstore}),  # pyright: ignore
        telemetry=TelemetryConfig(enabled=False),
    )


def name(number: int) -> bytes:
    """A hash."""
    return number.to_bytes(16, "big")


def block(number: int, at: int) -> KvMove:
    """The global block of that hash, in pool block `at`."""
    return KvMove(name(number), KvKind.BLOCK, [(Pool.GLOBAL, at)])


class Rig:
    """The scheduler's side of one executor."""

    def __init__(
        self,
        config: Config,
        remote: RemoteExecutor,
        engine: FakeEngine,
        transfers: KvTransfers | None,
    ) -> None:
        self.config, self.remote, self.engine = config, remote, engine
        self._transfers = transfers
        self.capacity = remote.load(executor_service.order(config))
        self.host = Host(remote, self.capacity)
        self._last_op = 0

    @property
    def transfers(self) -> KvTransfers:
        """Those of the executor."""
        assert self._transfers is not None
        return self._transfers

    def wait_link(self) -> None:
        """Until the executor and a kvstore know each other."""
        self.remote.wait(lambda: self.transfers._by_key != {}, "no link to a kvstore")

    def wait_active(self, count: int) -> None:
        """Until so many ops are at work."""
        self.remote.wait(lambda: len(self.transfers._active) == count, "not begun")

    def set_deadline(self, seconds: float) -> None:
        """Of ops ordered from now on, none of which is under way: what may fail by it has a short
        one, the rest has all the time that a busy machine takes."""
        self.transfers._deadline_s = seconds

    def begin_epoch(self, epoch: int) -> None:
        """Order a new engine epoch, and wait until the executor has given up its ops for it."""
        before = self.transfers._generation
        self.remote.send(Reset(epoch))
        self.remote.wait(lambda: self.transfers._generation > before, "no new epoch")

    # ------------------------------------------------------------ stores and loads

    def store(self, *moves: KvMove, after_step: int = 0, epoch: int = 0, store: str = "") -> int:
        """Order it; the op's number."""
        self._last_op += 1
        epoch = epoch or self.host.epoch
        order = StoreBlocks(self._last_op, epoch, after_step, list(moves), store=store)
        self.remote.send(order)
        return self._last_op

    def load(self, *moves: KvMove, after_step: int = 0, epoch: int = 0, store: str = "") -> int:
        """Order it; the op's number."""
        self._last_op += 1
        epoch = epoch or self.host.epoch
        order = LoadBlocks(self._last_op, epoch, after_step, list(moves), store=store)
        self.remote.send(order)
        return self._last_op

    def done(self, op_id: int) -> OpDone:
        """The one answer to an op."""
        self.remote.wait(lambda: any(o.op_id == op_id for o in self.remote.ops), f"op {op_id}")
        (answer,) = [o for o in self.remote.ops if o.op_id == op_id]
        return answer

    # ------------------------------------------------------------ the device

    def bytes_of(self, pool: Pool, at: int) -> bytes:
        """What a pool block holds."""
        out = np.zeros(self.capacity.block_bytes[pool], np.uint8)
        self.engine.export_block(pool, at, out)
        return out.tobytes()

    def write(self, pool: Pool, at: int, seed: int) -> bytes:
        """Fill a pool block with something."""
        size = self.capacity.block_bytes[pool]
        data = np.frombuffer(np.random.default_rng(seed).bytes(size), np.uint8)
        self.engine.import_block(pool, at, data)
        return data.tobytes()

    def prefill(self, prompt: Sequence[int] = PROMPT) -> tuple[Request, list[KvMove], int]:
        """A prompt up to its last row, and what names its resumable point.

        Returns the request, the moves of its two blocks and the point, and the step behind which
        they are complete.
        """
        host = self.host
        request = host.admit(prompt, 6)
        kept = host.free[Pool.STATE].pop()
        step = host.submit(
            host.prefill_row(request, POINT),
            ops=[BlockOp(1, OpKind.COPY, Pool.STATE, request.init.state_block, kept, after=True)],
        )
        tables = request.tables
        point = [(Pool.WINDOW, tables[Pool.WINDOW][1]), (Pool.STATE, kept)]
        moves = [block(n, tables[Pool.GLOBAL][n]) for n in range(2)]
        return request, [*moves, KvMove(name(1), KvKind.POINT, point)], step

    def free_places(self) -> tuple[list[KvMove], dict[Pool, list[int]], int]:
        """Moves that load the same into free blocks, and the tables of a request with these."""
        free = self.host.free
        first, second = free[Pool.GLOBAL].pop(), free[Pool.GLOBAL].pop()
        unused, window, state = (
            free[Pool.WINDOW].pop(),
            free[Pool.WINDOW].pop(),
            free[Pool.STATE].pop(),
        )
        point = KvMove(name(1), KvKind.POINT, [(Pool.WINDOW, window), (Pool.STATE, state)])
        tables = {Pool.GLOBAL: [first, second], Pool.WINDOW: [unused, window]}
        return [block(0, first), block(1, second), point], tables, state


@contextmanager
def rig(
    config: Config,
    engine: FakeEngine | None = None,
    *,
    chunk_bytes: int = 0,
    linked: bool = True,
) -> Iterator[Rig]:
    """An executor with an empty device, once it has found the kvstore at `config`."""
    engine = engine or FakeEngine(config)
    with executor_service.running(config, engine) as run, RemoteExecutor(config) as remote:
        transfers = run.service._transfers
        if transfers is not None:
            transfers._chunk_bytes = chunk_bytes or transfers._chunk_bytes
        made = Rig(config, remote, engine, transfers)
        if linked:
            made.wait_link()
        yield made
