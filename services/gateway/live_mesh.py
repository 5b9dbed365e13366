"""The mesh as this gateway knows it: processes, their health, and the links between them. Pure."""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from deepmesh.config import Config
from deepmesh.wire.link import Peer
from deepmesh.wire.messages import LinkStats, ReplicaStats
from services.gateway.exposition import kv_usage

POOLS = ("global", "window", "state")
UP, STARTING, DOWN, UNKNOWN = "up", "starting", "down", "unknown"
RESTARTED = "restarted"  # up again, after a death that may have been too short to be seen
SILENT_S = 5.0  # without a message for so long, nothing goes over a link
RESTARTED_S = 6.0  # a restart is shown for so long: whoever looks once a second sees it
MAX_NEWS = 50
MAX_LIVES = 4  # incarnations of a process: neighbours may tell of an older one for a while


class Known(NamedTuple):
    """A process of which somebody tells."""

    service: str
    ready: bool
    requests: int


class Flow(NamedTuple):
    """What a link had carried when that last changed, and how fast it was until then."""

    at_s: float
    sent: int
    received: int
    sent_per_s: float = 0.0
    received_per_s: float = 0.0

    def next(self, link: LinkStats, now_s: float) -> "Flow":
        """Now. Heartbeats bring the numbers of links that are not ours, each a second old."""
        sent, received = link.sent - self.sent, link.received - self.received
        took_s = now_s - self.at_s
        if sent < 0 or received < 0:  # a new link of the same names
            return Flow(now_s, link.sent, link.received)
        if (sent or received) and took_s > 0:
            return Flow(now_s, link.sent, link.received, sent / took_s, received / took_s)
        return self if took_s < SILENT_S else Flow(self.at_s, self.sent, self.received)


class News(NamedTuple):
    """A process is in another state than before."""

    at_ms: float
    process: str
    was: str
    state: str


