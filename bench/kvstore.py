"""How fast blocks go from an executor's host memory into a kvstore and back.

`make bench NAME=kvstore ARGS="--json"`. A real kvstore process and the executor's own transfers,
with a device whose blocks are host memory; each op moves 64 blocks. `raw_gbps` is a plain copy of
as many bytes in one process. Cold: pages of the file that nobody has touched yet.
"""

import argparse
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from deepmesh.config import Config, KvstoreConfig, LinksConfig, MeshConfig, TelemetryConfig
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from deepmesh.run_dir import dump_toml
from deepmesh.wire.messages import (
    Capacity,
    KvKind,
    KvMove,
    KvStatus,
    LoadBlocks,
    Pool,
    StoreBlocks,
)
from services.executor.kv_copy import BlockCopy, Bytes
from services.executor.kv_transfer import KvTransfers

BLOCKS_PER_OP = 64
ROADS: dict[str, dict[str, object]] = {
    "memory": {},
    "frames": {"shared_dir": "off"},
    "disk": {"disk_bytes": 4 << 30, "memory_bytes": 0},
}


class Device:
    """Pool blocks in host memory, copied by a thread of their own, as on a device's stream."""

    def __init__(self, config: Config, block_bytes: int) -> None:
        self.blocks = np.frombuffer(
            np.random.default_rng(0).bytes(BLOCKS_PER_OP * block_bytes), np.uint8
        ).reshape(BLOCKS_PER_OP, block_bytes)
        self.target = np.zeros_like(self.blocks)
        self._changed = threading.Event()
        self._stream: queue.SimpleQueue[BlockCopy] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()
        self.transfers = KvTransfers(
            config, "executor-0-0", submit=self._stream.put, wake=self._changed.set
        )
        sizes = (block_bytes, 0, 0)
        self.transfers.loaded(Capacity(1, 0, 1, 1, 1, 1, 1, 1, 1, block_bytes=sizes))
        self._last_op = 0

    def _run(self) -> None:
        while True:
            self._stream.get().run(self)

    def export_block(self, pool: Pool, block: int, out: Bytes) -> None:
        """Out of the pool."""
        np.copyto(out, self.blocks[block])

    def import_block(self, pool: Pool, block: int, data: Bytes) -> None:
        """Into another pool."""
        np.copyto(self.target[block], data)

    def move(self, make: type[StoreBlocks] | type[LoadBlocks], series: int) -> KvStatus:
        """One op over all blocks, under names of their own for each series."""
        self._last_op += 1
        moves = [
            KvMove((series << 16 | n).to_bytes(16, "big"), KvKind.BLOCK, [(Pool.GLOBAL, n)])
            for n in range(BLOCKS_PER_OP)
        ]
        self.transfers.order(make(self._last_op, 1, 0, moves))
        while (done := self.transfers.poll()) is None:
            self._changed.wait(5.0)
            self._changed.clear()
        return done.message.status

    def wait_link(self) -> None:
        """Until ops reach the kvstore, and through the file if there is one."""
        deadline = time.monotonic() + 20
        while self.move(StoreBlocks, 0xFFFF) is not KvStatus.OK:
            assert time.monotonic() < deadline, "no kvstore"


@contextmanager
def store(config: Config) -> Iterator[int]:
    """A kvstore process; its id."""
    path = Path(config.mesh.run_dir) / "mesh.toml"
    path.write_text(dump_toml(config))
    argv = [sys.executable, "-m", "services.kvstore", "--config", str(path)]
    child = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    try:
        yield child.pid
    finally:
        child.terminate()
        child.wait()


def measure(tier: str, block_bytes: int, rounds: int) -> list[dict[str, Json]]:
    """All ops of a tier, in `rounds` repetitions each."""
    op_bytes = BLOCKS_PER_OP * block_bytes
    with tempfile.TemporaryDirectory() as folder:
        settings = {"count": 1, "memory_bytes": 3 * rounds * op_bytes // 2, **ROADS[tier]}
        config = Config(
            mesh=MeshConfig(run_dir=folder),
            links=LinksConfig(),
            kvstore=KvstoreConfig(**settings),  # type: ignore[arg-type]: the keys are its own
            telemetry=TelemetryConfig(enabled=False),
        )
        with store(config) as pid:
            device = Device(config, block_bytes)
            try:
                device.wait_link()
                plan = [
                    ("put cold", StoreBlocks, range(rounds)),
                    ("put", StoreBlocks, range(rounds, 2 * rounds)),  # older ones leave memory
                    ("put again", StoreBlocks, range(rounds, 2 * rounds)),
                    ("get", LoadBlocks, range(rounds, 2 * rounds)),
                ]
                return [
                    case(device, pid, tier, op, make, list(s), op_bytes) for op, make, s in plan
                ]
            finally:
                device.transfers.close()


def case(
    device: Device,
    pid: int,
    tier: str,
    op: str,
    make: type[StoreBlocks] | type[LoadBlocks],
    series: list[int],
    op_bytes: int,
) -> dict[str, Json]:
    """The median over ops, one in flight."""
    times: list[float] = []
    device.target[:] = 0
    own, theirs = time.process_time(), cpu_s(pid)
    for number in series:
        start = time.perf_counter()
        status = device.move(make, number)
        times.append(time.perf_counter() - start)
        assert status is KvStatus.OK, f"{tier} {op}: {status.name}"
    assert make is StoreBlocks or np.array_equal(device.target, device.blocks)
    own, theirs = time.process_time() - own, cpu_s(pid) - theirs
    half = statistics.median(times)
    return {
        "tier": tier,
        "op": op,
        "bytes": op_bytes,
        "gbps": round(op_bytes / half / 1e9, 3),
        "latency_us_p50": round(1e6 * half, 1),
        "raw_gbps": round(raw_gbps(op_bytes), 3),
        "cpu_us_executor": round(1e6 * own / len(series), 1),
        "cpu_us_kvstore": round(1e6 * theirs / len(series), 1),
        "samples_us": [round(1e6 * t, 1) for t in times],
    }


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def raw_gbps(num_bytes: int) -> float:
    """A plain copy."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    times: list[float] = []
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return num_bytes / statistics.median(times) / 1e9


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiers", default="memory,frames,disk", help="comma-separated")
    parser.add_argument("--block-bytes", type=int, default=256 << 10)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    steal = Steal()
    cases: list[dict[str, Json]] = []
    for tier in arguments.tiers.split(","):
        found = measure(tier, arguments.block_bytes, arguments.rounds)
        for each in found:
            print(
                f"{each['tier']:7} {each['op']:9} {each['gbps']:6} GB/s "
                f"{each['latency_us_p50']:9} µs   copy {each['raw_gbps']} GB/s   "
                f"CPU {each['cpu_us_executor']} + {each['cpu_us_kvstore']} µs",
                file=sys.stderr,
            )
        cases += found
    stolen = steal.take()
    for each in cases:
        each["valid"] = stolen <= MAX_STEAL
    config: dict[str, Json] = {
        "block_bytes": arguments.block_bytes,
        "blocks_per_op": BLOCKS_PER_OP,
        "rounds": arguments.rounds,
        "steal": round(stolen, 4),
    }
    found = report("bench kvstore", config=config, cases=cases, ok=True)
    publish(found, name="kvstore", as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
