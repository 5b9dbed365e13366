"""Where experts are: plans, one layer's move after the other, each in force from a step on."""

from dataclasses import dataclass, field

from deepmesh.config import SchedulerConfig
from deepmesh.experts import Places, first_places, pack_places, slots_of
from deepmesh.wire.messages import ExpertsPlaced, ExpertStats, PlaceExperts, Shutdown, StepResult

from .expert_orders import ExpertsPlanned, PlanExperts
from .expert_places import arrivals, check_places
from .expert_planner import PlanOptions
from .expert_window import LoadWindow, StepBalance
from .group import Group, StepRecord, group_step_of, make_step_id
from .outbox import Outbox

LEAST_RECORDS = 4  # that a plan is made from
LONGEST_NS = 120_000_000_000  # a rank that has not fetched its experts then does not get to it
HYSTERESIS = 0.01  # of the mean load: what a layer has to gain beside the cost of its moves


@dataclass(slots=True, eq=False)
class _Move:
    """A placement that the ranks fetch experts for."""

    number: int
    layers: dict[int, Places]
    is_first: bool  # of an engine epoch: no step runs before it
    since_ns: int
    waiting: set[int] = field(default_factory=set[int])  # ranks that lack experts still


class ExpertMoves:
    """One per group of ranks; places outlive engine epochs, as executors do.

    An epoch begins with the placement that the one before ended with: ranks say when they have
    what it asks for, and steps follow. Then, as often as configured, all layers are planned anew
    from the rows that came, and moved layer by layer: while the ranks fetch, steps go on; the
    first step behind the last rank's word brings the number of the placement to all of them.
    """

    def __init__(
        self, config: SchedulerConfig, group: Group, outbox: Outbox, *, first_epoch: int
    ) -> None:
        self._config, self._group, self._outbox = config, group, outbox
        self._places: list[Places] = []
        self._shape = (0, 0, 0)  # Capacity.experts
        self._window = LoadWindow(ranks=group.ranks, most=config.experts_window)
        self._balance = StepBalance()
        self._number = make_step_id(first_epoch, 0)  # of the latest placement or plan
        self._move: _Move | None = None
        self._queue: list[tuple[int, Places]] = []  # layers of a plan still to be moved
        self._planning = 0  # number of the plan that is being made
        self._next_plan_ns = 0
        self._num_placements = self._num_moves = 0

    @property
    def may_step(self) -> bool:
        """The ranks agree on where experts are."""
        return self._move is None or not self._move.is_first

    def stats(self) -> ExpertStats:
        """For heartbeats."""
        if self._group.ranks == 1:
            return ExpertStats()
        return ExpertStats(
            busiest_rows=self._balance.busiest,
            mean_rows=self._balance.mean,
            steps=self._balance.histogram(),
            loads=self._window.histogram(),
            placements=self._num_placements,
            moves=self._num_moves,
            touched=self._window.touched,
            touchable=self._window.touchable,
        )

    # ------------------------------------------------------------ engine epochs

    def begin(self, now: int) -> None:
        """All ranks are loaded."""
        group, shape = self._group, self._group.capacities[0].experts
        self._window.begin_epoch(group.group_step)
        if not self._config.experts_interval_s or group.ranks == 1 or not shape[0]:
            return
        if shape != self._shape:
            layers, experts, redundant = self._shape = shape
            slots = slots_of(experts, group.ranks, redundant)
            self._places = [first_places(experts, group.ranks, slots) for _ in range(layers)]
            self._window = LoadWindow(ranks=group.ranks, most=self._config.experts_window)
            self._window.begin_epoch(group.group_step)
        self._order(dict(enumerate(self._places)), now, is_first=True)
        self._next_plan_ns = now + int(self._config.experts_interval_s * 1e9)

    def end(self) -> None:
        """The engine epoch is over: ranks forget what is not in force, and are told anew."""
        self._move, self._queue = None, []
        self._group.placement = 0

    # ------------------------------------------------------------ moves

    def _order(self, layers: dict[int, Places], now: int, *, is_first: bool = False) -> None:
        group = self._group
        self._number += 1
        self._move = _Move(self._number, layers, is_first, now, set(range(group.ranks)))
        message = PlaceExperts(
            group.engine_epoch,
            self._number,
            [(layer, pack_places(places)) for layer, places in layers.items()],
            base=group.placement,
        )
        for peer in group.peers.values():
            self._outbox.send(peer, message)

    def placed(self, message: ExpertsPlaced, now: int) -> None:
        """A rank has the experts of a placement, or cannot get them."""
        move = self._move
        if message.engine_epoch != self._group.engine_epoch or move is None:
            return
        if message.number != move.number:
            return
        if not message.error:
            move.waiting.discard(message.rank)
            if not move.waiting and move.is_first:
                self._enforce(move, now)
            return
        self._give_up(move, [message.rank], message.error)

    def _give_up(self, move: _Move, ranks: list[int], error: str) -> None:
        """Ranks do not get their experts."""
        names = ", ".join(map(str, ranks))
        self._outbox.note("error", "experts cannot be moved", ranks=names, error=error)
        self._move, self._queue = None if not move.is_first else move, []
        for rank in ranks if move.is_first else ():  # they cannot be part of the group
            self._outbox.send(self._group.peers[rank], Shutdown())  # the supervisor starts others

    def before_step(self, now: int) -> None:
        """A step is about to be planned: it may bring a placement, and then the next is ordered."""
        move = self._move
        if move is None or move.waiting or move.is_first:
            return
        experts = self._shape[1]
        for layer, places in move.layers.items():
            self._num_moves += int(arrivals(self._places[layer], places, experts).sum())
            self._places[layer] = places
        self._num_placements += 1
        self._enforce(move, now)

    def _enforce(self, move: _Move, now: int) -> None:
        """From the next step on."""
        self._group.placement, self._move = move.number, None
        if not move.is_first:
            self._outbox.note("info", "experts moved", layer=min(move.layers), number=move.number)
        self._order_next(now)

    def _order_next(self, now: int) -> None:
        if self._queue and self._move is None:
            layer, places = self._queue.pop(0)
            self._order({layer: places}, now)

    # ------------------------------------------------------------ loads and plans

    def answered(self, step: StepRecord, result: StepResult) -> None:
        """A rank's result has been applied."""
        if result.expert_rows:
            step.expert_rows.append(result.expert_rows)
        if result.expert_loads:
            layers = self._group.capacities[result.rank].experts[0]
            self._window.add(group_step_of(step.step_id), layers, result.expert_loads)

    def complete(self, step: StepRecord) -> None:
        """All ranks' have."""
        if step.expert_rows:
            self._balance.add(step.expert_rows)
            step.expert_rows = []

    def tick(self, now: int) -> None:
        """Ask for a plan, if one is due and nothing of the last is left."""
        move = self._move
        if move is not None and move.waiting and now - move.since_ns > LONGEST_NS:
            move.since_ns = now
            self._give_up(move, sorted(move.waiting), "they take too long")
        is_busy = self._planning or self._move is not None or self._queue
        if not self._places or is_busy or now < self._next_plan_ns:
            return
        if not self._group.placement or len(self._window) < LEAST_RECORDS:
            return
        self._next_plan_ns = now + int(self._config.experts_interval_s * 1e9)
        self._number += 1
        self._planning = self._number
        counts, steps = self._window.records()
        _, experts, redundant = self._shape
        ranks, slots = self._places[0].shape
        # an expert that comes takes two passes over its weights, a step one for each slot
        move_cost = 2 / slots / max(1, int(steps.sum())) / ranks
        options = PlanOptions(
            experts + redundant,
            ridge=self._config.experts_ridge_rows,
            move_cost=move_cost,
            hysteresis=HYSTERESIS,
        )
        order = PlanExperts(self._planning, counts, steps, list(self._places), options)
        self._outbox.actions.append(order)

    def planned(self, event: ExpertsPlanned, now: int) -> None:
        """The plan is there."""
        if event.number != self._planning:
            return
        self._planning = 0
        if not self._group.placement:
            return  # an engine epoch has ended meanwhile; the next one plans for itself
        experts = self._shape[1]
        for layer, places in event.layers:
            check_places(places, experts)
            if self._places[layer].shape != places.shape:
                raise ValueError(f"layer {layer}: {places.shape} is not this group's")
        self._queue = list(event.layers)
        self._order_next(now)
