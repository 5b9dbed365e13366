"""Records over real links: owners, time to live by a clock of the test, restarts."""

from pathlib import Path

from deepmesh.wire.messages import DropRecord, GetRecord, KvStatus, PutRecord, Record
from tests.services.kvstore_harness import Client, make_config, running

NAME = ("response", "resp_1")


class Clock:
    """Wall time that moves only when told."""

    def __init__(self) -> None:
        self.now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


def tokenizer(config: object) -> Client:
    return Client(config, "tokenizer-0", "tokenizer")  # pyright: ignore[reportArgumentType]


def test_a_record_is_kept_for_its_owner_until_its_time_is_over(tmp_path: Path) -> None:
    config, clock = make_config(tmp_path), Clock()
    with running(config, clock), tokenizer(config) as client:
        put = PutRecord(1, *NAME, "me", b"text", 60.0)
        assert client.ask(put, Record) == Record(1, KvStatus.OK, *NAME, "me", b"", 60.0)
        clock.now_s += 45.0
        got = client.ask(GetRecord(2, *NAME, "me"), Record)
        assert got == Record(2, KvStatus.OK, *NAME, "me", b"text", 15.0)
        assert client.ask(GetRecord(3, *NAME, "you"), Record).status is KvStatus.MISS
        assert client.ask(DropRecord(4, *NAME, "you"), Record).status is KvStatus.MISS
        clock.now_s += 15.0
        assert client.ask(GetRecord(5, *NAME, "me"), Record).status is KvStatus.MISS
        assert client.stats()["records"] == 0


def test_records_outlive_a_restart_with_what_is_left_of_their_time(tmp_path: Path) -> None:
    config, clock = make_config(tmp_path, disk_bytes=16 << 20), Clock()
    with running(config, clock), tokenizer(config) as client:
        for id_, ttl_s in (("a", 60.0), ("b", 60.0), ("c", 10.0)):
            client.ask(PutRecord(1, "batch", id_, "me", id_.encode(), ttl_s), Record)
        assert client.ask(DropRecord(2, "batch", "b", "me"), Record).status is KvStatus.OK
    clock.now_s += 20.0
    with running(config, clock), tokenizer(config) as client:
        got = client.ask(GetRecord(3, "batch", "a", "me"), Record)
        assert (got.status, got.data, got.ttl_s) == (KvStatus.OK, b"a", 40.0)
        for id_ in "bc":
            got = client.ask(GetRecord(4, "batch", id_, "me"), Record)
            assert got.status is KvStatus.MISS
        assert client.stats()["records"] == 1


def test_refusals_say_why_and_keep_what_was_there(tmp_path: Path) -> None:
    config = make_config(tmp_path, record_bytes=1 << 16)
    with running(config, Clock()), tokenizer(config) as client:
        assert client.ask(PutRecord(1, *NAME, "me", b"old", 60.0), Record).status is KvStatus.OK
        large = client.ask(PutRecord(2, *NAME, "me", b"x" * 10_000, 60.0), Record)
        assert (large.status, "a record may have 8192" in large.detail) == (KvStatus.INVALID, True)
        never = client.ask(PutRecord(3, *NAME, "me", b"x", 0.0), Record)
        assert (never.status, "ttl_s" in never.detail) == (KvStatus.INVALID, True)
        for number in range(9):
            order = PutRecord(4, "batch", str(number), "me", b"x" * 7000, 60.0)
            full = client.ask(order, Record)
        assert (full.status, "kvstore.record_bytes" in full.detail) == (KvStatus.FULL, True)
        assert client.ask(GetRecord(5, *NAME, "me"), Record).data == b"old"
