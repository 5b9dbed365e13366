"""Where each request was sent, and what waits for a replica. Pure: mail in, sends out."""

from dataclasses import dataclass
from typing import NamedTuple

from deepmesh.wire.messages import AckRow, ErrorCode, Failed, Generate, Rid, ServiceStats
from services.router.policy import Candidate, choose
from services.router.prefixes import PrefixSketch, prefix_chain

MAX_WAITING = 4096  # requests without a replica
MAX_KEPT_BYTES = 256 << 20  # of messages that no scheduler has accepted yet
MAX_SENDS = 2  # to one replica without an answer; then another one is tried


class Send(NamedTuple):
    """A message for a replica, or for a tokenizer."""

    name: str
    message: Generate | Failed


@dataclass(eq=False)
class Placed:
    """A request from its Generate until its tokenizer says that it is over."""

    tokenizer: str
    attempt: int
    message: Generate | None  # kept until a scheduler has accepted it
    replica: str = ""  # empty: waits
    sends: int = 0  # to this replica


@dataclass(eq=False)
class Replica:
    """A scheduler whose link is up."""

    is_open: bool = False  # ready, not draining
    num_placed: int = 0  # our requests there now
    num_others: int = 0  # further ones, as of its last heartbeat


class Placements:
    """Each method is one event and returns what to send."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests  # that a replica may have
        self._replicas: dict[str, Replica] = {}
        self._placed: dict[Rid, Placed] = {}
        self._waiting: dict[Rid, Placed] = {}  # oldest first
        self._sketch = PrefixSketch()
        self.kept_bytes = 0
        self._turn = 0

    @property
    def num_requests(self) -> int:
        """All that are not known to be over."""
        return len(self._placed)

    @property
    def is_ready(self) -> bool:
        """Whether a request would go out at once."""
        return any(replica.is_open for replica in self._replicas.values())

    def is_open(self, name: str) -> bool:
        """Whether a replica takes requests."""
        return name in self._replicas and self._replicas[name].is_open

    def loads(self) -> dict[str, int]:
        """Requests at each replica, as far as we know."""
        return {name: r.num_placed + r.num_others for name, r in self._replicas.items()}

    # ------------------------------------------------------------ tokenizers

    def generate(self, tokenizer: str, message: Generate) -> list[Send]:
        """Send a new request to a replica; one sent again goes where it went before."""
        known = self._placed.get(message.rid)
        if known is not None and message.attempt < known.attempt:
            return []  # overtaken by its own later attempt
        if known is not None and message.attempt == known.attempt:
            known.tokenizer = tokenizer
            self._keep(known, message)
            if 0 < known.sends < MAX_SENDS:
                known.sends += 1
                return [Send(known.replica, message)]
            if known.sends == 0:
                return self._place(known, message)
        avoid = known.replica if known is not None else ""  # it was silent there, or refused
        self._forget(message.rid)
        placed = self._placed[message.rid] = Placed(tokenizer, message.attempt, None)
        self._keep(placed, message)
        return self._place(placed, message, avoid)

    def ack(self, rows: list[AckRow]) -> None:
        """A scheduler has the request, or it is over."""
        for row in rows:
            placed = self._placed.get(row.rid)
            if placed is None:
                continue
            self._let_go(placed)
            if row.done or row.rid in self._waiting:  # waiting here: found at a scheduler before
                self._forget(row.rid)

    def tokenizer_down(self, name: str) -> None:
        """Another tokenizer asks the schedulers for its requests, or sends them again."""
        for rid in [rid for rid, placed in self._placed.items() if placed.tokenizer == name]:
            self._forget(rid)

    # ------------------------------------------------------------ replicas

    def replica_up(self, name: str) -> None:
        """Whether it takes requests is known with its first heartbeat."""
        self._replicas[name] = Replica()

    def heartbeat(self, name: str, stats: ServiceStats) -> list[Send]:
        """The state of a replica; requests that wait may go there."""
        replica = self._replicas.setdefault(name, Replica())
        replica.is_open = any(state.ready and not state.draining for state in stats.replicas)
        replica.num_others = max(0, stats.requests - replica.num_placed)
        return self._place_waiting()

    def replica_down(self, name: str) -> list[Send]:
        """What it had not accepted goes elsewhere; the rest its tokenizers send again."""
        self._replicas.pop(name, None)
        self._sketch.lost(name)
        lost = [(rid, p) for rid, p in self._placed.items() if p.replica == name]
        sends: list[Send] = []
        for rid, placed in lost:
            placed.replica, placed.sends = "", 0
            if placed.message is None:
                del self._placed[rid]
            else:
                sends += self._place(placed, placed.message)
        return sends

    # ------------------------------------------------------------ inside

    def _place(self, placed: Placed, message: Generate, avoid: str = "") -> list[Send]:
        chain = prefix_chain(message)
        ready = [
            Candidate(name, load, self._sketch.known_tokens(chain, name))
            for name, load in self.loads().items()
            if self._replicas[name].is_open
        ]
        free = [candidate for candidate in ready if candidate.load < self._max_requests]
        candidates = [candidate for candidate in free if candidate.name != avoid] or free
        if candidates:
            placed.replica = choose(candidates, self._turn, len(message.prompt_ids) // 4)
            self._sketch.note(chain, placed.replica)
            placed.sends = 1
            self._turn += 1
            self._replicas[placed.replica].num_placed += 1
            self._waiting.pop(message.rid, None)
            return [Send(placed.replica, message)]
        if ready or len(self._waiting) >= MAX_WAITING or placed.message is None:
            self._forget(message.rid)
            what = "every replica is full" if ready else "too many requests wait for a replica"
            failed = Failed(
                message.rid, ErrorCode.OVERLOADED, f"{what}; try again later", retry_after_s=2.0
            )
            return [Send(placed.tokenizer, failed)]
        self._waiting[message.rid] = placed
        return []

    def _place_waiting(self) -> list[Send]:
        sends: list[Send] = []
        for placed in list(self._waiting.values()) if self.is_ready else []:
            assert placed.message is not None
            sends += self._place(placed, placed.message)
        return sends

    def _keep(self, placed: Placed, message: Generate) -> None:
        self._let_go(placed)
        if self.kept_bytes + _size(message) <= MAX_KEPT_BYTES:
            placed.message = message
            self.kept_bytes += _size(message)

    def _let_go(self, placed: Placed) -> None:
        if placed.message is not None:
            self.kept_bytes -= _size(placed.message)
            placed.message = None

    def _forget(self, rid: Rid) -> None:
        placed = self._placed.pop(rid, None)
        self._waiting.pop(rid, None)
        if placed is None:
            return
        self._let_go(placed)
        replica = self._replicas.get(placed.replica)
        if replica is not None:
            replica.num_placed -= 1


def _size(message: Generate) -> int:
    grammar = len(message.grammar.text) if message.grammar is not None else 0
    return 512 + len(message.prompt_ids) + len(message.confirmed_ids) + grammar
