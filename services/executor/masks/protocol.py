"""What an executor and its mask worker say to each other, over the socket that joins them.

Masks themselves lie in memory that both map: row `slot` holds the newest one of that slot, and
row `slot + place * num_slots` that behind so many drafts. A tag (slot, serial, position) says
which: `serial` counts the constraints that an executor has opened, so neither a request that left
its slot nor one that was opened anew is mistaken for another.
"""

import socket
import struct
from collections.abc import Sequence
from enum import IntEnum

import msgspec
import numpy as np

from deepmesh.wire.messages import Grammar, Ids

_LENGTH = struct.Struct("<I")
_CHUNK = 1 << 16


class MaskState(IntEnum):
    """What there is for the token at a position."""

    MISSING = 0  # nothing yet
    MASK = 1  # the slot's row of the shared memory
    FREE = 2  # no constraint holds there: any token
    COMPLETE = 3  # the output is whole as it is: nothing may follow
    BROKEN = 4  # the grammar, or what was sampled, is of no use: the request fails


TOKEN = np.dtype([("slot", "<u4"), ("serial", "<u4"), ("position", "<u4"), ("token", "<i4")])
TAG = np.dtype([("slot", "<u4"), ("serial", "<u4"), ("position", "<u4")])
# `num`: 0 while drafts behind the position are not known or not walked; else masks of so many
# places, from the position on, each behind drafts that the masks before it allow
ANSWER = np.dtype(
    [("slot", "<u4"), ("serial", "<u4"), ("position", "<u4"), ("state", "<u4"), ("num", "<u4")]
)


class Part(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of the messages."""


class Open(Part, frozen=True):
    """executor -> worker: a request's output has to keep to a grammar from here on."""

    slot: int
    serial: int
    grammar: Grammar
    output: Ids  # all of its output so far: the matcher replays it
    position: int  # of the next token
    min_len: int  # no stop id at a position below
    stop_ids: Ids


class Advance(Part, frozen=True):
    """executor -> worker: tokens that were sampled."""

    tokens: bytes  # TOKEN
    is_urgent: bool = False  # the device waits for what there is behind them


class Drafts(Part, frozen=True):
    """executor -> worker: tokens that may follow; masks for the places behind them, too."""

    tags: bytes  # TAG: position of the first draft of each row
    ids: Ids  # equally many of each row


class Close(Part, frozen=True):
    """executor -> worker: these constraints are over."""

    serials: bytes  # uint32


class Ready(Part, frozen=True):
    """worker -> executor: the vocabulary is loaded."""

    pid: int


class Answers(Part, frozen=True):
    """worker -> executor: what there is for the positions behind the tokens known to it."""

    rows: bytes  # ANSWER


class Compile(Part, frozen=True):
    """executor -> worker, over the socket for orders: have this ready before its request comes."""

    engine_epoch: int
    order: int
    grammar: Grammar


class Compiled(Part, frozen=True):
    """worker -> executor, over the socket for orders: it is ready, or never will be."""

    engine_epoch: int
    order: int


class Opened(Part, frozen=True):
    """worker -> executor: a grammar is compiled, or cannot be."""

    serial: int
    begin_ns: int
    end_ns: int
    from_cache: bool
    problem: str = ""


Message = Open | Advance | Drafts | Close | Ready | Answers | Opened | Compile | Compiled


class Frames:
    """One end of the socket: whole messages out of a stream of bytes."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._data = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def send(self, messages: Sequence[Message]) -> None:
        """All of them in one go; blocks as the socket does."""
        parts: list[bytes] = []
        for message in messages:
            data = msgspec.msgpack.encode(message)
            parts += (_LENGTH.pack(len(data)), data)
        self._end.sendall(b"".join(parts))

    def receive(self) -> list[Message]:
        """What one read brings.

        Raises:
            EOFError: the other end is gone.
            BlockingIOError: nothing is there, and the socket does not wait.
        """
        try:
            data = self._end.recv(_CHUNK)
        except ConnectionResetError as error:
            raise EOFError from error
        if not data:
            raise EOFError
        self._data += data
        messages: list[Message] = []
        start = 0
        while len(self._data) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data, start)
            end = start + _LENGTH.size + length
            if len(self._data) < end:
                break
            messages.append(self._decoder.decode(self._data[start + _LENGTH.size : end]))
            start = end
        del self._data[:start]
        return messages
