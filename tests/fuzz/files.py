"""Files and records that a crash, a full disk or a stranger may have left: read, or refused."""

import contextlib
import json
import shutil
import struct
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from deepmesh.config import ConfigError, load_config
from deepmesh.run_dir import dump_toml
from deepmesh.wire.keys import KeysError, read_key_file
from deepmesh.wire.messages import Pool
from services.executor.checkpoint import CheckpointError, read_headers
from services.executor.model_config import ModelConfigError
from services.executor.model_config import load_config as load_model_config
from services.kvstore import journal
from services.kvstore.blocks import BlockTiers
from services.kvstore.disk import DiskTier
from services.kvstore.memory import MemoryTier
from services.kvstore.records import RecordBook, RecordKey
from services.kvstore.redis_tier import RedisTier
from services.kvstore.shared_asks import Damaged, SharedError, SharedRecord
from services.kvstore.tier import Stored
from services.scheduler.draft_costs import DraftCosts
from services.scheduler.epochs import EpochLog
from tests.fuzz.services import MODEL, _config, _folder
from tests.fuzz.source import Source
from tests.fuzz.trees import damaged

ROOT = Path(__file__).parents[2]


def _fresh(name: str) -> Path:
    folder = _folder() / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _spoilt(text: bytes, source: Source) -> bytes:
    """Cut, overwritten or lengthened in a few places."""
    found = bytearray(text)
    for _ in range(1 + source.below(6)):
        at = source.below(len(found) + 1)
        match source.below(4):
            case 0:
                del found[at:]
            case 1:
                found[at : at + 1] = source.take(1)
            case 2:
                found[at:at] = source.take(1 + source.below(12))
            case _:
                del found[at : at + 1 + source.below(16)]
    return bytes(found)


@cache
def _journals() -> tuple[bytes, bytes, bytes]:
    """Journal and segment of a store of blocks, and the journal of one of records."""
    folder = _fresh("seed")
    disk = DiskTier(folder / "b", max_bytes=1 << 20)
    tiers = BlockTiers(MemoryTier(None, 1 << 16), disk)
    for number in range(3):
        key = number.to_bytes(16, "big") + b"\x00"
        tiers.put(key, [(Pool.GLOBAL, 64)], journal.crc32(bytes(64)), bytes(64))
    disk.close()
    records = DiskTier(folder / "r", max_bytes=1 << 20)
    book = RecordBook(1 << 16, records)
    for number in range(3):
        book.put(RecordKey("response", f"r{number}", "me"), b"{}", 1e6, 1.0)
    records.close()
    (segment,) = (folder / "b").glob("*.segment")
    return (
        (folder / "b" / journal.NAME).read_bytes(),
        segment.read_bytes(),
        (folder / "r" / journal.NAME).read_bytes(),
    )


def kvstore_disk(data: bytes) -> None:
    """A journal and a segment in any state: what is found can be read, or is dropped."""
    source, (blocks, segment, records) = Source(data), _journals()
    folder, is_records = _fresh("disk"), source.below(2)
    text = records if is_records else blocks
    if source.below(3) == 0:  # whole records of nonsense, whose checksums are right
        tree = msgspec.msgpack.decode(msgspec.msgpack.encode(_added()))
        body = msgspec.msgpack.encode(damaged(tree, source))
        text += msgspec.msgpack.encode((journal.MARK, journal.crc32(body), body))
    else:
        text = _spoilt(text, source)
    (folder / journal.NAME).write_bytes(text)
    (folder / f"{1:012x}.segment").write_bytes(_spoilt(segment, source))
    disk = DiskTier(folder, max_bytes=1 << 20)
    try:
        if is_records:
            book = RecordBook(1 << 16, disk)
            book.load(2.0)
            book.put(RecordKey("response", "new", "me"), b"{}", 1e6, 3.0)
        else:
            tiers = BlockTiers(MemoryTier(None, 1 << 16), disk)
            for key in list(tiers.store.entries):
                tiers.get(key, mapped=False)
        for stored in disk.items():
            disk.read(stored.key)
    finally:
        disk.close()


def _added() -> journal.Added:
    return journal.Added(bytes(16) + b"\x00", b"\x91\x92\x00\x40", 1, 0, 64, 7)


