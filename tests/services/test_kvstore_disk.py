"""The disk tier: nothing acknowledged is lost to a kill, nothing wrong is ever read."""

import contextlib
import errno
import itertools
import os
import random
import re
import subprocess
import sys
import zlib
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvstore.disk import DiskTier, joined
from services.kvstore.files import InUse
from services.kvstore.journal import NAME, Added, Journal, Record, Removed, Replay, pack
from services.kvstore.tier import Stored, TierError

ROOT = Path(__file__).parents[2]
MAX_BYTES = 1 << 20
NUM = 40


def payload_of(number: int) -> bytes:
    source = random.Random(number)
    return source.randbytes(source.randrange(1, 3000))


def put(tier: DiskTier, number: int, payload: bytes | None = None) -> None:
    payload = payload_of(number) if payload is None else payload
    key = b"key-%d" % number
    tier.write(Stored(key, b"meta-%d" % number, len(payload), zlib.crc32(payload)), payload)


def fill(folder: Path) -> None:
    """Forty payloads, every fourth dropped again."""
    tier = DiskTier(folder, max_bytes=MAX_BYTES)
    for number in range(NUM):
        put(tier, number)
    for number in range(0, NUM, 4):
        tier.drop(b"key-%d" % number)
    tier.close()


def read_all(folder: Path) -> dict[int, bytes | None]:
    tier = DiskTier(folder, max_bytes=MAX_BYTES)
    found = {number: tier.read(b"key-%d" % number) for number in range(NUM)}
    tier.close()
    return found


def count_misses(found: dict[int, bytes | None]) -> int:
    """Payloads that are not there; none may be wrong."""
    for number, payload in found.items():
        assert payload is None or payload == payload_of(number)
    return sum(found[number] is None for number in range(NUM) if number % 4)


@pytest.mark.parametrize("seed", [1, 2])
def test_a_kill_at_any_write_loses_nothing_acknowledged(tmp_path: Path, seed: int) -> None:
    module = "tests.services.kvstore_crash"
    run = subprocess.run(
        [sys.executable, "-m", module, str(tmp_path / "tier"), str(seed), "100"],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
    )
    assert run.returncode == 0, run.stderr
    found = re.fullmatch(r"trials=100 torn=(\d+) kept=(\d+)\n", run.stdout)
    assert found is not None, run.stdout
    assert int(found[1]) > 3, "hardly a kill has hit the journal: the trial proves little"
    assert int(found[2]) > 1000


def test_what_was_kept_is_there_after_a_restart(tmp_path: Path) -> None:
    fill(tmp_path)
    found = read_all(tmp_path)
    assert count_misses(found) == 0
    assert all(found[number] is None for number in range(0, NUM, 4))
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    assert [s.meta for s in tier.items()] == [b"meta-%d" % n for n in range(NUM) if n % 4]
    assert tier.counters["damaged"] == 0
    tier.close()


