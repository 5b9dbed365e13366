"""`python -m tests.services.kvstore_crash FOLDER SEED TRIALS`: kills a writer of a disk tier.

Each trial forks a writer that acknowledges through a pipe what it has written or dropped. It is
killed by SIGKILL in the middle of a write (payload, journal, compaction) drawn at random, or
from outside after a number of acknowledgements. Then the folder is opened again: everything
acknowledged has to be there, and nothing may be wrong.
"""

import os
import random
import signal
import sys
import zlib
from collections import Counter
from pathlib import Path

from services.kvstore.disk import DiskTier
from services.kvstore.files import WriteAt
from services.kvstore.tier import Stored

MAX_BYTES = 1 << 20
NUM_KEYS = 60
MAX_PAYLOAD = 12_000  # all keys together stay below what may live
ACK_BYTES = 8


def payload_of(key: int, version: int) -> bytes:
    """What the writer writes; version 0 is nothing."""
    source = random.Random(key << 32 | version)
    return source.randbytes(source.randrange(1, MAX_PAYLOAD))


def name_of(key: int) -> bytes:
    return b"key-%d" % key


def cut_write(num_writes: int, share: float) -> WriteAt:
    """Writes so many times, then `share` of a write; then SIGKILL."""
    left = num_writes

    def write_at(fd: int, data: bytes | memoryview, offset: int) -> int:
        nonlocal left
        left -= 1
        if left == 0:
            os.pwrite(fd, data[: round(share * len(data))], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        return os.pwrite(fd, data, offset)

    return write_at


def write_for_ever(folder: Path, acks: int, source: random.Random, versions: list[int]) -> None:
    """The writer: says before each change what it begins, and after it that it is done."""
    num_writes = source.randrange(1, 300) if source.random() < 0.7 else 1 << 60
    share = source.choice([0.0, 1.0]) if source.random() < 0.3 else source.random()
    write_at = cut_write(num_writes, share)
    tier = DiskTier(folder, max_bytes=MAX_BYTES, write_at=write_at)
    version = max(versions) + 1
    while True:
        key = source.randrange(NUM_KEYS)
        new = version if source.random() < 0.8 else 0
        version += 1
        change = key.to_bytes(2, "big") + new.to_bytes(5, "big")
        os.write(acks, b"?" + change)
        if new:
            payload = payload_of(key, new)
            checksum = zlib.crc32(payload)
            tier.write(Stored(name_of(key), b"m%d" % new, len(payload), checksum), payload)
        else:
            tier.drop(name_of(key))
        os.write(acks, b"!" + change)


def run_and_kill(folder: Path, source: random.Random, versions: list[int]) -> tuple[int, int]:
    """One writer's life. Updates `versions`; returns what it had begun, (key, version)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            write_for_ever(folder, writer, source, versions)
        finally:
            os._exit(1)
    os.close(writer)
    patience, begun = source.randrange(1, 400), (0, versions[0])
    with os.fdopen(reader, "rb") as acks:
        while len(ack := acks.read(ACK_BYTES)) == ACK_BYTES:
            key, version = int.from_bytes(ack[1:3], "big"), int.from_bytes(ack[3:], "big")
            begun = (key, version)
            if ack[:1] == b"!":
                versions[key] = version
                patience -= 1
            if patience == 0:
                os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the writer failed: status {status}"
    assert os.WTERMSIG(status) == signal.SIGKILL
    return begun


def check(folder: Path, versions: list[int], begun: tuple[int, int]) -> Counter[str]:
    """Open the folder as after a crash and compare it with what was acknowledged."""
    tier = DiskTier(folder, max_bytes=MAX_BYTES)
    assert tier.num_bytes <= MAX_BYTES
    assert tier.counters["damaged"] <= 1  # the torn end of the journal
    metas = {stored.key: stored.meta for stored in tier.items()}
    for key in range(NUM_KEYS):
        allowed = {versions[key]} | ({begun[1]} if begun[0] == key else set[int]())
        found = tier.read(name_of(key))
        version = int(metas[name_of(key)][1:]) if found is not None else 0
        assert version in allowed, f"key {key}: version {version}, allowed {allowed}"
        assert found is None or found == payload_of(key, version)
        versions[key] = version
    seen = Counter(torn=tier.counters["damaged"], kept=sum(map(bool, versions)))
    tier.close()
    return seen


def main() -> None:
    folder, seed, trials = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    versions, total = [0] * NUM_KEYS, Counter[str]()
    for trial in range(trials):
        source = random.Random(seed * 1_000_003 + trial)
        begun = run_and_kill(folder, source, versions)
        total += check(folder, versions, begun)
    print(f"trials={trials} torn={total['torn']} kept={total['kept']}")


if __name__ == "__main__":
    main()
