"""The real router before several real scheduler cores, in one simulated time.

Replicas are the simulator's worlds: their executors verify shadow KV, and their tokens are the
oracle's. Clients, tokenizer and links are simple here; what they do when links fail has tests of
its own.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Accepted,
    Ack,
    AckRow,
    Capacity,
    Failed,
    Finished,
    PrefixEvents,
    ServiceStats,
    TokenBatch,
)
from services.router.placements import Placements
from services.router.placements import Send as Routed
from services.scheduler.core.events import (
    Mail,
    RequestEnded,
    RouterUp,
    Send,
    StepEnded,
    TokenizerUp,
)
from services.scheduler.sim.clock import MS, SECOND, Clock, Times
from services.scheduler.sim.garbage import without_cycle_search
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.world import World

TOKENIZER, ROUTER = "tokenizer-0", "router-0"
HOP_NS = MS // 5
LAST_WORDS_NS = 50 * MS  # the last report of prefixes has come by then
AGAIN_NS = 20 * MS  # until a tokenizer sends again what a router or replica has lost


class Fleet:
    """Replicas, a router, and one tokenizer that has all requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacities: list[Capacity],
        *,
        seed: int,
        times: Times,
        heartbeat_ns: int = SECOND,
        is_aware: bool = True,
    ) -> None:
        self.clock = Clock(seed)
        self.requests: dict[bytes, SimRequest] = {}
        self.sent: dict[bytes, str] = {}  # where each request went last
        self.num_sent: Counter[str] = Counter()
        self.busy_ns: Counter[str] = Counter()  # of devices, in steps
        self.failed: list[Failed] = []
        self.on_end: Callable[[SimRequest], None] = lambda request: None
        self._accepted: dict[bytes, str] = {}
        self._heartbeat_ns, self._is_aware = heartbeat_ns, is_aware
        self._rows, self._limit = config.max_rows, config.max_rows + config.max_waiting
        self._lives: Counter[str] = Counter()
        self._is_routing = False
        self.worlds = {
            f"scheduler-{index}": World(
                config,
                capacity,
                seed=seed,
                tokenizers=0,
                times=times,
                audit_every=64,
                clock=self.clock,
                index=index,
                requests=self.requests,
            )
            for index, capacity in enumerate(capacities)
        }
        for name, world in self.worlds.items():
            world.to_group = partial(self._from_replica, name)
            world.on_scheduler = partial(self._on_scheduler, name)
            world.process.on_report = partial(self._report, name)
        self._start_router()
        self.clock.at(0, self._beat)

    # ------------------------------------------------------------ running

    def submit(self, request: SimRequest, delay_ns: int = 0) -> None:
        """It arrives in so many ns."""
        self.requests[request.rid] = request
        self.clock.at(delay_ns, partial(self._generate, request))

    def run(self, limit_ns: int = 3600 * SECOND) -> None:
        """Until every request has ended, all devices are idle and the router knows it.

        Raises:
            AssertionError: something does not come to an end.
        """
        with without_cycle_search():
            while not self._is_over():
                assert self.clock.now < limit_ns, "requests do not end"
                self.clock.step()
            until = self.clock.now + LAST_WORDS_NS
            while self.clock.now < until:
                self.clock.step()

    def verify(self) -> None:
        """Right tokens, one end each, no block lost, and the router holds nothing."""
        for world in self.worlds.values():
            world.verify()
        for name in self.worlds:
            self._heartbeat(name)
        for name, load in self.router.replicas.loads_ms(self.clock.now / SECOND).items():
            assert load == 0.0, f"{name} is taken to have {load} ms of work"
        assert (self.router.num_requests, self.router.kept_bytes) == (0, 0)

    def kill_replica(self, name: str, back_after_ns: int) -> None:
        """Its scheduler dies, and what it has cached."""
        self.worlds[name].kill_scheduler(back_after_ns)

    def kill_router(self, back_after_ns: int) -> None:
        """It forgets all; what it had not placed is sent again once it is back."""
        self._is_routing = False
        self.clock.at(back_after_ns, self._start_router)

    def balance(self) -> float:
        """Busiest over mean device time."""
        return max(self.busy_ns.values()) * len(self.worlds) / sum(self.busy_ns.values())

    def hit_rate(self) -> float:
        """Of all prompt tokens."""
        total = sum(len(request.prompt) for request in self.requests.values())
        return sum(request.cached_tokens for request in self.requests.values()) / total

    # ------------------------------------------------------------ the router

    def _start_router(self) -> None:
        self.router = Placements(self._limit, self._rows, is_aware=self._is_aware)
        self._is_routing = True
        for name, world in self.worlds.items():
            if not world.is_down:
                self._link(name)
        self.clock.at(AGAIN_NS, self._send_again)

    def _link(self, name: str) -> None:
        """Its links to tokenizer and router are up, and a heartbeat comes with them."""
        world = self.worlds[name]
        world.feed(TokenizerUp(TOKENIZER, b"t"))
        if self._is_routing:
            self.router.replicas.up(name)
            world.feed(RouterUp(ROUTER))
            self.clock.at(AGAIN_NS, partial(self._heartbeat, name))

    def _beat(self) -> None:
        for name in self.worlds:
            self._heartbeat(name)
        self.clock.at(self._heartbeat_ns, self._beat)

    def _heartbeat(self, name: str) -> None:
        world = self.worlds[name]
        if world.is_down or not self._is_routing:
            return
        stats = world.core.stats()
        told = ServiceStats(stats.ready, stats.waiting + stats.running, [stats])
        self._send(self.router.heartbeat(name, told, self._now_s()))

    def _send(self, sends: list[Routed]) -> None:
        for name, message, _ in sends:
            if isinstance(message, Failed):
                self.failed.append(message)
                continue
            self.sent[message.rid] = name
            self.num_sent[name] += 1
            self._later(name, Mail(ROUTER, message))

    def _later(self, name: str, event: Mail) -> None:
        """It arrives, if the replica lives as long."""
        life = self._lives[name]

        def arrive() -> None:
            if life == self._lives[name]:
                self.worlds[name].feed(event)

        self.clock.at(HOP_NS, arrive)

    def _now_s(self) -> float:
        return self.clock.now / SECOND

    # ------------------------------------------------------------ the tokenizer

    def _generate(self, request: SimRequest) -> None:
        if self._is_routing:
            message = request.generate(TOKENIZER)
            self._send(self.router.generate(TOKENIZER, message, self._now_s()))

    def _ack(self, request: SimRequest, *, done: bool) -> None:
        if self._is_routing:
            row = AckRow(request.rid, len(request.output), done)
            self._send(self.router.ack([row], self._now_s()))

    def _send_again(self) -> None:
        """What no replica has answered for."""
        for request in self._open():
            if request.rid not in self._accepted:
                self._generate(request)

    def _open(self) -> Iterable[SimRequest]:
        return [r for r in self.requests.values() if not r.terminals and self._has_arrived(r)]

    def _has_arrived(self, request: SimRequest) -> bool:
        return request.arrival_ns <= self.clock.now

    def _on_scheduler(self, name: str, is_up: bool) -> None:
        self._lives[name] += 1
        if is_up:
            self.clock.at(HOP_NS, partial(self._link, name))
            return
        if self._is_routing:
            self._send(self.router.replica_down(name, self._now_s()))
        lost = [r for r in self._open() if self._accepted.get(r.rid) == name]
        for request in lost:
            del self._accepted[request.rid]
            request.attempt += 1
            self._generate(request)

    def _from_replica(self, name: str, send: Send, after_ns: int) -> bool:
        """What a core sends to the tokenizer or the router."""
        if send.peer not in (TOKENIZER, ROUTER):
            return False
        life, router = self._lives[name], self.router

        def arrive() -> None:
            if life != self._lives[name]:
                return
            if send.peer == TOKENIZER:
                self._take(name, send.message)
            elif router is self.router:
                assert isinstance(send.message, PrefixEvents)
                router.replicas.prefixes(name, send.message)

        self.clock.at(HOP_NS + after_ns, arrive)
        return True

    def _take(self, name: str, message: object) -> None:
        match message:
            case Accepted(rid=rid):
                self._accepted[rid] = name
                self._ack(self.requests[rid], done=False)
            case TokenBatch(rows=rows):
                for row in rows:
                    self.requests[row.rid].take(row, self.clock.now)
            case Finished(rid=rid) | Failed(rid=rid):
                request = self.requests[rid]
                request.end(message)
                request.ended_ns = self.clock.now
                self._ack(request, done=True)
                row = AckRow(rid, message.final_pos, done=True)
                self._later(name, Mail(TOKENIZER, Ack([row])))
                self.on_end(request)
            case _:
                raise AssertionError(message)

    def _report(self, name: str, report: RequestEnded | StepEnded) -> None:
        if isinstance(report, StepEnded):
            self.busy_ns[name] += max(0, report.end_ns - report.begin_ns)

    def _is_over(self) -> bool:
        done = all(request.terminals for request in self.requests.values())
        return done and self._is_routing and all(w.is_over for w in self.worlds.values())
