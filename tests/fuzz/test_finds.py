"""What fuzzing has found, one test each."""

import json
import struct
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from deepmesh.config import ConfigError, load_config
from deepmesh.grammar_judge import judge
from deepmesh.grammars import Kind, make_grammar
from deepmesh.wire import messages as m
from deepmesh.wire.keys import KeysError, read_key_file
from services.executor.checkpoint import CheckpointError, read_headers
from services.executor.model_config import ModelConfigError
from services.executor.model_config import load_config as load_model_config
from services.gateway.step_metrics import buckets
from services.kvstore import journal
from services.kvstore.blocks import BlockTiers
from services.kvstore.disk import DiskTier, crc32
from services.kvstore.memory import MemoryTier
from services.kvstore.records import RecordBook, RecordKey
from services.kvstore.redis_tier import RedisTier
from services.kvstore.shared_asks import SharedError
from services.kvstore.tier import Stored
from services.scheduler.epochs import EpochLog
from services.tokenizer.refusal import Refusal
from services.tokenizer.service import prepare
from tests.core.driver import EXECUTOR, TOKENIZER, Driver
from tests.fuzz.services import MODEL, _preparer
from tests.wire.examples import RID

IDS = b"\x05\x00\x00\x00"


def _rules(count: int) -> str:
    lines = [f"x{i}: x{i + 1}" for i in range(count)]
    return "\n".join(["start: x0", *lines, f'x{count}: "a"', ""])


def _references(count: int) -> str:
    parts = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": {**parts, f"a{count}": True}})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"const": -(2**63)})),
        ("json_schema", json.dumps({"enum": ["x", -(2**63)]})),
        ("lark", f'start: %json {{"const": {-(2**63)}}}\n'),
        ("lark", _rules(30_000)),
        ("json_schema", _references(1400)),
    ],
    ids=["const", "enum", "json in lark", "rules", "references"],
)
def test_a_grammar_that_ends_its_engine_ends_no_tokenizer(kind: Kind, text: str) -> None:
    assert "overruns" in judge(make_grammar(kind, text))
    assert judge(make_grammar("regex", f"a|{hash(text)}".replace("-", ""))) == ""


def test_a_client_is_told_so_by_its_field() -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}
    shape = {"name": "n", "schema": {"const": -(2**63)}}
    body["response_format"] = {"type": "json_schema", "json_schema": shape}  # type: ignore[assignment]
    found = prepare(_preparer(), m.Submit(RID, "chat", json.dumps(body).encode(), 5), 512)
    assert isinstance(found, Refusal)
    assert found.code is m.ErrorCode.INVALID
    assert found.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("field", ["logit_bias", "model"])
def test_a_refusal_neither_fails_nor_repeats_a_huge_field(field: str) -> None:
    body: dict[str, object] = {"model": "tiny", "prompt": "x"}
    body[field] = {"9" * 5000: 1} if field == "logit_bias" else "m" * 100_000
    found = prepare(_preparer(), m.Submit(RID, "completions", json.dumps(body).encode(), 5), 512)
    assert isinstance(found, Refusal)
    assert found.code is not m.ErrorCode.INTERNAL
    assert len(found.detail) < 4096
    assert len(found.param) < 512


def test_counts_of_more_or_fewer_bins_than_ours_are_shown() -> None:
    assert buckets((1.0, 2.0), [3]) == [("1.0", 3), ("2.0", 3), ("+Inf", 3)]
    assert buckets((1.0,), [3, 1, 1, 5]) == [("1.0", 3), ("+Inf", 10)]


def test_a_scheduler_takes_no_half_ids_and_no_endless_position() -> None:
    driver = Driver()
    driver.mail(m.Generate(RID, 1, TOKENIZER, IDS * 20, 20, max_tokens=8))
    driver.mail(m.Ack([m.AckRow(RID, 2**63 - 1)]))
    driver.mail(m.PrefillFor(15, b"other", 2, IDS * 20 + b"\x00", 10.0), "scheduler-1")
    driver.mail(replace(driver.capacity, engine_epoch=0), EXECUTOR)  # a late one: nothing happens
    refusals = [send for send in driver.sent if isinstance(send.message, m.HandOffRefused)]
    assert len(refusals) == 1


def test_records_that_are_none_of_ours_are_dropped(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, max_bytes=1 << 20)
    disk.write(Stored(b"\x07", b"m", 2, crc32(b"{}")), b"{}")
    book = RecordBook(1 << 16, disk)
    book.load(1.0)
    assert len(book) == 0
    assert list(disk.items()) == []
    book.put(RecordKey("response", "a", "me"), b"{}", 5.0, 1.0)
    disk.close()


@pytest.mark.parametrize("found", [5, "text", [b"x"], None])
def test_a_redis_that_answers_otherwise_is_a_miss(found: object) -> None:
    tier = RedisTier("redis://127.0.0.1:1", prefix="p", max_bytes=1, record_bytes=1, ttl_s=1.0)
    tier._do = lambda order: found  # pyright: ignore[reportAttributeAccessIssue]
    try:
        assert tier.get_record(b"m") is None
    except SharedError as error:
        assert type(found).__name__ in str(error)  # noqa: PT017 - either will do


