"""Where each request was sent, and what waits for a replica. Pure: mail in, sends out."""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from deepmesh.wire.messages import AckRow, ErrorCode, Failed, Generate, Rid, ServiceStats
from services.router.replicas import Replicas, Route

MAX_WAITING = 4096  # requests without a replica
MAX_KEPT_BYTES = 256 << 20  # of messages that no scheduler has accepted yet
MAX_SENDS = 2  # to one replica without an answer; then another one is tried


class Send(NamedTuple):
    """A message for a replica, or for a tokenizer."""

    name: str
    message: Generate | Failed
    route: Route | None = None  # of a request that was placed now


@dataclass(eq=False)
class Placed:
    """A request from its Generate until its tokenizer says that it is over."""

    tokenizer: str
    attempt: int
    message: Generate | None  # kept until a scheduler has accepted it
    route: Route | None = None  # none: waits
    sends: int = 0  # to this replica
    is_accepted: bool = False  # by the replica

    @property
    def replica(self) -> str:
        """Where it is; empty: waits."""
        return self.route.replica if self.route is not None else ""


class Placements:
    """Each method is one event at `now` (s, any clock) and returns what to send."""

    def __init__(self, max_requests: int, max_rows: int, *, is_aware: bool = True) -> None:
        """As `Replicas` has them."""
        self.replicas = Replicas(max_requests, max_rows, is_aware=is_aware)
        self._placed: dict[Rid, Placed] = {}
        self._waiting: dict[Rid, Placed] = {}  # oldest first
        self.kept_bytes = 0

    @property
    def num_requests(self) -> int:
        """All that are not known to be over."""
        return len(self._placed)

    @property
    def num_waiting(self) -> int:
        """Those without a replica."""
        return len(self._waiting)

    # ------------------------------------------------------------ tokenizers

    def generate(self, tokenizer: str, message: Generate, now: float) -> list[Send]:
        """Send a new request to a replica; one sent again goes where it went before."""
        known = self._placed.get(message.rid)
        if known is not None and message.attempt < known.attempt:
            return []  # overtaken by its own later attempt
        if known is not None and message.attempt == known.attempt:
            known.tokenizer = tokenizer
            self._keep(known, message)
            if known.route is not None and known.sends < MAX_SENDS:
                known.sends += 1
                return [Send(known.replica, _routed(message, known.route))]
            if known.route is None:
                return self._place(known, message, now)
        avoid = known.replica if known is not None else ""  # it was silent there, or refused
        self._forget(message.rid, now)
        placed = self._placed[message.rid] = Placed(tokenizer, message.attempt, None)
        self._keep(placed, message)
        return self._place(placed, message, now, avoid)

    def ack(self, rows: list[AckRow], now: float) -> list[Send]:
        """A scheduler has the request, or it is over: then one that waits may have its place."""
        for row in rows:
            placed = self._placed.get(row.rid)
            if placed is None:
                continue
            self._let_go(placed)
            self._accept(placed)
            if row.done and placed.route is not None:
                self.replicas.outputs.ended(row.pos)
            if row.done or row.rid in self._waiting:  # waiting here: found at a scheduler before
                self._forget(row.rid, now)
        return self._place_waiting(now) if any(row.done for row in rows) else []

    def tokenizer_down(self, name: str, now: float) -> None:
        """Another tokenizer asks the schedulers for its requests, or sends them again."""
        for rid in [rid for rid, placed in self._placed.items() if placed.tokenizer == name]:
            self._forget(rid, now)

    # ------------------------------------------------------------ replicas

    def heartbeat(self, name: str, stats: ServiceStats, now: float) -> list[Send]:
        """The state of a replica; requests that wait may go there."""
        self.replicas.heard(name, stats, now)
        return self._place_waiting(now)

    def replica_down(self, name: str, now: float) -> list[Send]:
        """What it had not accepted goes elsewhere; the rest its tokenizers send again."""
        self.replicas.down(name)
        lost = [(rid, p) for rid, p in self._placed.items() if p.replica == name]
        sends: list[Send] = []
        for rid, placed in lost:
            placed.route, placed.sends, placed.is_accepted = None, 0, False
            if placed.message is None:
                del self._placed[rid]
            else:
                sends += self._place(placed, placed.message, now)
        return sends

    # ------------------------------------------------------------ inside

    def _place(self, placed: Placed, message: Generate, now: float, avoid: str = "") -> list[Send]:
        route = self.replicas.route(message, avoid, now)
        if route is not None:
            placed.route, placed.sends, placed.is_accepted = route, 1, False
            self._waiting.pop(message.rid, None)
            return [Send(route.replica, _routed(message, route), route)]
        is_full = self.replicas.is_ready and not self.replicas.awaits_one(now)
        if is_full or len(self._waiting) >= MAX_WAITING or placed.message is None:
            self._forget(message.rid, now)
            what = "every replica is full" if is_full else "too many requests wait for a replica"
            failed = Failed(
                message.rid, ErrorCode.OVERLOADED, f"{what}; try again later", retry_after_s=2.0
            )
            return [Send(placed.tokenizer, failed)]
        self._waiting[message.rid] = placed
        return []

    def _place_waiting(self, now: float) -> list[Send]:
        """Oldest first, until one finds no place."""
        sends: list[Send] = []
        for rid, placed in list(self._waiting.items()) if self.replicas.is_ready else []:
            assert placed.message is not None
            sends += self._place(placed, placed.message, now)
            if rid in self._waiting:
                break
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

    def _accept(self, placed: Placed) -> None:
        load = self.replicas.load(placed.replica)
        if load is not None and placed.route is not None and not placed.is_accepted:
            load.accepted(placed.route.work)
        placed.is_accepted = True

    def _forget(self, rid: Rid, now: float) -> None:
        placed = self._placed.pop(rid, None)
        self._waiting.pop(rid, None)
        if placed is None:
            return
        self._let_go(placed)
        load = self.replicas.load(placed.replica)
        if load is not None and placed.route is not None:
            load.end(placed.route.work, now, was_accepted=placed.is_accepted)


def _routed(message: Generate, route: Route) -> Generate:
    """The message as its replica gets it; who computes the prompt is for the router to say."""
    if message.prefill_at == route.prefill_at:
        return message
    return replace(message, prefill_at=route.prefill_at)


def _size(message: Generate) -> int:
    grammar = len(message.grammar.text) if message.grammar is not None else 0
    return 512 + len(message.prompt_ids) + len(message.confirmed_ids) + grammar