class MeshMap:
    """Who there should be, by the configuration; who is there, by heartbeats."""

    def __init__(self, config: Config, me: str) -> None:
        self._me = me
        self._services = {me: "gateway", **_expected(config)}
        self._flows: dict[tuple[str, str], Flow] = {}
        self._lives: dict[str, deque[bytes]] = {}  # incarnations of each process, the last ones
        self._restarted_at: dict[str, float] = {}  # monotonic, until it is shown no more
        self._states: dict[str, str] = {}  # as last told in the news
        self.restarts: Counter[str] = Counter()  # of each process, as far as seen from here
        self.news: deque[News] = deque(maxlen=MAX_NEWS)

    def links(self, peers: Sequence[Peer], own: Sequence[LinkStats]) -> list[LinkStats]:
        """Each link once; its listening side, which tells first, counts."""
        found: dict[frozenset[str], LinkStats] = {}
        told = [link for peer in peers for link in peer.stats.links]
        for link in [*own, *told]:
            if "operator" not in (link.service, link.peer_service):
                found.setdefault(frozenset((link.name, link.peer)), link)
        return list(found.values())

    def watch(
        self, links: Iterable[LinkStats], peers: Sequence[Peer], now_s: float, now_ms: float
    ) -> None:
        """Take note of who lives, died or was restarted; `now_s` is monotonic."""
        links = list(links)
        for link in links:
            if link.service != "kvstore":  # an executor's transfers have an identity of their own
                self._live(link.peer, link.incarnation, now_s)
        for name, since_s in list(self._restarted_at.items()):
            if now_s - since_s >= RESTARTED_S:
                del self._restarted_at[name]
        for row in self.processes(links, peers, 0):
            name, state = str(row["name"]), str(row["state"])
            was = self._states.get(name)
            if state in (was, UNKNOWN):
                continue
            self._states[name] = state
            if was is not None:
                self.news.append(News(now_ms, name, was, state))

    def _live(self, name: str, incarnation: bytes, now_s: float) -> None:
        if not incarnation:  # of a version that does not tell
            return
        lives = self._lives.setdefault(name, deque(maxlen=MAX_LIVES))
        if incarnation in lives:
            return
        self.restarts[name] += bool(lives)
        if lives:
            self._restarted_at[name] = now_s
        lives.append(incarnation)

    def processes(
        self, links: Iterable[LinkStats], peers: Sequence[Peer], num_open: int
    ) -> list[dict[str, object]]:
        """All of the configuration and all that are linked, as of the last `watch`."""
        known: dict[str, Known] = {}
        for link in links:
            was = known.get(link.peer, Known(link.peer_service, False, 0))
            requests = max(was.requests, link.requests)
            known[link.peer] = Known(link.peer_service, was.ready or link.ready, requests)
        for link in links:  # who tells, and of whom nobody tells: a tokenizer's own neighbours
            known.setdefault(link.name, Known(link.service, True, 0))
        known[self._me] = Known("gateway", True, num_open)
        services = self._services | {name: each.service for name, each in known.items()}
        return [
            {
                "name": name,
                "service": service,
                "state": self._state(name, service, known, sees_beyond=bool(peers)),
                "requests": known[name].requests if name in known else 0,
                "restarts": self.restarts[name],
            }
            for name, service in services.items()
        ]

    def _state(
        self, name: str, service: str, known: Mapping[str, Known], *, sees_beyond: bool
    ) -> str:
        if name in known:
            if name in self._restarted_at:
                return RESTARTED
            return UP if known[name].ready else STARTING
        if service in ("tokenizer", "gateway"):
            return DOWN
        if not sees_beyond:
            return UNKNOWN
        if service == "executor" and f"scheduler-{name.split('-')[1]}" not in known:
            return UNKNOWN
        return DOWN

    def tick(self, links: Iterable[LinkStats], now_s: float) -> None:
        """Once a second or so: what went over each link since it last said something new."""
        before, self._flows = self._flows, {}
        for link in links:
            key, flow = (link.name, link.peer), Flow(now_s, link.sent, link.received)
            was = before.get(key)
            if was is not None:
                flow = was.next(link, now_s)
            self._flows[key] = flow

    def rows(self, links: Iterable[LinkStats]) -> list[dict[str, object]]:
        """Links with what goes over them."""
        rows: list[dict[str, object]] = []
        for link in links:
            flow = self._flows.get((link.name, link.peer))
            rows.append(
                {
                    "from": link.name,
                    "to": link.peer,
                    "sent": link.sent,
                    "received": link.received,
                    "sent_per_s": round(flow.sent_per_s, 1) if flow else 0.0,
                    "received_per_s": round(flow.received_per_s, 1) if flow else 0.0,
                }
            )
        return rows


def replica_row(replica: ReplicaStats) -> dict[str, object]:
    """A scheduler's group."""
    pools = zip(
        POOLS,
        replica.total_blocks,
        replica.free_blocks,
        replica.cached_blocks,
        replica.pinned_blocks,
        strict=True,
    )
    return {
        "name": replica.name,
        "role": replica.role,
        "ready": replica.ready,
        "draining": replica.draining,
        "paused": replica.paused,
        "running": replica.running,
        "waiting": replica.waiting,
        "waiting_tokens": replica.waiting_tokens,
        "kv_usage": round(kv_usage(replica), 4),
        "pools": {
            name: {"total": total, "free": free, "cached": cached, "pinned": pinned}
            for name, total, free, cached, pinned in pools
        },
        "steps": replica.steps,
        "preemptions": replica.preemptions,
    }


def _expected(config: Config) -> dict[str, str]:
    """Names of the processes that the configuration names, and their services."""
    schedulers = range(config.scheduler.count)
    names = {f"gateway-{i}": "gateway" for i in range(1, config.gateway.count)}
    if not config.finds_tokenizers:  # those found count while they are linked
        names |= {f"tokenizer-{i}": "tokenizer" for i in range(max(1, config.tokenizer.count))}
    names |= {"router-0": "router"} if config.router_address else {}
    names |= {f"scheduler-{i}": "scheduler" for i in schedulers}
    names |= {
        f"executor-{i}-{rank}": "executor"
        for i in schedulers
        for rank in range(config.executor.ranks)
    }
    return names | {f"kvstore-{i}": "kvstore" for i in range(config.kvstore.count)}
