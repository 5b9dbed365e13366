"""Which schedulers are up, and which of them gets the next request."""

from collections import Counter

from deepmesh.wire.link import Peer
from deepmesh.wire.messages import ReplicaStats


class Schedulers:
    """The schedulers whose link is up, with the load we gave them. Pure."""

    def __init__(self) -> None:
        self._up: dict[str, Peer] = {}
        self.placed: Counter[str] = Counter()  # our running requests, by scheduler

    @property
    def names(self) -> set[str]:
        """Of those that are up."""
        return set(self._up)

    @property
    def replicas(self) -> list[ReplicaStats]:
        """As of their last heartbeats."""
        return [replica for peer in self._up.values() for replica in peer.stats.replicas]

    def up(self, peer: Peer) -> None:
        """A link is there."""
        self._up[peer.name] = peer

    def down(self, name: str) -> None:
        """A link is gone."""
        self._up.pop(name, None)

    def get(self, name: str) -> Peer | None:
        """The scheduler, if it is up."""
        return self._up.get(name)

    def choose(self) -> Peer | None:
        """Ready before not ready, then the fewest requests. One that loads still queues them."""
        return min(self._up.values(), key=self._rank, default=None)

    def context(self, most: int) -> int:
        """Tokens that a request may have: the largest replica's limit, at most `most`."""
        known = [r.max_model_len for r in self.replicas if r.max_model_len > 0]
        return min(max(known), most) if known else most

    def _rank(self, peer: Peer) -> tuple[bool, int, str]:
        replicas = peer.stats.replicas
        ready = any(replica.ready and not replica.draining for replica in replicas)
        return not ready, self.placed[peer.name], peer.name
