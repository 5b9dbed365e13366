"""The links to the tokenizers: which are up, and which of them gets the next request."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from deepmesh.wire.link import Peer
from deepmesh.wire.messages import AnyMessage, Submit

_log = logging.getLogger(__name__)


class TokenizerLink(Protocol):
    """What is used of `wire.sockets.Dialer`."""

    @property
    def peer(self) -> Peer | None:
        """The tokenizer while the link is up."""
        ...

    def send(self, message: AnyMessage) -> bool:
        """Never blocks; False when the link is not up."""
        ...


class Tokenizers:
    """Places requests on tokenizers. A link is named by its peer's key, new after each loss."""

    def __init__(self, links: Sequence[TokenizerLink]) -> None:
        self._links = list(links)
        self.num_placed: Counter[str] = Counter()  # open requests of this gateway, by key

    def add(self, link: TokenizerLink) -> None:
        """One more was found."""
        self._links.append(link)

    def remove(self, link: TokenizerLink) -> None:
        """It is there no more; its link is down."""
        self._links.remove(link)

    @property
    def num_links(self) -> int:
        """Tokenizers that there should be: those of the configuration, or those found."""
        return len(self._links)

    @property
    def peers(self) -> list[Peer]:
        """Tokenizers whose link is up."""
        return [link.peer for link in self._links if link.peer is not None]

    @property
    def is_ready(self) -> bool:
        """Whether a tokenizer with a ready replica is linked."""
        return any(replica.ready for peer in self.peers for replica in peer.stats.replicas)

    @property
    def problem(self) -> str:
        """Why it is not ready, as far as that is known here."""
        up = (
            f"{len(self.peers)} of {self.num_links} tokenizers are linked, none has a ready replica"
        )
        refused = {r.refused for peer in self.peers for r in peer.stats.replicas if r.refused}
        return "; ".join([up, *sorted(refused)])

    def place(self, submit: Submit) -> str:
        """Send to the least loaded tokenizer; the key of its link, or "" when none is up."""
        for link in sorted(self._links, key=self._rank):
            peer = link.peer
            if peer is not None and link.send(submit):
                self.num_placed[peer.key] += 1
                _log.debug("%s -> %s", submit.rid.hex()[:12], peer.name)
                return peer.key
        return ""

    def release(self, key: str) -> None:
        """A placed request is over."""
        self.num_placed[key] -= 1
        if self.num_placed[key] <= 0:
            del self.num_placed[key]

    def send(self, key: str, message: AnyMessage) -> bool:
        """Send over the link of this key; False when it is gone."""
        for link in self._links:
            if link.peer is not None and link.peer.key == key:
                return link.send(message)
        return False

    def _rank(self, link: TokenizerLink) -> tuple[bool, int]:
        """Ready ones first, then by load: ours now, plus everybody's as of the last heartbeat."""
        if link.peer is None:
            return True, 0
        stats = link.peer.stats
        return not stats.ready, self.num_placed[link.peer.key] + stats.requests
