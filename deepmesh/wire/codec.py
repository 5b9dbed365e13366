"""Frames <-> messages: [header, payload, attachment...], each frame checked before use."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from deepmesh.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, AnyMessage, Struct


class Header(Struct, frozen=True):
    """First frame of every message."""

    major: int
    seq: int  # per link and direction, from 0 (the Hello or Welcome), without a gap
    sent_ns: int


class WireError(ValueError):
    """The frames are not a message that this version understands."""


class BadFrame(WireError):
    """Not MessagePack, not an array, too short, or a field of the wrong type."""


class UnknownTag(WireError):
    """A message class that this version does not know."""


class OtherVersion(WireError):
    """Another major version of the protocol."""


def version_problem(protocol: tuple[int, int]) -> str:
    """Why a peer that speaks this version gets no link; empty when it does.

    Fields are only ever appended, and unknown ones ignored: so builds one minor version apart work
    together, which is what an upgrade of one service after the other needs.
    """
    major, minor = protocol
    if major == PROTOCOL_MAJOR and abs(minor - PROTOCOL_MINOR) <= 1:
        return ""
    own = f"{PROTOCOL_MAJOR}.{PROTOCOL_MINOR}"
    return f"protocol {major}.{minor}, this side speaks {own}; upgrade one minor version at a time"


class Decoded(NamedTuple):
    """One message as it came off a link."""

    header: Header
    message: AnyMessage
    attachments: list[bytes]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(Header)
_message_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(
    message: AnyMessage, *, seq: int, sent_ns: int, attachments: Sequence[bytes] = ()
) -> list[bytes]:
    """The frames of one message."""
    header = _encoder.encode(Header(PROTOCOL_MAJOR, seq, sent_ns))
    return [header, _encoder.encode(message), *attachments]


def decode_header(frames: Sequence[bytes]) -> Header:
    """The header alone, so that a link can keep count even where the payload is unknown.

    Raises:
        BadFrame: fewer than two frames, or frame 0 is no header.
        OtherVersion: the sender speaks another major version.
    """
    if len(frames) < 2:
        raise BadFrame(f"{len(frames)} frames; a message has a header and a payload")
    try:
        header = _header_decoder.decode(frames[0])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"header: {error}") from error
    if header.major != PROTOCOL_MAJOR:
        raise OtherVersion(f"protocol {header.major}, this side speaks {PROTOCOL_MAJOR}")
    return header


def decode(frames: Sequence[bytes]) -> Decoded:
    """Check and decode the frames of one message.

    Raises:
        BadFrame, UnknownTag, OtherVersion: see there; never anything else.
    """
    return Decoded(decode_header(frames), decode_payload(frames), list(frames[2:]))


def decode_payload(frames: Sequence[bytes]) -> AnyMessage:
    """The message alone, of frames whose header has been decoded.

    Raises:
        BadFrame, UnknownTag: see there.
    """
    try:
        return _message_decoder.decode(frames[1])
    except msgspec.ValidationError as error:
        if "Invalid value" in str(error) and str(error).endswith("$[0]`"):
            raise UnknownTag(str(error)) from error
        raise BadFrame(f"payload: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadFrame(f"payload: {error}") from error
