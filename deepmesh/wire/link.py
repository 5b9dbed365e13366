"""The state of one link as seen from one side: sequence numbers, heartbeats, outbox. No I/O."""

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from deepmesh import __version__
from deepmesh.config import Config
from deepmesh.wire import codec
from deepmesh.wire.clocks import MeshClock, ShortestWay, this_clock
from deepmesh.wire.keys import Keyring, load_keyring
from deepmesh.wire.messages import AnyMessage, Hello, ServiceStats, Welcome
from deepmesh.wire.process import Process


class Identity(NamedTuple):
    """Who this process is on all its links; a new incarnation at every start."""

    service: str
    name: str
    incarnation: bytes
    config_hash: str = ""
    keys: Keyring | None = None  # of tcp links; None: plain, on loopback only
    clock_id: bytes = b""  # see `clocks.this_clock`
    process: Process | None = None  # None, of a test: its links share nothing

    @classmethod
    def new(cls, service: str, name: str, config: Config | None = None) -> "Identity":
        """A fresh incarnation of `name`.

        Raises:
            KeysError: links.keys is set, and there are none for this service.
        """
        if config is None:
            return cls(service, name, os.urandom(8))
        process = Process(service, MeshClock(is_reference=name == "scheduler-0"))
        keys = load_keyring(config, service)
        return cls(service, name, os.urandom(8), config.digest(), keys, this_clock(), process)

    def hello(self) -> Hello:
        """First message of the dialling side."""
        return Hello(
            self.service,
            self.name,
            self.incarnation,
            build=__version__,
            config_hash=self.config_hash,
            clock=self.clock_id,
        )

    def welcome(self) -> Welcome:
        """Answer of the listening side."""
        return Welcome(
            self.service,
            self.name,
            self.incarnation,
            build=__version__,
            config_hash=self.config_hash,
            clock=self.clock_id,
        )


@dataclass(eq=False)
class Peer:
    """The other side of a link that is up."""

    service: str
    name: str
    key: str  # unique to this link; a restarted peer of the same name gets another
    incarnation: bytes
    build: str = ""
    stats: ServiceStats = field(default_factory=ServiceStats)
    has_other_clock: bool = False
    ahead_ns: int = 0  # its clock, of ours; known after the first heartbeats


@dataclass(frozen=True)
class PeerUp:
    """A link is ready for data."""

    peer: Peer


@dataclass(frozen=True)
class PeerDown:
    """A link is gone; what was sent and not answered may be lost."""

    peer: Peer
    reason: str


class Mail(NamedTuple):
    """One message from a peer."""

    peer: Peer
    message: AnyMessage
    attachments: list[bytes]
    sent_ns: int  # by our clock, as well as we know the peer's
    received_ns: int


LinkEvent = PeerUp | PeerDown | Mail


class Arrival(Enum):
    """What the sequence number of a frame says."""

    NEXT = 0
    DUPLICATE = 1
    GAP = 2


class Link:
    """Counters, timers and the outbox of one side of one link."""

    def __init__(self, *, now: float, max_outbox: int) -> None:
        self.peer: Peer | None = None
        self.outbox: deque[list[bytes]] = deque()
        self._max_outbox = max_outbox
        self._next_out = 0
        self._next_in = 0
        self.way = ShortestWay()  # of messages from a peer with another clock
        self.last_heard = now
        self.last_beat = now

    @property
    def num_sent(self) -> int:
        """Messages to the peer, hello included."""
        return self._next_out

    @property
    def num_received(self) -> int:
        """Messages from the peer."""
        return self._next_in

    def arrive(self, seq: int, now: float) -> Arrival:
        """Count a frame that came in."""
        self.last_heard = now
        if seq < self._next_in:
            return Arrival.DUPLICATE
        if seq > self._next_in:
            return Arrival.GAP
        self._next_in += 1
        return Arrival.NEXT

    def post(self, message: AnyMessage, attachments: Sequence[bytes] = ()) -> bool:
        """Number a message and queue it; False when the outbox is full (the link is beyond use)."""
        if len(self.outbox) >= self._max_outbox:
            return False
        frames = codec.encode(
            message, seq=self._next_out, sent_ns=time.time_ns(), attachments=attachments
        )
        self._next_out += 1
        self.outbox.append(frames)
        return True

    def restart_outgoing(self) -> None:
        """Begin numbering at 0 again: the other side has begun a new link."""
        self._next_out = 0
        self.outbox.clear()
