"""The scheduler's loop: mail in, the core decides, messages, spans and log lines out."""

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from deepmesh import garbage, log
from deepmesh.config import Config
from deepmesh.health import Readiness
from deepmesh.recorder import Desk, Kind
from deepmesh.telemetry import Tracer
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    Attach,
    Capacity,
    Drain,
    ExpertsPlaced,
    Failed,
    FlushCache,
    Generate,
    GpuDone,
    GrammarsCompiled,
    HandOff,
    HandOffDone,
    HandOffRefused,
    HandOffRenew,
    Hits,
    OpDone,
    Pause,
    PrefillFor,
    Progress,
    Resume,
    ServiceStats,
    SetLogLevel,
    Shutdown,
    StepKind,
    StepNote,
    StepResult,
    StopAt,
)
from deepmesh.wire.sockets import Dialer, Identity, LinkEvent, Listener, Peer, PeerDown, PeerUp
from deepmesh.wire.sockets import Mail as LinkMail

from .checkup import Checkup
from .core.events import (
    Action,
    DecoderDown,
    Event,
    ExecutorDown,
    ExecutorUp,
    HandedOver,
    KvstoreDown,
    KvstoreHolds,
    KvstoreUp,
    Mail,
    Note,
    PrefillerDown,
    PrefillerUp,
    RequestEnded,
    RouterDown,
    RouterUp,
    Send,
    StepEnded,
    StepResults,
    Tick,
    TokenizerDown,
    TokenizerUp,
)
from .core.expert_orders import PlanExperts
from .core.scheduler import Scheduler
from .draft_costs import DraftCosts
from .epochs import EpochLog
from .expert_planning import ExpertPlanning
from .steady_clock import SteadyClock
from .steps_seen import StepsSeen
from .traces import Traces

_log = logging.getLogger(__name__)
# Who has a core keeps it for a while: what was sent leaves when this thread waits, however short.
FILL_S = 0.001  # until the second step of an empty pipeline is planned
LET_GO_S = 5e-4  # for first tokens on their way to the tokenizer
LAST_WORDS_S = 1.0  # a drained scheduler waits so long for its last messages to be acknowledged
_ITEMS = ("memory_items", "disk_items", "shared_items")  # of a kvstore's heartbeat
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}


