"""What `deepmesh doctor` says of kvstores: room for their tiers, and what those hold now."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from deepmesh.checks import Check
from deepmesh.config import Config
from deepmesh.store_operator import ANSWER_S, ask_stats

REDIS_S = 2.0
_MIB = 1 << 20


def check_kvstores(config: Config) -> Iterator[Check]:
    """Nothing to say where no kvstore is configured or all run elsewhere."""
    if config.kvstore.count and config.kvstore.redis_url:
        yield _check_redis(config)
    if not config.kvstore.count or config.kvstore.address:
        return
    yield from _check_memory(config)
    yield from _check_disk(config)
    for index in range(config.kvstore.count):
        address = config.kvstore_address(index)
        if Path(address.removeprefix("ipc://")).exists():
            yield _check_running(config, index)


def _check_memory(config: Config) -> Iterator[Check]:
    """The file takes memory only as it fills, so there may be less of it than asked for."""
    folder, wanted = config.shared_dir, config.kvstore.count * config.kvstore.memory_bytes
    if not wanted:
        return
    if folder is None or not folder.parent.is_dir():
        found = "no shared folder: blocks travel in messages, at a fraction of the speed"
        yield Check("kvstore memory", "warn", found, "mount a tmpfs, or set kvstore.shared_dir")
        return
    stats = os.statvfs(folder if folder.is_dir() else folder.parent)
    free = stats.f_bavail * stats.f_frsize
    if folder.is_dir():
        free += sum(512 * path.stat().st_blocks for path in folder.iterdir())
    text = f"{wanted // _MIB} MiB wanted, {free // _MIB} MiB in {folder.parent}"
    if free < wanted:
        step = "lower kvstore.memory_bytes, or enlarge the tmpfs"
        yield Check("kvstore memory", "warn", text, step)
    else:
        yield Check("kvstore memory", "ok", text)


def _check_disk(config: Config) -> Iterator[Check]:
    wanted = config.kvstore.count * config.kvstore.disk_bytes
    if not wanted:
        return
    folder = config.kvstore_disk_dir(0).parent
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        yield Check("kvstore disk", "fail", f"{folder}: not writable", "set kvstore.disk_dir")
        return
    used = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(there).free + used
    text = f"{wanted // _MIB} MiB wanted, {free // _MIB} MiB at {folder}, {used // _MIB} in use"
    if free < wanted:
        step = "lower kvstore.disk_bytes, or set kvstore.disk_dir to a larger disk"
        yield Check("kvstore disk", "warn", text, step)
    else:
        yield Check("kvstore disk", "ok", text)


def _check_redis(config: Config) -> Check:
    """A kvstore does without it; what it says of itself is better known before."""
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    settings, name = config.kvstore, "kvstore Redis"
    client = redis.Redis.from_url(  # pyright: ignore[reportUnknownMemberType]: its **kwargs
        settings.redis_url,
        socket_timeout=REDIS_S,
        socket_connect_timeout=REDIS_S,
        retry=Retry(NoBackoff(), 0),
    )
    where = settings.redis_url.rpartition("@")[2]  # without a password
    try:
        client.eval("return 1", 0)
        found: object = client.info("memory")  # pyright: ignore[reportUnknownMemberType]: as above
        memory = msgspec.convert(found, _RedisMemory, strict=False)
    except (redis.RedisError, OSError, ValueError) as error:
        return Check(name, "warn", f"{where}: {error}", "start it, or correct kvstore.redis_url")
    finally:
        client.close()
    wanted, most = settings.redis_max_bytes, memory.maxmemory
    text = f"{where}: {wanted // _MIB} MiB wanted, {memory.used_memory // _MIB} MiB in use"
    if most and most < wanted:
        step = "lower kvstore.redis_max_bytes, or raise its maxmemory"
        return Check(name, "warn", f"{text}, maxmemory is {most // _MIB} MiB", step)
    return Check(name, "ok", text)


class _RedisMemory(msgspec.Struct):
    """Of what INFO says."""

    used_memory: int = 0
    maxmemory: int = 0


def _check_running(config: Config, index: int) -> Check:
    name = f"kvstore-{index}"
    stats = ask_stats(config, index)
    if stats is None:
        found = f"{config.kvstore_address(index)}: no answer within {ANSWER_S:g} s"
        return Check(name, "warn", found, f"read the log of {name}")
    values = dict(stats.values)
    memory, disk = (values.get(f"{tier}_bytes", 0) // _MIB for tier in ("memory", "disk"))
    asked, hit = values.get("lookup_blocks", 0), values.get("hit_blocks", 0)
    found = (
        f"{values.get('memory_items', 0)} items of {memory} MiB in memory, "
        f"{values.get('disk_items', 0)} of {disk} MiB on disk, {values.get('records', 0)} records; "
        f"{hit} of {asked} blocks asked for were there"
    )
    if config.kvstore.redis_url and not values.get("shared_up"):
        return Check(name, "warn", f"{found}; Redis does not answer", "it goes on without")
    damaged = sum(values.get(f"{tier}damaged", 0) for tier in ("", "disk_", "shared_"))
    if damaged:
        step = "each was computed again; if it grows, test the memory and the disk"
        return Check(name, "warn", f"{found}; {damaged} damaged", step)
    return Check(name, "ok", found)