def redis_values(data: bytes) -> None:
    """Values of blocks and records under our names in a Redis that others write, too."""
    source = Source(data)
    tier = RedisTier("redis://127.0.0.1:1", prefix="p", max_bytes=1, record_bytes=1, ttl_s=1.0)
    tree: Any = source.pick(
        ([1, [[0, 4]], 3, b"1234"], [1, ["response", "id", "me"], 9.5, 3, b"data"], b"", "x", 7)
    )
    raw = msgspec.msgpack.encode(damaged(tree, source))
    raw = _spoilt(raw, source) if source.below(3) == 0 else raw
    found: object = raw if source.below(8) else source.pick((None, 5, "text", [raw], True))
    tier._drop = lambda room, member: True  # pyright: ignore[reportAttributeAccessIssue]
    tier._do = lambda order: found  # pyright: ignore[reportAttributeAccessIssue]
    key = bytes(16) + b"\x00"
    try:
        tier._checked(key, found)
        record = tier.get_record(b"m")
        assert record is None or isinstance(record, SharedRecord)
    except (SharedError, Damaged):
        return


def mesh_toml(data: bytes) -> None:
    """A configuration in any state names what is wrong with it."""
    source, path = Source(data), _folder() / "mesh.toml"
    text = (ROOT / "mesh.example.toml").read_text()
    if source.below(2):
        tree = damaged(tomllib.loads(text), source)
        config = msgspec.convert({}, type(_config()))
        try:
            config = msgspec.convert(tree, type(_config()))
            path.write_text(dump_toml(config))
        except (msgspec.ValidationError, ConfigError, UnicodeEncodeError):
            return
    else:
        path.write_bytes(_spoilt(text.encode(), source))
    with contextlib.suppress(ConfigError):
        load_config(path)


def key_file(data: bytes) -> None:
    """keys.toml in any state."""
    source, folder = Source(data), _folder() / "keys"
    (folder / "gateway").mkdir(parents=True, exist_ok=True)
    path = folder / "gateway" / "keys.toml"
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    text = f'service = "gateway"\nsecret = "{key}"\n[public]\ngateway = ["{key}"]\n'
    path.write_bytes(_spoilt(text.encode(), source))
    path.chmod(0o600)
    said = ""
    try:
        read_key_file(folder, "gateway")
    except KeysError as error:
        said = str(error)
    assert key not in said, "a secret in an error message"


def checkpoint(data: bytes) -> None:
    """Headers, index and config.json of a checkpoint that somebody else has made."""
    source, folder = Source(data), _fresh("model")
    header: Any = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }
    index: Any = {"weight_map": {"a": "m.safetensors", "b": "m.safetensors"}}
    which = source.below(4)
    text = _json(damaged(header, source) if which == 0 else header)
    text = _spoilt(text, source) if which == 1 else text
    length = source.pick((len(text), 2**63, 2**64 - 1, 0)) if which == 2 else len(text)
    (folder / "m.safetensors").write_bytes(struct.pack("<Q", length) + text + bytes(24))
    if which == 3:
        (folder / "model.safetensors.index.json").write_bytes(_json(damaged(index, source)))
    with contextlib.suppress(CheckpointError):
        found = read_headers(folder)
        for tensor in found.values():
            assert tensor.file.parent == folder, "a path out of the folder"
            assert all(type(size) is int and size >= 0 for size in tensor.shape)
    raw = damaged(json.loads((MODEL / "config.json").read_bytes()), source)
    (folder / "config.json").write_bytes(_json(raw))
    with contextlib.suppress(ModelConfigError):
        load_model_config(folder)


def _json(value: object) -> bytes:
    return json.dumps(value, default=str).encode()


def run_files(data: bytes) -> None:
    """What a scheduler kept in the run folder: damaged, it starts all the same."""
    source, folder = Source(data), _fresh("run")
    costs = b'{"engine":{"at_s":5.0,"learned":[1.0,2.0,3.0]}}'
    (folder / "s").write_bytes(source.take(source.below(24)))
    (folder / "c").write_bytes(_spoilt(costs, source))
    log = EpochLog(folder, "s", 1_700_000_000)
    log.note(log.first + 1)
    DraftCosts(folder, "c", ttl_s=60.0, clock=lambda: 6.0).learned()


def stored_on_disk(data: bytes) -> None:
    """Payloads of any size and key in and out of a disk tier."""
    source, folder = Source(data), _fresh("io")
    disk = DiskTier(folder, max_bytes=1 << 18)
    try:
        for _ in range(8):
            key, payload = source.take(1 + source.below(20)), source.take(source.below(64))
            disk.write(Stored(key, b"m", len(payload), journal.crc32(payload)), payload)
            assert disk.read(key) == payload
            if source.below(2):
                disk.drop(key)
                assert disk.read(key) is None
    finally:
        disk.close()
