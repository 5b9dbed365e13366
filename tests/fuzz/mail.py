"""Damaged messages that a decoder lets through: of a peer with a fault, or of a thief."""

import contextlib
from collections.abc import Sequence

import msgpack
import msgspec

from deepmesh.wire import codec
from deepmesh.wire.link import Mail, Peer
from deepmesh.wire.messages import AnyMessage, Drain
from tests.fuzz.source import Source
from tests.fuzz.trees import damaged

HEADER = codec.encode(Drain(), seq=1, sent_ns=1)[0]


def frames_of(message: AnyMessage, source: Source) -> list[bytes]:
    """As they come off a socket, damaged."""
    tree = msgpack.unpackb(codec.encode(message, seq=0, sent_ns=0)[1], strict_map_key=False)
    broken = damaged(tree, source, first=1 if source.below(8) else 0)
    return [HEADER, msgspec.msgpack.encode(broken)]


def messages(known: Sequence[AnyMessage], source: Source, most: int = 6) -> list[AnyMessage]:
    """Some of them, in any order, many damaged; those that a decoder refuses are left out."""
    found: list[AnyMessage] = []
    for _ in range(most):
        message = source.pick(known)
        if source.below(4) == 0:
            found.append(message)
            continue
        with contextlib.suppress(codec.WireError):
            found.append(codec.decode(frames_of(message, source)).message)
        if source.is_over:
            break
    return found


def mail(peer: Peer, message: AnyMessage, attachments: Sequence[bytes] = ()) -> Mail:
    """As a link gives it to a service."""
    return Mail(peer, message, list(attachments), 1, 2)
