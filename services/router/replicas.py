"""What is known of the replicas, and which of them a request goes to. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deepmesh.wire.messages import (
    BlockEvents,
    Generate,
    KvKind,
    Pool,
    PrefixEvents,
    ReplicaStats,
    ServiceStats,
)
from services.router.loads import RELATIVE, Costs, Load, Outputs, Work, alike
from services.router.policy import Candidate, Choice, choose
from services.router.prefixes import Grid, PrefixSketch, split

GUESS_SHARE = 0.75  # what a prompt that was sent there counts for, against one known to be there
LOAD_SHARE = 0.25  # what a token costs that is loaded or handed over, against a computed one
LOADING_S = 60.0  # others wait so long for a replica that loads
LOCAL_TOKENS = 256  # so little of a prompt a decode replica computes itself


@dataclass(eq=False)
class Replica:
    """A scheduler whose link is up."""

    name: str
    load: Load = field(default_factory=Load)
    grid: Grid = field(default_factory=lambda: Grid(""))
    role: str = "both"
    is_open: bool = False  # ready, not draining
    is_loading: bool = True  # not ready, and not about to end
    loads_until: float = 1e18  # after that nobody waits for it
    is_paused: bool = False


class Route(NamedTuple):
    """Where a request goes, and why."""

    replica: str
    reason: str  # see policy.Choice
    work: Work
    prompt_tokens: int = 0
    hit_tokens: int = 0  # of the prompt, known to be there
    store_tokens: int = 0  # further ones that a kvstore has
    load_ms: float = 0.0  # of the replica, before
    prefill_at: str = ""  # another replica that computes the prompt
    prefill_tokens: int = 0  # that it has to compute


class _Known(NamedTuple):
    """Tokens of a prompt: at a replica by its own word, by guess, and further ones in kvstores."""

    chain: list[bytes]  # of the prompt
    hit: int
    guessed: int
    stored: int

    def uncomputed(self, prompt_tokens: int) -> float:
        """Tokens of prefill that it would cost."""
        rest = prompt_tokens - self.hit - GUESS_SHARE * self.guessed
        return max(1.0, rest - (1.0 - LOAD_SHARE) * min(self.stored, rest))


class Replicas:
    """Their state, and the choice."""

    def __init__(self, max_requests: int, max_rows: int, *, is_aware: bool = True) -> None:
        """
        Args:
            max_requests: that a replica may have.
            max_rows: of these, those that it runs at once.
            is_aware: of caches and loads; otherwise replicas take turns.
        """
        self._max_requests, self._max_rows = max_requests, max_rows
        self._by_name: dict[str, Replica] = {}
        self._stores: dict[str, None] = {}  # kvstores that have said what they have
        self.sketch = PrefixSketch()
        self.outputs = Outputs()
        self.decisions: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._turn = 0
        self._is_aware = is_aware

    # ------------------------------------------------------------ what they say

    def up(self, name: str) -> None:
        """Whether it takes requests is known with its first heartbeat."""
        self._by_name[name] = Replica(name)

    def down(self, name: str) -> None:
        """It is gone, and what it had, too."""
        self._by_name.pop(name, None)
        self.sketch.lose(name)

    def heard(self, name: str, stats: ServiceStats, now: float) -> None:
        """A heartbeat."""
        replica = self._by_name.setdefault(name, Replica(name))
        replica.is_open = any(state.ready and not state.draining for state in stats.replicas)
        was_loading = replica.is_loading and replica.loads_until < 1e18
        replica.is_loading = not replica.is_open and not any(s.draining for s in stats.replicas)
        if replica.is_loading and not was_loading:
            replica.loads_until = now + LOADING_S
        own = stats.replicas[0] if stats.replicas else ReplicaStats(name, ready=False)
        replica.role, replica.is_paused = own.role, own.paused
        replica.load.heard(own, stats.requests, now)
        if own.fingerprint not in ("", replica.grid.fingerprint):
            replica.grid = Grid(own.fingerprint)  # until it says more
        if num_blocks := own.total_blocks[Pool.GLOBAL]:
            grid = replica.grid
            self.sketch.can_have(name, num_blocks * grid.block_size // grid.step)

    def prefixes(self, name: str, events: PrefixEvents) -> None:
        """A replica tells which points it has."""
        replica = self._by_name.get(name)
        if replica is None:
            return
        self.counts["resyncs"] += events.first
        replica.grid = Grid(events.fingerprint, events.block_size, events.chunk_align)
        self.sketch.tell(name, split(events.added), split(events.dropped), first=events.first)

    def blocks(self, name: str, events: BlockEvents) -> None:
        """A kvstore tells what it has; of that only points can be resumed."""
        self.counts["resyncs"] += events.first
        self._stores[name] = None
        added, dropped = (
            [item.hash for item in items if item.kind == KvKind.POINT]
            for items in (events.added, events.dropped)
        )
        self.sketch.tell(name, added, dropped, first=events.first)

    def store_down(self, name: str) -> None:
        """A kvstore is gone."""
        self._stores.pop(name, None)
        self.sketch.lose(name)

    # ------------------------------------------------------------ what is known

    def load(self, name: str) -> Load | None:
        """Of a replica that is up."""
        replica = self._by_name.get(name)
        return replica.load if replica is not None else None

    @property
    def is_ready(self) -> bool:
        """Whether a request would go out at once."""
        return any(replica.role != "prefill" for replica in self._open())

    def awaits_one(self, now: float) -> bool:
        """A replica is linked and loads. Until it is ready the others get no more than they run at
        once, or who is ready first after an outage would have all requests."""
        found = (r for r in self._by_name.values() if r.role != "prefill")
        return any(r.is_loading and now < r.loads_until for r in found)

    def is_open(self, name: str) -> bool:
        """Whether a replica takes requests."""
        return name in self._by_name and self._by_name[name].is_open

    def loads_ms(self, now: float) -> dict[str, float]:
        """Work that each replica has."""
        costs = self._costs()
        return {name: self._load_ms(r, costs[name], now) for name, r in self._by_name.items()}

    def num_points(self) -> tuple[int, int]:
        """Points that replicas and kvstores are known to have."""
        of = self.sketch.num_points
        return sum(map(of, self._by_name)), sum(map(of, self._stores))

    # ------------------------------------------------------------ the choice

    def route(self, message: Generate, avoid: str, now: float) -> Route | None:
        """The replica that takes a request, if any has room; `avoid` only if no other one has."""
        most = self._max_rows if self.awaits_one(now) else self._max_requests
        takers = [r for r in self._open() if r.role != "prefill" and r.load.num_requests < most]
        takers = [r for r in takers if r.name != avoid] or takers
        takers = [r for r in takers if not r.is_paused] or takers
        if not takers:
            return None
        prompt = (len(message.prompt_ids) + len(message.confirmed_ids)) // 4
        known = self._known(message, [*takers, *self._helpers()])
        costs, draw = self._costs(), int.from_bytes(message.rid[:8], "little")
        outputs = self.outputs.expected(message.max_tokens)
        helpers = self._helpers() if not message.confirmed_ids else []

        def work(replica: Replica) -> Work:
            tokens = known[replica.name].uncomputed(prompt)
            if replica.role == "decode" and helpers and tokens > LOCAL_TOKENS:
                tokens *= LOAD_SHARE  # handed over
            return Work(tokens, prompt, outputs)

        def candidate(replica: Replica) -> Candidate:
            cost, here = costs[replica.name], work(replica)
            decode, whole = here.decode_ms(cost), prompt * cost.token
            return Candidate(
                replica.name,
                self._load_ms(replica, cost, now),
                here.prefill_ms(cost) + decode,
                whole + decode,
                replica.load.num_ours,
                replica.load.is_known(now),
            )

        if self._is_aware:
            choice = choose([candidate(replica) for replica in takers], self._turn, draw)
        else:
            choice = Choice(takers[self._turn % len(takers)].name, "turn")
        self._turn += 1
        taker = self._by_name[choice.name]
        helper = self._helper(taker, helpers, known, prompt, costs, now)
        at = known[taker.name]
        route = Route(
            taker.name,
            choice.reason,
            work(taker),
            prompt,
            at.hit,
            at.stored,
            self._load_ms(taker, costs[taker.name], now),
            helper.name if helper is not None else "",
            int(known[helper.name].uncomputed(prompt)) if helper is not None else 0,
        )
        self._count(route, known, now)
        return route

    # ------------------------------------------------------------ parts

    def _open(self) -> list[Replica]:
        return [replica for replica in self._by_name.values() if replica.is_open]

    def _helpers(self) -> list[Replica]:
        """Replicas that compute prompts for others."""
        return [r for r in self._open() if r.role == "prefill" and not r.is_paused]

    def _costs(self) -> dict[str, Costs]:
        """What is compared is counted in one unit."""
        known = {name: replica.load.costs for name, replica in self._by_name.items()}
        found = {name: costs for name, costs in known.items() if costs is not None}
        if len(found) < len(known):
            return dict.fromkeys(known, RELATIVE)
        common = alike(list(found.values())) if found else None
        return found if common is None else dict.fromkeys(known, common)

    def _load_ms(self, replica: Replica, costs: Costs, now: float) -> float:
        load, share = replica.load, 1.0
        if replica.role == "decode" and self._helpers():
            share = LOAD_SHARE  # most of what waits there is computed elsewhere
        outputs = self.outputs.expected(1 << 30)
        return share * load.prefill_ms(costs, now) + load.decode_ms(costs, outputs)

    def _known(self, message: Generate, replicas: Sequence[Replica]) -> dict[str, _Known]:
        """How much of the prompt each has; it is hashed once for all of the same engine."""
        chains: dict[tuple[str, int, int], tuple[list[bytes], int]] = {}
        found: dict[str, _Known] = {}
        for replica in replicas:
            grid = replica.grid
            if grid.key not in chains:
                chain = grid.chain(message)
                stored = max((self.sketch.known_links(chain, s) for s in self._stores), default=0)
                chains[grid.key] = (chain, stored)
            chain, stored = chains[grid.key]
            hit = self.sketch.known_links(chain, replica.name)
            guessed = max(0, self.sketch.guessed_links(chain, replica.name) - hit)
            found[replica.name] = _Known(
                chain, hit * grid.step, guessed * grid.step, max(0, stored - hit) * grid.step
            )
        return found

    def _helper(
        self,
        taker: Replica,
        helpers: Sequence[Replica],
        known: dict[str, _Known],
        prompt: int,
        costs: dict[str, Costs],
        now: float,
    ) -> Replica | None:
        """Who computes the prompt for the one that decodes: by load and hits, as any choice."""
        if not helpers or known[taker.name].uncomputed(prompt) <= LOCAL_TOKENS:
            return None
        sides = [*helpers, taker] if taker.role == "both" else helpers
        candidates = [
            Candidate(
                side.name,
                side.load.prefill_ms(costs[side.name], now),
                known[side.name].uncomputed(prompt) * costs[side.name].token,
                prompt * costs[side.name].token,
                side.load.num_ours,
                side.load.is_known(now),
            )
            for side in sides
        ]
        choice: Choice = choose(candidates, self._turn)
        return self._by_name[choice.name] if choice.name != taker.name else None

    def _count(self, route: Route, known: dict[str, _Known], now: float) -> None:
        """The request is on its way, and counts as load from here on."""
        self._by_name[route.replica].load.add(route.work, now)
        if route.prefill_at:
            self._by_name[route.prefill_at].load.add_prefill(route.prefill_tokens, now)
        for name in filter(None, (route.replica, route.prefill_at)):
            self.sketch.guess(known[name].chain, name)
        self.decisions[route.reason] += 1
        self.counts["prompt_tokens"] += route.prompt_tokens
        self.counts["hit_tokens"] += route.hit_tokens
        self.counts["store_tokens"] += route.store_tokens