class SchedulerService:
    """One scheduler process: tokenizers and executors dial in, it dials the kvstores."""

    def __init__(self, config: Config, *, index: int, tracer: Tracer) -> None:
        self.name = f"scheduler-{index}"
        self._epochs = EpochLog(Path(config.mesh.run_dir) / "epochs", self.name, int(time.time()))
        self.core = Scheduler(
            config.scheduler,
            name=self.name,
            model=config.mesh.model,
            served_model=config.served_model,
            numerics=config.executor.numerics,
            ranks=config.executor.ranks,
            max_unacked=config.tokenizer.unacked_events,
            kvstores=config.kvstore.count,
            role=config.role(index),
            first_epoch=self._epochs.first,
            encodes_rows=True,
        )
        me = Identity.new("scheduler", self.name, config)
        self.listener = Listener(config.scheduler_address(index), me, config.links, self._stats)
        self._kvstores = [
            Dialer(config.kvstore_address(index), me, config.links, self._stats)
            for index in range(config.kvstore.count)
        ]
        self._kvstore_indices: dict[str, int] = {}  # of those that are up, by name
        self._heard = [ServiceStats()] * config.kvstore.count  # of each: taken note of
        self._prefillers = {
            f"scheduler-{other}": Dialer(
                config.scheduler_address(other), me, config.links, self._stats
            )
            for other in config.prefillers(index)
        }
        self.inbox = Inbox(self.listener, *self._kvstores, *self._prefillers.values())
        self._decoders: set[str] = set()  # keys of schedulers that have dialled in
        self._ready = Readiness(config.mesh.run_dir, self.name, lambda: self._stats().ready)
        self._seen = StepsSeen()
        self._traces = Traces(tracer, self.name, self._seen)
        self._desk = Desk(me, tracer, steps=self._notes, slices=self._seen.slices)
        self._planning = ExpertPlanning(self.inbox.wake)
        self._checkup = Checkup(self.core)
        costs = Path(config.mesh.run_dir) / "draft-costs"
        self._costs = DraftCosts(costs, self.name, ttl_s=config.scheduler.draft_costs_s)
        self.core.group.drafts.learned.update(self._costs.learned())
        self._stops = self._stops_taken = 0
        self._fills = False  # a step has just left, and there is room for another behind it
        self._clock = SteadyClock()
        self._announced = (False, False, False)  # ready, draining, paused

    def stop(self) -> None:
        """Drain; asked again, end at once. Safe from signal handlers and other threads."""
        self._stops += 1
        self.inbox.wake()

    def run(self) -> None:
        """Serve until drained.

        Anything raised here ends the process: its supervisor restarts it, peers see the link go.
        """
        garbage.settle()
        _log.info("listening at %s", self.listener.address)
        try:
            while not self.core.drained:
                self.turn(self.inbox.wait(FILL_S if self._fills else self.core.idle_for()))
            self._say_last_words()
        finally:
            self._ready.close()
            self._costs.keep(self.core.learned())
            self._planning.close()  # it wakes the inbox
            self.inbox.close()

    # ------------------------------------------------------------ the loop

    def turn(self, events: list[LinkEvent]) -> None:
        """Everything that is there, then one Tick: mail is in, plan. Results are applied last, and
        together, unless a peer comes or goes behind them: that may end the engine epoch.

        A device may stand still for want of its next step, so a turn plans one, and whatever else
        is to be said comes behind it: who gets it may run on this core. First tokens are sent
        before that where the device has another step already.
        """
        later: list[Action] = []
        results: list[tuple[str, StepResult]] = []
        began_ns = time.time_ns()
        for event in events:
            if isinstance(event, LinkMail) and isinstance(event.message, StepResult):
                self._seen.result(event, event.message)
                results.append((event.peer.name, event.message))
                continue
            if results and not isinstance(event, LinkMail):
                later += self._handle(StepResults(results))
                results = []
            known = self._translate(event)
            if known is not None:
                later += self._handle(known)
        for order in self._take_orders():
            later += self._handle(Mail("", order))
        for held in self._held():
            later += self._handle(held)
        if (planned := self._planning.take()) is not None:
            later += self._handle(planned)
        if results:
            found = self._handle(StepResults(results))
            if self.core.group.unresolved and _brings_first(found) and not _has_sends(later):
                for action in found:
                    if isinstance(action, Send):
                        self._carry_out(action)
                time.sleep(LET_GO_S)
                found = [action for action in found if not isinstance(action, Send)]
            later += found
        num_steps = self.core.group.group_step
        later += self._handle(Tick(steps=1))
        if self.core.group.group_step > num_steps:
            self._planned(began_ns, num_steps)
            os.sched_yield()  # to the thread that writes it to the socket
            self._fills = self.core.has_room
        else:
            self._fills = False
        for event in events:
            if isinstance(event, LinkMail):
                self._traces.hop(event, self._traceparent)
        for action in later:
            self._carry_out(action)
        self._epochs.note(self.core.group.engine_epoch)
        self._announce()
        self._checkup.look()
        self._costs.look(self.core.learned)
        self._ready.look()

    def _traceparent(self, rid: bytes) -> str:
        request = self.core.registry.live.get(rid)
        return request.generate.traceparent if request is not None else ""

    def _announce(self) -> None:
        """Whether it takes and runs requests is news that cannot wait for the next heartbeat."""
        state = (self.core.engine is not None, self.core.intake.draining, self.core.is_paused)
        if state != self._announced:
            self._announced = state
            self.listener.announce()

    def _take_orders(self) -> list[Drain | Shutdown]:
        first, self._stops_taken = self._stops_taken, self._stops
        return [Shutdown() if order else Drain() for order in range(first, self._stops_taken)]

    def _handle(self, event: Event) -> list[Action]:
        """What is for executors is sent at once; the rest."""
        later: list[Action] = []
        for action in self.core.handle(event, self._clock.now_ns()):
            if _is_for_executor(action):
                self._carry_out(action)
            else:
                later.append(action)
        return later

    def _translate(self, event: LinkEvent) -> Event | None:
        match event:
            case PeerUp(peer):
                _log.info("%s is up", peer.name)
                if peer.service == "executor":
                    return ExecutorUp(peer.name, _rank_of(peer.name))
                if peer.service == "kvstore":
                    return self._kvstore_up(peer)
                if peer.service == "scheduler":
                    return self._scheduler_up(peer)
                if peer.service == "operator":
                    return None  # it gives orders and owns nothing here
                if peer.service == "router":
                    return RouterUp(peer.name)
                return TokenizerUp(peer.name, peer.incarnation)
            case PeerDown(peer, reason):
                _log.warning("%s is lost: %s", peer.name, reason)
                if peer.service == "executor":
                    return ExecutorDown(peer.name, _rank_of(peer.name))
                if peer.service == "kvstore":
                    index = self._kvstore_indices.pop(peer.name, None)
                    return KvstoreDown(peer.name, index) if index is not None else None
                if peer.service == "operator":
                    return None
                if peer.service == "scheduler":
                    return self._scheduler_down(peer)
                if peer.service == "router":
                    return RouterDown(peer.name)
                return TokenizerDown(peer.name)
            case LinkMail():
                return self._mail(event)

    def _kvstore_up(self, peer: Peer) -> KvstoreUp | None:
        for index, dialer in enumerate(self._kvstores):
            if dialer.peer is peer:
                self._kvstore_indices[peer.name] = index
                return KvstoreUp(peer.name, index)
        _log.warning("%s dialled in; kvstores are dialled", peer.name)
        return None

    def _held(self) -> Iterator[KvstoreHolds]:
        """What new heartbeats of kvstores say."""
        for index, dialer in enumerate(self._kvstores):
            peer = dialer.peer
            if peer is not None and peer.stats is not self._heard[index] and peer.stats.stores:
                self._heard[index] = peer.stats
                values = dict(peer.stats.stores[0].values)
                if items := [values[name] for name in _ITEMS if name in values]:
                    yield KvstoreHolds(index, sum(items))

    def _scheduler_up(self, peer: Peer) -> PrefillerUp | None:
        """One that computes prompts is dialled; one that dials in wants them of this one."""
        if self.listener.peers.get(peer.name) is not peer:
            return PrefillerUp(peer.name)
        self._decoders.add(peer.key)
        return None

    def _scheduler_down(self, peer: Peer) -> PrefillerDown | DecoderDown:
        if peer.key not in self._decoders:
            return PrefillerDown(peer.name)
        self._decoders.remove(peer.key)
        return DecoderDown(peer.name)

    def _mail(self, mail: LinkMail) -> Mail | None:
        match mail.message:
            case (
                Generate()
                | Attach()
                | Ack()
                | StopAt()
                | Abort()
                | StepResult()
                | GpuDone()
                | Capacity()
                | Progress()
                | OpDone()
                | Hits()
                | PrefillFor()
                | HandOff()
                | HandOffRefused()
                | HandOffRenew()
                | HandOffDone()
                | GrammarsCompiled()
                | ExpertsPlaced()
                | Drain()
                | FlushCache()
                | Pause()
                | Resume()
                | Shutdown()
            ) as message:
                return Mail(mail.peer.name, message)
            case SetLogLevel(level):
                log.set_level(level)
                return None
            case message:
                _log.warning("ignored a %s of %s", type(message).__name__, mail.peer.name)
                return None

    def _carry_out(self, action: Action) -> None:
        match action:
            case Send(peer, message):
                if isinstance(message, Accepted | Failed):
                    self._note_answer(peer, message)
                index = self._kvstore_indices.get(peer)
                if index is not None:
                    self._kvstores[index].send(message)
                elif isinstance(message, PrefillFor | HandOffRenew | HandOffDone):
                    if peer in self._prefillers:
                        self._prefillers[peer].send(message)
                else:  # a lost peer shows as PeerDown, which requeues
                    self.listener.send(peer, message)
            case Note(level, text, fields):
                line = " ".join([text, *(f"{key}={value}" for key, value in fields.items())])
                _log.log(_LEVELS.get(level, logging.ERROR), "%s", line)
            case RequestEnded():
                action = self._clock.on_wall(action)
                self._seen.request(action)
                self._traces.request(action)
                _log.info(
                    "%s %s prompt=%d cached=%d output=%d preempted=%d %s",
                    action.rid.hex()[:12],
                    action.outcome,
                    action.prompt_tokens,
                    action.cached_tokens,
                    action.output_tokens,
                    action.preemptions,
                    action.detail,
                    extra=log.about(action.rid, action.traceparent),
                )
            case HandedOver():
                self._traces.handed_over(self._clock.on_wall(action))
            case StepEnded():
                action = self._clock.on_wall(action)
                self._seen.step(action, is_busy=bool(self.core.registry.live))
                self._traces.step(action)
            case PlanExperts():
                self._planning.start(action)

    def _note_answer(self, peer: str, message: Accepted | Failed) -> None:
        """In the log at debug: whether a request is taken; its end is there at info."""
        rid = message.rid.hex()[:12]
        if isinstance(message, Failed):
            _log.debug("%s of %s failed: %s %s", rid, peer, message.code.name, message.detail)
        else:
            waiting, live = len(self.core.waiting), len(self.core.registry.live)
            _log.debug("%s of %s accepted: waiting=%d live=%d", rid, peer, waiting, live)

    def _say_last_words(self) -> None:
        """Let the last messages leave: their acknowledgements say that they arrived."""
        deadline = time.monotonic() + LAST_WORDS_S
        while self.core.registry.ended and (left := deadline - time.monotonic()) > 0:
            self.turn(self.inbox.wait(left))

    def _planned(self, began_ns: int, before: int) -> None:
        """A turn has planned steps: what it took, mail and results included."""
        now_ns = time.time_ns()
        self._seen.plan_ns += now_ns - began_ns
        step = self.core.group.group_step
        self._desk.recorder.add((Kind.PLAN, step, began_ns, now_ns, step - before))

    def _notes(self, since_ns: int) -> list[StepNote]:
        live = {request.rid: rid for rid, request in self.core.registry.live.items()}
        return self._seen.notes(since_ns, live)

    def _stats(self) -> ServiceStats:
        stats = replace(
            self.core.stats(),
            failed_audits=self._checkup.num_failed,
            step_totals=self._seen.totals(),
            devices=[work for peer in self.listener.peers.values() if (work := peer.stats.work)],
        )
        return ServiceStats(
            ready=stats.ready, requests=stats.waiting + stats.running, replicas=[stats]
        )


def _is_for_executor(action: Action) -> bool:
    return isinstance(action, Send) and action.peer.startswith("executor-")


def _has_sends(actions: list[Action]) -> bool:
    return any(isinstance(action, Send) for action in actions)


def _brings_first(actions: list[Action]) -> bool:
    """Whether a step with prompts has ended."""
    kinds = (StepKind.PREFILL, StepKind.MIXED)
    return any(isinstance(action, StepEnded) and action.kind in kinds for action in actions)


def _rank_of(name: str) -> int:
    """The rank in "executor-SCHEDULER-RANK"."""
    tail = name.rsplit("-", 1)[-1]
    return int(tail) if tail.isdigit() else 1 << 30
