"""What goes on the wire: golden bytes, foreign decoders, refusals."""

import json
import typing
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from deepmesh.wire import codec, packed
from deepmesh.wire import messages as m
from tests.wire.examples import EXAMPLES

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "wire.json").read_text())
MESSAGES = {type(message).__name__: message for message in EXAMPLES}
HEADER = bytes.fromhex(GOLDEN["header"])


def test_every_message_has_an_example() -> None:
    assert set(MESSAGES) == {cls.__name__ for cls in typing.get_args(m.AnyMessage)}
    assert set(GOLDEN["messages"]) == set(MESSAGES)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_bytes_are_golden(name: str) -> None:
    frames = codec.encode(MESSAGES[name], seq=300, sent_ns=1_700_000_000_000_000_000)
    assert [frame.hex() for frame in frames] == [GOLDEN["header"], GOLDEN["messages"][name]]


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_golden_bytes_decode_to_the_message(name: str) -> None:
    decoded = codec.decode([HEADER, bytes.fromhex(GOLDEN["messages"][name]), b"attached"])
    assert decoded.message == MESSAGES[name]
    assert decoded.header == codec.Header(1, 300, 1_700_000_000_000_000_000)
    assert decoded.attachments == [b"attached"]


@pytest.mark.parametrize(("name", "older"), [(n, o) for n, o in GOLDEN["older"]])
def test_bytes_of_older_senders_decode_still(name: str, older: str) -> None:
    """They lack the fields appended since, and only those."""
    tag, *fields = msgpack.unpackb(bytes.fromhex(older))
    decoded = codec.decode([HEADER, bytes.fromhex(older)]).message
    assert tag == name == type(decoded).__name__
    assert len(fields) <= len(type(decoded).__struct_fields__)


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_a_foreign_decoder_reads_our_frames(name: str) -> None:
    tag, *fields = msgpack.unpackb(bytes.fromhex(GOLDEN["messages"][name]))
    assert tag == name
    assert len(fields) == len(type(MESSAGES[name]).__struct_fields__)
    assert msgpack.unpackb(HEADER) == [1, 300, 1_700_000_000_000_000_000]


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_unknown_trailing_fields_are_ignored(name: str) -> None:
    array = msgpack.unpackb(bytes.fromhex(GOLDEN["messages"][name]))
    longer = msgpack.packb([*array, {"later": 1}, 7])
    assert codec.decode([HEADER, longer]).message == MESSAGES[name]


def test_fields_that_an_older_sender_lacks_take_their_defaults() -> None:
    short = msgpack.packb(["Submit", b"r" * 16, "chat", b"{}", 5])
    assert codec.decode([HEADER, short]).message == m.Submit(b"r" * 16, "chat", b"{}", 5)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (["Elect", 1], codec.UnknownTag),
        (["Cancel"], codec.BadFrame),
        (["Cancel", 5], codec.BadFrame),
        ([], codec.BadFrame),
        ([1, 2], codec.BadFrame),
        ({"type": "Cancel"}, codec.BadFrame),
        ("Cancel", codec.BadFrame),
        (["ResponseFailed", b"r", 99, ""], codec.BadFrame),
    ],
)
def test_wrong_payloads_are_refused_by_kind(payload: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        codec.decode([HEADER, msgpack.packb(payload)])


def test_another_major_version_is_refused_by_name() -> None:
    header = msgpack.packb([2, 0, 0])
    with pytest.raises(codec.OtherVersion, match="protocol 2, this side speaks 1"):
        codec.decode([header, msgpack.packb(["Whatever", 1])])


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_frames_are_refused(count: int) -> None:
    with pytest.raises(codec.BadFrame):
        codec.decode([HEADER][:count])


@given(st.lists(st.binary(max_size=64), max_size=4))
@example([b"\x93\x01\x00\x00", b"\xc1"])
@example([b"\x93\x01\x00\x00", b"\xdd\xff\xff\xff\xff"])
@example([b"\x93\x01\x00\x00", b"\x92\xa2\xff\xfe\x00"])
def test_garbage_never_raises_anything_else(frames: list[bytes]) -> None:
    try:
        codec.decode(frames)
    except codec.WireError:
        return


@given(st.sampled_from(sorted(MESSAGES)), st.data())
def test_a_damaged_message_is_refused_or_well_formed(name: str, data: st.DataObject) -> None:
    payload = bytearray.fromhex(GOLDEN["messages"][name])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = codec.decode([HEADER, bytes(payload)]).message
    except codec.WireError:
        return
    frames = codec.encode(message, seq=0, sent_ns=0)  # bytes: a NaN is not equal to itself
    assert codec.encode(codec.decode(frames).message, seq=0, sent_ns=0) == frames


def test_messages_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        MESSAGES["Cancel"].rid = b""  # pyright: ignore


def test_packed_layouts_are_fixed() -> None:
    """A foreign service computes these offsets by hand: they must never move."""
    sizes = {name: getattr(packed, name).itemsize for name in GOLDEN["packed"]}
    offsets = {
        name: [int(getattr(packed, name).fields[f][1]) for f in getattr(packed, name).names]
        for name in GOLDEN["packed"]
    }
    assert {n: [sizes[n], offsets[n]] for n in sizes} == GOLDEN["packed"]


def test_ids_are_int32_little_endian() -> None:
    assert packed.pack_ids([1, 8191]) == b"\x01\x00\x00\x00\xff\x1f\x00\x00"
    assert packed.unpack_ids(packed.pack_ids(range(5))).tolist() == [0, 1, 2, 3, 4]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed.pack_ids([]))) == b""
