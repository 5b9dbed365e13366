"""Prefixes out of a kvstore: its memory, its disk after a kill, Redis at another replica."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from bench.determinism.groups import Outputs, Setting, scheduler_config
from bench.determinism.jobs import Job
from bench.determinism.mesh import Client, end, process, start, to_toml
from bench.kvstore_rig import redis, wait_value
from deepmesh.config import Config, KvstoreConfig, LinksConfig, MeshConfig, TelemetryConfig
from deepmesh.store_operator import ask_stats

REDIS_GROUP = "cache_redis_other_replica"
MOST_JOBS = 40
TIERS = ("device", "memory", "disk", "shared")  # as `CacheStats.hit_tokens` has them
TIER_BYTES = 256 << 20


def cache_groups(setting: Setting) -> Iterator[tuple[str, Outputs]]:
    """Each group with what came of its run.

    All are real processes. Between two runs scheduler and executor are new ones, so nothing is
    left on a device; a run whose prefixes did not come from where they should fails.
    """
    jobs = list(setting.jobs)[:MOST_JOBS]
    with redis("") as url, ExitStack() as stack:
        first = _config(setting, "a", url)
        store = _Store(first)
        stack.callback(store.end)
        yield "cache_cold", _run(first, setting, jobs, 0)
        yield "cache_memory", _run(first, setting, jobs, 1, tier="memory")
        store.kill()
        yield "cache_disk_after_restart", _run(first, setting, jobs, 2, tier="disk")
        if not url:
            return  # the check says so
        wait_value(first, "shared_up", 1)
        second = _config(setting, "b", url)
        other = _Store(second)
        stack.callback(other.end)
        wait_value(second, "shared_up", 1)
        yield REDIS_GROUP, _run(second, setting, jobs, 3, tier="shared")


def _run(
    config: Config, setting: Setting, jobs: Sequence[Job], number: int, tier: str = ""
) -> Outputs:
    before = _hits(config, tier)
    file = Path(config.mesh.run_dir) / "mesh.toml"
    with process("scheduler", file), process("executor", file):
        client = Client(config, setting, jobs, first_id=1 + number * len(jobs))
        try:
            client.run(lambda: client.is_done)
            client.settle()
        finally:
            client.inbox.close()
        assert client.stats is not None
        if tier:
            served = client.stats.cache.hit_tokens[TIERS.index(tier)]  # prefetched ones, too
            assert served > 0, f"no token of a prompt came out of the {tier} tier"
            assert _hits(config, tier) > before, f"nothing came out of the {tier} tier"
    return client.outputs


def _hits(config: Config, tier: str) -> int:
    stats = ask_stats(config, 0) if tier else None
    return dict(stats.values).get(f"{tier}_hits", 0) if stats is not None else 0


class _Store:
    """A kvstore process, and the one after it."""

    def __init__(self, config: Config) -> None:
        self._file = Path(config.mesh.run_dir) / "mesh.toml"
        self._child: subprocess.Popen[bytes] = start("kvstore", self._file)

    def kill(self) -> None:
        """SIGKILL, and a new one that has the same disk."""
        self._child.kill()
        self._child.wait()
        self._child = start("kvstore", self._file)

    def end(self) -> None:
        """In good order."""
        end(self._child)


def _config(setting: Setting, name: str, url: str) -> Config:
    folder = setting.run_dir / name
    folder.mkdir()
    config = Config(
        mesh=MeshConfig(run_dir=str(folder), model=str(setting.model)),
        links=LinksConfig(),
        scheduler=replace(scheduler_config(prefix_cache=True), store_lookup_s=10, store_load_s=60),
        telemetry=TelemetryConfig(enabled=False),
        executor=setting.config().executor,
        kvstore=KvstoreConfig(
            count=1, memory_bytes=TIER_BYTES, disk_bytes=TIER_BYTES, redis_url=url
        ),
    )
    (folder / "mesh.toml").write_text(to_toml(config))
    return config