@settings(max_examples=60, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_a_segment_is_one_miss_at_most(
    where: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tier")
    fill(folder)
    flip(next(folder.glob("*.segment")), where, bit)
    assert count_misses(read_all(folder)) <= 1
    assert count_misses(read_all(folder)) <= 1


@settings(max_examples=120, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_in_the_journal_is_one_miss_at_most(
    where: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tier")
    fill(folder)
    flip(folder / NAME, where, bit)
    assert count_misses(read_all(folder)) <= 1
    assert count_misses(read_all(folder)) <= 1


@settings(max_examples=40, deadline=None)
@given(where=st.floats(0, 1), garbage=st.binary(max_size=40))
def test_a_journal_that_breaks_off_keeps_what_came_before(
    where: float, garbage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("tier")
    fill(folder)
    journal = folder / NAME
    whole = journal.read_bytes()
    ends = list(itertools.accumulate(len(pack(record)) for record in Replay(journal)))
    cut = int(where * len(whole))
    journal.write_bytes(whole[:cut] + garbage)
    kept = sum(1 for _ in Replay(journal))
    assert kept == sum(end <= cut for end in ends)
    found = read_all(folder)
    count_misses(found)
    tier = DiskTier(folder, max_bytes=MAX_BYTES)  # and new records can be read behind the cut
    put(tier, 1)
    tier.close()
    assert read_all(folder)[1] == payload_of(1)


def flip(path: Path, where: float, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    path.write_bytes(data)


def test_damage_is_counted_and_forgotten(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    put(tier, 1)
    flip(next(tmp_path.glob("*.segment")), 0.5, 3)
    assert tier.read(b"key-1") is None
    assert tier.counters["damaged"] == 1
    assert list(tier.items()) == []
    put(tier, 1)
    assert tier.read(b"key-1") == payload_of(1)
    tier.close()


def test_missing_and_foreign_files_do_no_harm(tmp_path: Path) -> None:
    fill(tmp_path)
    for path in tmp_path.glob("*.segment"):
        path.unlink()
    (tmp_path / "0000000000ff.segment").write_bytes(b"not ours")
    assert count_misses(read_all(tmp_path)) == NUM - NUM // 4
    assert not (tmp_path / "0000000000ff.segment").exists()
    fill(tmp_path)
    assert count_misses(read_all(tmp_path)) == 0


def test_the_files_keep_to_their_budget_while_all_that_lives_stays(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    source, live = random.Random(3), dict[int, bytes]()
    room = tier.max_live_bytes
    for step in range(1500):
        number = source.randrange(300)
        payload = source.randbytes(source.randrange(1, 9000))
        while sum(len(p) + tier.item_overhead for p in live.values()) + len(payload) > room - 600:
            victim = source.choice(sorted(live))
            tier.drop(b"key-%d" % victim)
            del live[victim]
        put(tier, number, payload)
        live[number] = payload
        if step % 100 == 0:
            on_disk = sum(path.stat().st_size for path in tmp_path.iterdir())
            assert on_disk <= MAX_BYTES
    assert tier.counters["compactions"] > 3
    assert all(tier.read(b"key-%d" % number) == payload for number, payload in live.items())
    tier.close()
    again = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    assert {s.key for s in again.items()} == {b"key-%d" % number for number in live}
    assert all(again.read(b"key-%d" % number) == payload for number, payload in live.items())
    again.close()


class FullDisk:
    """Takes so many bytes, then none until `room` is raised; half a write may go through."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write_at(self, fd: int, data: bytes | memoryview, offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = os.pwrite(fd, data[: self.room], offset)
        self.room -= count
        return count


@pytest.mark.parametrize("room", [0, 10, 2990, 3000, 3010, 3050, 3100])
def test_a_full_disk_refuses_and_keeps_what_is_there(tmp_path: Path, room: int) -> None:
    disk = FullDisk(1 << 20)
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES, write_at=disk.write_at)
    put(tier, 1)
    disk.room = room
    for number in (2, 3):
        with contextlib.suppress(TierError):  # there may be room for the first
            put(tier, number, b"x" * 3000)
    with pytest.raises(TierError, match="No space left"):
        put(tier, 4, b"x" * 3000)
    disk.room = 1 << 20
    assert tier.read(b"key-1") == payload_of(1)
    put(tier, 9)
    tier.close()
    again = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    assert again.read(b"key-1") == payload_of(1)
    assert again.read(b"key-9") == payload_of(9)
    assert again.read(b"key-4") is None
    again.close()


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    with pytest.raises(InUse, match=re.escape(str(tmp_path))):
        DiskTier(tmp_path, max_bytes=MAX_BYTES)
    tier.close()
    DiskTier(tmp_path, max_bytes=MAX_BYTES).close()


def test_the_journal_is_a_stream_that_any_messagepack_library_reads(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    records: list[Record] = [Added(b"k", b"m", 1, 2, 3, 4), Removed(b"k")]
    for record in records:
        journal.append(record)
    journal.close()
    with (tmp_path / NAME).open("rb") as file:
        bodies = [body for _, _, body in msgpack.Unpacker(file)]
    assert [msgpack.unpackb(body) for body in bodies] == [
        ["a", b"k", b"m", 1, 2, 3, 4],
        ["r", b"k"],
    ]
    assert list(Replay(tmp_path / NAME)) == records


def test_a_journal_of_old_news_is_written_anew(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    for _ in range(3000):
        put(tier, 1, b"x")
    assert (tmp_path / NAME).stat().st_size < 80_000
    tier.close()
    again = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    assert again.read(b"key-1") == b"x"
    again.close()


def test_what_will_be_read_is_named_to_the_kernel_in_whole_runs(tmp_path: Path) -> None:
    places = [Added(b"", b"", 1, at, size, 0) for at, size in ((0, 10), (10, 5), (40, 2), (42, 8))]
    assert list(joined(places)) == [(0, 15), (40, 50)]
    assert list(joined([])) == []
    fill(tmp_path)
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    tier.expect([b"key-%d" % number for number in range(NUM)])  # every fourth is not there
    assert tier.read(b"key-1") == payload_of(1)
    for path in tmp_path.glob("*.segment"):
        path.unlink()
    tier.expect([b"key-1"])
    assert tier.read(b"key-1") is None
    tier.close()


def test_payloads_are_read_to_where_they_belong_and_damage_is_left_out(tmp_path: Path) -> None:
    """Across segments, in pieces of any size, the file's order or not; more than one call takes."""
    fill(tmp_path)
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    source, wanted = random.Random(3), [n for n in range(NUM) if n % 4]
    damaged = source.choice(wanted)
    source.shuffle(wanted)
    rooms = {number: bytearray(len(payload_of(number))) for number in wanted}
    places: dict[bytes, list[memoryview]] = {}
    for number, room in rooms.items():
        cuts = sorted({0, len(room), *(source.randrange(len(room)) for _ in range(20))})
        places[b"key-%d" % number] = [memoryview(room)[a:b] for a, b in itertools.pairwise(cuts)]
    places[b"nobody's"] = [memoryview(bytearray(3))]
    record = tier._index[b"key-%d" % damaged]
    with tier._segments[record.segment].path.open("r+b") as file:
        file.seek(record.offset)
        byte = file.read(1)[0]
        file.seek(record.offset)
        file.write(bytes([byte ^ 1]))
    assert tier.read_into(places) == {b"key-%d" % number for number in wanted if number != damaged}
    for number, room in rooms.items():
        assert (bytes(room) == payload_of(number)) == (number != damaged)
    assert tier.counters["damaged"] == 1
    assert tier.read(b"key-%d" % damaged) is None, "it is forgotten"
    tier.close()


def test_a_segment_that_lost_its_end_gives_what_is_left(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, max_bytes=MAX_BYTES)
    for number in range(3):
        put(tier, number)
    last = tier._index[b"key-2"]
    os.truncate(tier._segments[last.segment].path, last.offset + last.num_bytes - 1)
    rooms = {b"key-%d" % n: bytearray(len(payload_of(n))) for n in range(3)}
    found = tier.read_into({key: [memoryview(room)] for key, room in rooms.items()})
    assert found == {b"key-0", b"key-1"}
    tier.close()
