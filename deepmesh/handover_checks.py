"""What `deepmesh doctor` says of prefill and decode groups: who is there, how prompts travel."""

import os
from collections import Counter
from collections.abc import Iterator

from deepmesh.checks import Check
from deepmesh.config import Config

_MIB = 1 << 20


def check_handovers(config: Config) -> Iterator[Check]:
    """Nothing to say where every group does both."""
    if not config.is_split:
        return
    roles = Counter(config.role(index) for index in range(config.scheduler.count))
    found = ", ".join(f"{count} {role}" for role, count in sorted(roles.items()))
    yield Check("roles", "ok", found)
    name = "hand-overs"
    if config.executor.address:
        return  # executors of other machines: their doctor knows
    folder = config.shared_dir
    if folder is None or not folder.parent.is_dir():
        found = "no shared folder: prompts travel in messages, at a fraction of the speed"
        yield Check(name, "warn", found, "mount a tmpfs, or set kvstore.shared_dir")
        return
    serving = sum(config.role(index) != "decode" for index in range(config.scheduler.count))
    wanted = serving * config.executor.ranks * config.executor.handover_bytes
    if not config.kvstore.address:
        wanted += config.kvstore.count * config.kvstore.memory_bytes  # of the same memory
    stats = os.statvfs(folder if folder.is_dir() else folder.parent)
    free = stats.f_bavail * stats.f_frsize
    if folder.is_dir():
        free += sum(512 * path.stat().st_blocks for path in folder.iterdir())
    text = f"{wanted // _MIB} MiB wanted with kvstores, {free // _MIB} MiB in {folder.parent}"
    if free < wanted:
        step = "lower executor.handover_bytes, or enlarge the tmpfs"
        yield Check(name, "warn", text, step)
    else:
        yield Check(name, "ok", text)
