"""Deterministic discrete-event simulation of the real core: virtual time, one seed, no threads."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Accepted,
    Capacity,
    CompileGrammars,
    Failed,
    Finished,
    Load,
    LoadBlocks,
    Lookup,
    Pause,
    ReleaseBlocks,
    ReplicaStats,
    Reset,
    Resume,
    Shutdown,
    StoreBlocks,
    SubmitStep,
    TokenBatch,
)

from ..core.alignment import ChooseKind
from ..core.events import (
    Event,
    ExecutorDown,
    ExecutorUp,
    Incoming,
    KvstoreDown,
    KvstoreUp,
    Mail,
    Send,
    Tick,
    TokenizerDown,
    TokenizerUp,
)
from ..core.scheduler import Scheduler
from .clock import MS, Clock, Times
from .collectives import Rendezvous
from .coverage import Coverage
from .executor import SimExecutor
from .garbage import without_cycle_search
from .hunter import Hunter
from .link import Link
from .process import SchedulerProcess
from .requests import SimRequest
from .store import OpFaults, SimStore, Truth
from .tokenizer import SimTokenizer
from .writer import ExternalWriter

TICK_NS = 100 * MS
RESTART_NS = 20 * MS  # of a process by its supervisor
RECONNECT_NS = 5 * MS  # of a link that broke
DEPTHS: dict[int, Literal[1, 2, 3]] = {1: 1, 2: 2, 3: 3}  # as the configuration types them
Peer = SimExecutor | SimTokenizer | SimStore


class World:
    """One scheduler, its executors, tokenizers and kvstores, until every request has ended."""

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        *,
        seed: int,
        ranks: int = 1,
        tokenizers: int = 1,
        times: Times | None = None,
        audit_every: int = 1,
        mask_miss: float = 0.0,
        max_unacked: int = 2048,
        kvstores: int = 0,
        op_faults: OpFaults | None = None,
        choose_kind: ChooseKind | None = None,
        deaf: float = 0.0,
        index: int = 0,
        clock: Clock | None = None,
        requests: dict[bytes, SimRequest] | None = None,
    ) -> None:
        """
        Args:
            audit_every: all invariants are checked behind every so-many-th look of the scheduler
                at its mail; 0: never.
            deaf: share of the grammars ordered ahead that an executor never answers for.
            index: of the group, where there are several.
            clock, requests: shared with the other groups.
        """
        self.times = times or Times()
        self.clock = clock or Clock(seed)
        self.name, self._index = f"scheduler-{index}", index
        self.requests: dict[bytes, SimRequest] = {} if requests is None else requests
        self.to_group: Callable[[Send, int], bool] = lambda send, after_ns: False
        self.on_scheduler: Callable[[bool], None] = lambda is_up: None
        self.preemptions = self.cached_prompt_tokens = self.steps = 0  # of cores that are gone
        self.coverage = Coverage(depth=config.depth, ranks=ranks)
        self._config, self._ranks = config, ranks
        self._capacity = replace(capacity, has_masks=True)  # they miss one at times
        self._max_unacked, self._choose_kind = max_unacked, choose_kind
        self._restarts = 0
        self._open = 0  # requests without an end
        self.process = SchedulerProcess(
            self.clock,
            self.times,
            coverage=self.coverage,
            audit_every=audit_every,
            post=self._post,
            devices=lambda: [executor.device for executor in self.executors],
        )
        self.rendezvous = Rendezvous(self.clock, ranks)
        self.stores = [self._new_store(index) for index in range(kvstores)]
        self.core = self._new_core()
        truth = Truth(self._capacity, self.requests)
        self.executors = [
            self._new_executor(rank, mask_miss, op_faults or OpFaults(), truth)
            for rank in range(ranks)
        ]
        for executor in self.executors:
            executor.deaf = deaf
        self.tokenizers = [self._new_tokenizer(index) for index in range(tokenizers)]
        self._peers: dict[str, Peer] = {
            peer.name: peer for peer in (*self.executors, *self.tokenizers, *self.stores)
        }
        self.hunter = Hunter(self)
        for peer in self._peers.values():
            peer.link.on_broken = partial(self.disconnect, peer, RECONNECT_NS)
            self.clock.at(0, partial(self.connect, peer))
        self.clock.at(TICK_NS, self._tick)

    def _new_core(self) -> Scheduler:
        core = Scheduler(
            self._config,
            name=self.name,
            model="sim",
            ranks=self._ranks,
            first_epoch=1 + 1000 * self._restarts,
            max_unacked=self._max_unacked,
            kvstores=len(self.stores),
            choose_kind=self._choose_kind,
        )
        self.process.start(core)
        return core

    def _new_executor(
        self, rank: int, mask_miss: float, op_faults: OpFaults, truth: Truth
    ) -> SimExecutor:
        executor = SimExecutor(
            rank,
            self._capacity,
            clock=self.clock,
            times=self.times,
            link=Link(self.clock, self.times),
            rendezvous=self.rendezvous,
            to_core=self._mail,
            current_epoch=lambda: self.core.group.engine_epoch,
            depth=self._config.depth,
            stores={store.name: store for store in self.stores},
            truth=truth,
            group=self._index,
        )
        executor.transfers.faults = op_faults
        executor.mask_miss = mask_miss
        return executor

    def _new_tokenizer(self, index: int) -> SimTokenizer:
        return SimTokenizer(
            f"tokenizer-{index}",
            clock=self.clock,
            link=Link(self.clock, self.times),
            to_core=self._mail,
            on_end=self._count_end,
        )

    def _new_store(self, index: int) -> SimStore:
        link = Link(self.clock, self.times)
        return SimStore(f"kvstore-{index}", index=index, link=link, to_core=self._mail)

    # ------------------------------------------------------------ running

    def submit(self, request: SimRequest, tokenizer: int = 0) -> None:
        """Let a request arrive at its time."""
        self.requests[request.rid] = request
        self._open += 1
        target = self.tokenizers[tokenizer]
        self.clock.at(request.arrival_ns - self.clock.now, lambda: target.submit(request))

    def run(self, limit_ns: int = 10**12, *, progress: Callable[[], None] = lambda: None) -> None:
        """Until every request has ended and the device is idle.

        Raises:
            AssertionError: something does not come to an end.
        """
        with without_cycle_search():
            while not self.is_over:
                assert self.clock.now < limit_ns, f"unfinished: {self.unfinished()}"
                self.clock.step()
                progress()

    def verify(self) -> None:
        """Every request ended once, with the oracle's tokens; every block is free again."""
        for request in self.requests.values():
            request.verify(self._capacity.vocab_size)
        stats = self._stats()
        assert (stats.running, stats.waiting, stats.inflight_tokens) == (0, 0, 0), stats
        spare = zip(stats.free_blocks, stats.cached_blocks, stats.pinned_blocks, strict=True)
        assert [sum(classes) for classes in spare] == list(stats.total_blocks), stats
        assert stats.quarantined_blocks == sum(stats.pinned_blocks), stats

    def _stats(self) -> ReplicaStats:
        """What a heartbeat says, as it can be sent: of numbers that Python itself has."""
        stats = self.core.stats()
        msgspec.msgpack.encode(stats)
        return stats

    def covered(self) -> Coverage:
        """What this world has reached so far."""
        coverage, counts = self.coverage, self.coverage.counts
        counts["runs"], counts["requests"] = 1, len(self.requests)
        counts["steps"] = self.steps + self.core.stats().steps
        counts["preemptions"] = self.num_preemptions
        counts["cached tokens"] = self.num_cached_tokens
        counts["external writes"] = self.writer.num_writes
        counts["external writes behind a fence"] = self.writer.fenced_hits
        executors, devices = self.executors, [executor.device for executor in self.executors]
        for name in ("null_rows", "missed_masks", "rejected_drafts"):
            values = [int(getattr(each, name)) for each in (*executors, *devices)]
            counts[name.replace("_", " ")] = sum(values)
        counts["attaches"] = sum(tokenizer.num_attached for tokenizer in self.tokenizers)
        counts["loads and stores"] = sum(each.transfers.num_ended for each in executors)
        links = [peer.link for peer in self._peers.values()]
        counts["broken links"] = sum(link.num_broken for link in links)
        counts["repeated messages"] = sum(link.num_repeated for link in links)
        return coverage

    @property
    def writer(self) -> ExternalWriter:
        """What fills freed blocks."""
        return self.process.writer

    @property
    def is_down(self) -> bool:
        """There is no scheduler now."""
        return self.process.core is None

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

    @property
    def is_over(self) -> bool:
        """Every request has ended, and the device is idle."""
        return self._open == 0 and self._idle()

    def unfinished(self) -> list[str]:
        """Requests without an end."""
        return [r.rid.hex()[-4:] for r in self.requests.values() if not r.terminals]

    # ------------------------------------------------------------ links and processes

    def connect(self, peer: Peer) -> None:
        """A peer dials in, unless it is connected or the scheduler is down."""
        if self.is_down or peer.link.is_up:
            return
        peer.link.open()
        self.clock.trace("up", peer.name)
        match peer:
            case SimExecutor():
                self.feed(ExecutorUp(peer.name, peer.rank))
            case SimStore():
                self.feed(KvstoreUp(peer.name, peer.index))
            case SimTokenizer():
                self.feed(TokenizerUp(peer.name, peer.incarnation))
                peer.link_up()

    def disconnect(self, peer: Peer, back_after_ns: int) -> None:
        """The link is cut; the peer dials again."""
        if peer.link.is_up:
            peer.link.cut()
            self.clock.trace("down", peer.name)
            match peer:
                case SimExecutor():
                    peer.link_down()
                    self.feed(ExecutorDown(peer.name, peer.rank))
                case SimStore():
                    self.feed(KvstoreDown(peer.name, peer.index))
                case SimTokenizer():
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

    def kill_store(self, index: int, back_after_ns: int) -> None:
        """The kvstore dies now and is back, empty, later."""
        store = self.stores[index]
        store.crash()
        self.disconnect(store, back_after_ns)

    def kill_scheduler(self, back_after_ns: int) -> None:
        """The scheduler dies now; a new one, which knows nothing, listens later."""
        if self.is_down:
            return
        self.clock.trace("scheduler down")
        stats = self._stats()
        self.preemptions += stats.preemptions
        self.cached_prompt_tokens += stats.cached_prompt_tokens
        self.steps += stats.steps
        self.process.kill()
        self.on_scheduler(False)
        for peer in self._peers.values():
            if peer.link.is_up:
                peer.link.cut()
                if isinstance(peer, SimExecutor):
                    peer.link_down()
        self.clock.at(back_after_ns, self._start_scheduler)

    def _start_scheduler(self) -> None:
        self._restarts += 1
        self.core = self._new_core()
        self.on_scheduler(True)
        self.rendezvous.resumed(0)  # a new process does not know of a pause
        for peer in self._peers.values():
            self.clock.at(self.clock.random.randrange(20 * MS), partial(self.connect, peer))

    def pause(self) -> None:
        """An operator holds the group."""
        self.feed(Mail("operator", Pause()))

    def resume(self) -> None:
        """An operator lets it go on."""
        self.rendezvous.resumed(self.core.group.group_step)
        self.feed(Mail("operator", Resume()))

    # ------------------------------------------------------------ the scheduler's mail

    def feed(self, event: Event) -> None:
        """An event for the core, if there is one."""
        self.process.feed(event)

    def _post(self, send: Send, after_ns: int) -> None:
        """Over the link of a peer; it leaves `after_ns` from now."""
        if self.to_group(send, after_ns):
            return
        peer, message = self._peers[send.peer], send.message
        match peer, message:
            case (
                SimExecutor(),
                Load()
                | SubmitStep()
                | Reset()
                | StoreBlocks()
                | LoadBlocks()
                | ReleaseBlocks()
                | CompileGrammars(),
            ):
                deliver = partial(peer.receive, message)
            case SimExecutor(), Shutdown():
                deliver = partial(self.kill_executor, peer.rank, RESTART_NS)
            case SimStore(), Lookup():
                deliver = partial(peer.receive, message)
            case SimTokenizer(), Accepted() | TokenBatch() | Finished() | Failed():
                deliver = partial(peer.receive, message)
            case _:
                raise AssertionError(f"{type(message).__name__} is sent to {send.peer}")
        peer.link.send("there", deliver, after_ns=after_ns)

    def _mail(self, peer: str, message: Incoming) -> None:
        self.clock.trace("mail", peer, type(message).__name__)
        self.feed(Mail(peer, message))

    def _tick(self) -> None:
        self.feed(Tick())
        self.clock.at(TICK_NS, self._tick)

    # ------------------------------------------------------------ the end

    def _count_end(self, request: SimRequest) -> None:
        self._open -= len(request.terminals) == 1

    def _idle(self) -> bool:
        """Every step is applied, every watermark has arrived, and every transfer's end."""
        group, engine = self.core.group, self.core.engine
        if self.is_down or engine is None or group.unresolved:
            return False
        stats = self.core.stats()
        if sum(stats.pinned_blocks) > stats.quarantined_blocks:
            return False  # transfers that are still to end
        pairs = zip(group.gpu_done, group.applied, strict=True)
        return all(done >= applied for done, applied in pairs)
