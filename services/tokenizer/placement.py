"""Which schedulers are up, and which of them gets the next request."""

from collections import Counter
from collections.abc import Collection

from msgspec.structs import replace

from deepmesh.fingerprint import weights_of
from deepmesh.wire.link import Peer
from deepmesh.wire.messages import ReplicaStats

STALLED_S = 10.0  # an executor that ends is back within a few seconds, or it takes long


class Schedulers:
    """The schedulers whose link is up, with the load we gave them. Pure."""

    def __init__(self, vocabulary: str = "") -> None:
        self._vocabulary = vocabulary  # digest of ours; empty: not to be compared
        self._up: dict[str, Peer] = {}
        self._idle_since: dict[str, float] = {}  # those whose engines do not run
        self.placed: Counter[str] = Counter()  # our running requests, by scheduler

    @property
    def names(self) -> set[str]:
        """Of those that are up."""
        return set(self._up)

    @property
    def replicas(self) -> list[ReplicaStats]:
        """As of their last heartbeats; those that we can send nothing to say why."""
        return [
            replace(replica, ready=False, refused=reason) if reason else replica
            for peer in self._up.values()
            for replica in peer.stats.replicas
            for reason in [self._mismatch(replica)]
        ]

    def up(self, peer: Peer) -> None:
        """A link is there."""
        self._up[peer.name] = peer

    def down(self, name: str) -> None:
        """A link is gone."""
        self._up.pop(name, None)
        self._idle_since.pop(name, None)

    def look(self, now: float) -> None:
        """Note since when engines have not run, as heartbeats say."""
        for name, peer in self._up.items():
            if any(replica.ready for replica in peer.stats.replicas):
                self._idle_since.pop(name, None)
            else:
                self._idle_since.setdefault(name, now)

    def stalled(self, now: float) -> set[str]:
        """Whose engine has not run for `STALLED_S`: its requests need not wait for it."""
        return {name for name, at in self._idle_since.items() if now - at >= STALLED_S}

    def successor(self, name: str, fingerprint: str) -> Peer | None:
        """A scheduler with a running engine, not `name`, that can go on with an answer.

        `fingerprint`: of the engine that began it; empty: any.
        """
        peer = self.choose({name}, fingerprint)
        return peer if peer is not None and not any(self._rank(peer)[:2]) else None

    def get(self, name: str) -> Peer | None:
        """The scheduler, if it is up."""
        return self._up.get(name)

    def choose(self, refused_by: Collection[str] = (), fingerprint: str = "") -> Peer | None:
        """Ready before not ready, groups that answer before those that compute prompts for others,
        then the fewest requests. One that loads still queues them.

        `refused_by`: names that are left out, and then those that drain, too.
        `fingerprint`: of an engine; only those that may have the same weights.
        """
        left = [peer for peer in self._up.values() if peer.name not in refused_by]
        if refused_by:
            left = [peer for peer in left if not any(r.draining for r in peer.stats.replicas)]
        if fingerprint:
            left = [peer for peer in left if _may_continue(peer, fingerprint)]
        return min(left, key=self._rank, default=None)

    def context(self, most: int) -> int:
        """Tokens that a request may have: the largest replica's limit, at most `most`."""
        known = [r.max_model_len for r in self.replicas if r.max_model_len > 0]
        return min(max(known), most) if known else most

    def _rank(self, peer: Peer) -> tuple[bool, bool, int, str]:
        replicas = peer.stats.replicas
        is_helper = any(r.role == "prefill" for r in replicas)
        ready = any(r.ready and not r.draining and not self._mismatch(r) for r in replicas)
        return not ready, is_helper, self.placed[peer.name], peer.name

    def _mismatch(self, replica: ReplicaStats) -> str:
        """Why its engine would not understand our token ids; empty if it would."""
        theirs = replica.vocabulary
        if not (theirs and self._vocabulary) or theirs == self._vocabulary:
            return ""
        return (
            f"{replica.name} serves a model with vocabulary {theirs[:12]} of {replica.vocab_size} "
            f"tokens, this tokenizer has {self._vocabulary[:12]}; give both the same mesh.model"
        )


def _may_continue(peer: Peer, fingerprint: str) -> bool:
    """Whether it has the weights of this engine, as far as known: one that loads does not say."""
    known = [r.fingerprint for r in peer.stats.replicas if r.fingerprint]
    return not known or any(weights_of(each) == weights_of(fingerprint) for each in known)
