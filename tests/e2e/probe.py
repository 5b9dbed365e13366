"""A link to a service of a running mesh that only listens to its heartbeats."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from deepmesh.config import LinksConfig
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.link import Peer
from deepmesh.wire.sockets import Dialer, Identity


class Probe:
    """Sees which instance of a service is there, and whether it says that it is ready."""

    def __init__(self, address: str, service: str, links: LinksConfig) -> None:
        """`service`: what to dial in as; the listener must expect such a peer."""
        self._dialer = Dialer(address, Identity.new(service, f"{service}-probe"), links)
        self._inbox = Inbox(self._dialer)

    def wait(self, holds: Callable[[Peer], bool], timeout_s: float = 120) -> Peer:
        """Block until the peer is there and `holds` says yes to it."""
        deadline = time.monotonic() + timeout_s
        while (peer := self._dialer.peer) is None or not holds(peer):
            left = deadline - time.monotonic()
            assert left > 0, f"{self._dialer.address}: {peer and peer.stats}"
            self._inbox.wait(min(left, 0.1))
        return peer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inbox.close()