def test_text_files_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_bytes(b"[mesh]\nname = '\xff'\n")
    with pytest.raises(ConfigError, match="utf-8"):
        load_config(path)
    (tmp_path / "gateway").mkdir()
    keys = tmp_path / "gateway" / "keys.toml"
    keys.write_bytes(b"secret = '\xff'\n")
    keys.chmod(0o600)
    with pytest.raises(KeysError, match="UTF-8"):
        read_key_file(tmp_path, "gateway")


def test_no_field_of_a_configuration_has_a_nul(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    for line, field in (
        ('keys = "a\\u0000"', "links.keys"),
        ('bind = "\\u0000"', "links.bind"),
    ):
        path.write_text(f"[links]\n{line}\n")
        with pytest.raises(ConfigError, match=field):
            load_config(path)


def test_a_key_in_the_wrong_place_is_not_said(tmp_path: Path) -> None:
    key = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
    keys = tmp_path / "gateway" / "keys.toml"
    keys.parent.mkdir()
    for text, said in (
        (f'service = "{key}"\nsecret = "{key}"\n[public]\ngateway = ["{key}"]\n', r"\$\.service"),
        (f'service = "gateway"\nsecret = "{key}"\n[public]\n["{key}"]\n', "unknown field"),
        (
            f'service = "gateway"\n[public]\ngateway = ["{key}"]\n',
            "missing required field `secret`",
        ),
    ):
        keys.write_text(text)
        keys.chmod(0o600)
        with pytest.raises(KeysError, match=said) as found:
            read_key_file(tmp_path, "gateway")
        assert key not in str(found.value)
        assert found.value.__cause__ is None, "a traceback would say it"


def test_blocks_without_a_whole_name_are_dropped(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, max_bytes=1 << 20)
    for key in (b"", b"\x00", b"k" * 30):
        disk.write(Stored(key, b"\x91\x92\x00\x02", 2, crc32(b"{}")), b"{}")
    tiers = BlockTiers(MemoryTier(None, 1 << 16), disk)
    assert not tiers.store.entries
    assert list(disk.items()) == []
    disk.close()


@pytest.mark.parametrize("wrong", [(2**64 - 1, 0, 2), (-1, 0, 2), (1, -5, 2), (1, 0, -1)], ids=str)
def test_a_journal_of_impossible_numbers_stops_no_store(
    tmp_path: Path, wrong: tuple[int, int, int]
) -> None:
    disk = DiskTier(tmp_path, max_bytes=1 << 20)
    disk.write(Stored(b"good", b"m", 2, crc32(b"{}")), b"{}")
    disk.close()
    with (tmp_path / journal.NAME).open("ab") as file:
        file.write(journal.pack(journal.Added(b"bad", b"m", *wrong, 7)))
    disk = DiskTier(tmp_path, max_bytes=1 << 20)
    disk.write(Stored(b"new", b"m", 2, crc32(b"{}")), b"{}")
    assert [disk.read(key) for key in (b"good", b"bad", b"new")] == [b"{}", None, b"{}"]
    disk.close()


@pytest.mark.parametrize("noted", ["22222222222222222222", str(2**32), "-5", "x", ""])
def test_a_damaged_log_of_epochs_counts_as_lost(tmp_path: Path, noted: str) -> None:
    (tmp_path / "s").write_text(noted)
    assert EpochLog(tmp_path, "s", 1_700_000_000).first == 1_700_000_000


@pytest.mark.parametrize("name", ["../a.safetensors", "/etc/passwd", "..", "a/b", "", "x" * 300, 5])
def test_an_index_leads_to_no_file_elsewhere(tmp_path: Path, name: object) -> None:
    index = {"weight_map": {"a": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="no file of this folder"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"\xff\xfe",
        b'{"a": 5}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_header_that_is_none_is_said_to_be_none(tmp_path: Path, header: bytes) -> None:
    text = struct.pack("<Q", len(header)) + header + bytes(8)
    (tmp_path / "m.safetensors").write_bytes(text)
    with pytest.raises(CheckpointError, match="header"):
        read_headers(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engram_vocab_size", 2**60),
        ("engram_n_heads", 10**6),
        ("num_nextn_predict_layers", 2**39),
        ("text_config", 5),
        ("vocab_size", 1e300),
    ],
)
def test_numbers_of_a_config_that_would_take_for_ever_are_refused(
    tmp_path: Path, key: str, value: object
) -> None:
    raw = msgspec.json.decode((MODEL / "config.json").read_bytes())
    if key != "text_config":
        key, value = "text_config", {**raw["text_config"], key: value}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({**raw, key: value}))
    with pytest.raises(ModelConfigError):
        load_model_config(tmp_path)
