"""Deterministic discrete-event simulation of the real core: virtual time, one seed, no threads."""

from functools import partial

from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Accepted,
    Capacity,
    Failed,
    Finished,
    Load,
    Reset,
    Shutdown,
    SubmitStep,
    TokenBatch,
)

from ..core.audit import audit
from ..core.events import (
    Event,
    ExecutorDown,
    ExecutorUp,
    Incoming,
    Mail,
    Send,
    Tick,
    TokenizerDown,
    TokenizerUp,
)
from ..core.scheduler import Scheduler
from .clock import MS, Clock, Link, Times
from .executor import Rendezvous, SimExecutor
from .requests import SimRequest
from .tokenizer import SimTokenizer
from .writer import ExternalWriter

TICK_NS = 100 * MS
RESTART_NS = 20 * MS  # of a process by its supervisor


class World:
    """One scheduler, its executors and its tokenizers, until every request has ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        *,
        seed: int,
        ranks: int = 1,
        tokenizers: int = 1,
        times: Times | None = None,
        check: bool = True,
        mask_miss: float = 0.0,
        max_unacked: int = 2048,
    ) -> None:
        self.times = times or Times()
        self.clock = Clock(seed)
        self.requests: dict[bytes, SimRequest] = {}
        self.writer = ExternalWriter()
        self.preemptions = self.cached_prompt_tokens = 0  # of cores that are gone
        self._config, self._check = config, check
        self._capacity = replace(capacity, has_masks=True)  # they miss one at times
        self._max_unacked = max_unacked
        self._restarts = 0
        self.is_down = False
        self.core = self._new_core(ranks)
        self._rendezvous = Rendezvous()
        self.executors = [self._new_executor(rank, mask_miss) for rank in range(ranks)]
        self.tokenizers = [self._new_tokenizer(index) for index in range(tokenizers)]
        self._peers: dict[str, SimExecutor | SimTokenizer] = {
            peer.name: peer for peer in (*self.executors, *self.tokenizers)
        }
        for peer in self._peers.values():
            self.clock.at(0, partial(self.connect, peer))
        self.clock.at(TICK_NS, self._tick)

    def _new_core(self, ranks: int) -> Scheduler:
        return Scheduler(
            self._config,
            name="scheduler-0",
            model="sim",
            ranks=ranks,
            first_epoch=1 + 1000 * self._restarts,
            max_unacked=self._max_unacked,
        )

    def _new_executor(self, rank: int, mask_miss: float) -> SimExecutor:
        executor = SimExecutor(
            rank,
            self._capacity,
            clock=self.clock,
            times=self.times,
            link=Link(self.clock, self.times),
            rendezvous=self._rendezvous,
            to_core=self._mail,
            current_epoch=lambda: self.core.group.engine_epoch,
            depth=self._config.depth,
        )
        executor.mask_miss = mask_miss
        return executor

    def _new_tokenizer(self, index: int) -> SimTokenizer:
        return SimTokenizer(
            f"tokenizer-{index}",
            clock=self.clock,
            link=Link(self.clock, self.times),
            to_core=self._mail,
        )

    # ------------------------------------------------------------ running

    def submit(self, request: SimRequest, tokenizer: int = 0) -> None:
        """Let a request arrive at its time."""
        self.requests[request.rid] = request
        target = self.tokenizers[tokenizer]
        self.clock.at(request.arrival_ns - self.clock.now, lambda: target.submit(request))

    def run(self, limit_ns: int = 10**12) -> None:
        """Until every request has ended and the device is idle.

        Raises:
            AssertionError: something does not come to an end.
        """
        while not (self._ended() and self._idle()):
            assert self.clock.now < limit_ns, f"unfinished: {self._unfinished()}"
            self.clock.step()

    def verify(self) -> None:
        """Every request ended once, with the oracle's tokens; every block is free again."""
        for request in self.requests.values():
            request.verify(self._capacity.vocab_size)
        stats = self.core.stats()
        assert (stats.running, stats.waiting, stats.inflight_tokens) == (0, 0, 0), stats
        spare = zip(stats.free_blocks, stats.cached_blocks, strict=True)
        assert [free + cached for free, cached in spare] == list(stats.total_blocks), stats

    @property
    def num_preemptions(self) -> int:
        """By all cores."""
        return self.preemptions + self.core.stats().preemptions

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache, by all cores."""
        return self.cached_prompt_tokens + self.core.stats().cached_prompt_tokens

    @property
    def num_failed(self) -> int:
        """Requests that ended in Failed."""
        ends = [end for request in self.requests.values() for end in request.terminals]
        return sum(isinstance(end, Failed) for end in ends)

    # ------------------------------------------------------------ links and processes

    def connect(self, peer: SimExecutor | SimTokenizer) -> None:
        """A peer dials in, unless it is connected or the scheduler is down."""
        if self.is_down or peer.link.is_up:
            return
        peer.link.open()
        self.clock.trace("up", peer.name)
        if isinstance(peer, SimExecutor):
            self.feed(ExecutorUp(peer.name, peer.rank))
        else:
            self.feed(TokenizerUp(peer.name, peer.incarnation))
            peer.link_up()

    def disconnect(self, peer: SimExecutor | SimTokenizer, back_after_ns: int) -> None:
        """The link is cut; the peer dials again."""
        if peer.link.is_up:
            peer.link.cut()
            self.clock.trace("down", peer.name)
            if isinstance(peer, SimExecutor):
                peer.link_down()
                self.feed(ExecutorDown(peer.name, peer.rank))
            else:
                self.feed(TokenizerDown(peer.name))
        self.clock.at(back_after_ns, partial(self.connect, peer))

    def kill_executor(self, rank: int, back_after_ns: int) -> None:
        """The executor dies now and is back, empty, later."""
        executor = self.executors[rank]
        executor.crash()
        self.disconnect(executor, back_after_ns)

    def kill_tokenizer(self, index: int, back_after_ns: int) -> None:
        """The tokenizer dies now; another process takes its place and its requests."""
        tokenizer = self.tokenizers[index]
        tokenizer.restart()
        self.disconnect(tokenizer, back_after_ns)

    def kill_scheduler(self, back_after_ns: int) -> None:
        """The scheduler dies now; a new one, which knows nothing, listens later."""
        if self.is_down:
            return
        self.is_down = True
        self.clock.trace("scheduler down")
        stats = self.core.stats()
        self.preemptions += stats.preemptions
        self.cached_prompt_tokens += stats.cached_prompt_tokens
        for peer in self._peers.values():
            if peer.link.is_up:
                peer.link.cut()
                if isinstance(peer, SimExecutor):
                    peer.link_down()
        self.clock.at(back_after_ns, self._start_scheduler)

    def _start_scheduler(self) -> None:
        self.is_down = False
        self._restarts += 1
        self.core = self._new_core(len(self.executors))
        for peer in self._peers.values():
            self.clock.at(self.clock.random.randrange(20 * MS), partial(self.connect, peer))

    # ------------------------------------------------------------ the core

    def feed(self, event: Event) -> None:
        """One event into the core, a Tick behind it, actions out over the links."""
        if self.is_down:
            return
        for each in (event, Tick()):
            for action in self.core.handle(each, self.clock.now):
                if isinstance(action, Send):
                    self.clock.trace("send", action.peer, type(action.message).__name__)
                    self._post(action)
            self.writer.observe(self.core, [executor.device for executor in self.executors])
        if self._check:
            audit(self.core)

    def _post(self, send: Send) -> None:
        peer, message = self._peers[send.peer], send.message
        match message:
            case Load() | SubmitStep() | Reset():
                assert isinstance(peer, SimExecutor)
                peer.link.send("there", partial(peer.receive, message))
            case Shutdown():
                assert isinstance(peer, SimExecutor)
                peer.link.send("there", partial(self.kill_executor, peer.rank, RESTART_NS))
            case Accepted() | TokenBatch() | Finished() | Failed():
                assert isinstance(peer, SimTokenizer)
                peer.link.send("there", partial(peer.receive, message))

    def _mail(self, peer: str, message: Incoming) -> None:
        self.clock.trace("mail", peer, type(message).__name__)
        self.feed(Mail(peer, message))

    def _tick(self) -> None:
        self.feed(Tick())
        self.clock.at(TICK_NS, self._tick)

    # ------------------------------------------------------------ the end

    def _ended(self) -> bool:
        return all(request.terminals for request in self.requests.values())

    def _unfinished(self) -> list[str]:
        return [r.rid.hex()[-4:] for r in self.requests.values() if not r.terminals]

    def _idle(self) -> bool:
        """Every step is applied, and every watermark has arrived."""
        group = self.core.group
        if self.is_down or group.unresolved:
            return False
        return self.core.engine is not None and all(
            done >= applied for done, applied in zip(group.gpu_done, group.applied, strict=True)
        )
