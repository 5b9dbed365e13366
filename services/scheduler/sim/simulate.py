"""One simulated run of a workload on a group of ranks: from a scenario to figures."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import StepCosts

from ..core.audit import AuditError
from .baselines import POLICIES
from .clock import US, Times
from .measures import Record, measure
from .requests import SimRequest
from .shadow import ShadowError
from .traffic import DEFAULT_COSTS, VOCAB, device_of
from .world import DEPTHS, World

AUDIT_EVERY = 256  # looks of the scheduler at its mail; all other checks are always on
STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated."""

    ranks: int
    rows: int  # requests that decode side by side on a rank
    seed: int
    depth: int = 2
    policy: str = "mixed"
    steps: int = 0  # group steps after which nothing arrives any more; 0: all requests arrive
    costs: StepCosts = DEFAULT_COSTS
    prefill_share: float = 1.0  # of an accelerator, on which a chunk hardly prolongs a step


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    figures: dict[str, float]
    record: Record
    digest: str
    tail_ns: int = 0
    errors: list[str] = field(default_factory=list[str])
    oracle_mismatches: int = 0
    audit_failures: int = 0
    unfinished: int = 0

    @property
    def ok(self) -> bool:
        """Nothing was wrong."""
        return not (self.errors or self.oracle_mismatches or self.unfinished)


def simulate(
    scenario: Scenario,
    requests: Iterator[SimRequest],
    *,
    progress: Callable[[int, int], None] = lambda steps, ended: None,
    prepare: Callable[[World], None] = lambda world: None,
) -> Outcome:
    """Run it; `progress` hears of group steps and ended requests now and then.

    `prepare` may change the world before it runs: slow a rank down, schedule a fault.
    """
    world = build(scenario)
    prepare(world)
    record = Record()
    record.watch(world)
    _Arrivals(world, record, requests, scenario.steps).next()
    outcome = Outcome({}, record, "", world.times.tail)
    reported = 0

    def look() -> None:
        nonlocal reported
        if len(record.spans) >= reported + 10:
            reported = len(record.spans)
            progress(reported, len(record.ended))

    try:
        world.run(progress=look)
    except AuditError as error:
        outcome.audit_failures += 1
        outcome.errors.append(str(error))
    except (ShadowError, AssertionError) as error:
        outcome.errors.append(str(error))
    for request in world.requests.values():
        if not request.terminals:
            outcome.unfinished += 1
        elif not request.is_right(VOCAB):
            outcome.oracle_mismatches += 1
    outcome.figures = measure(world, record)
    outcome.digest = world.clock.digest
    return outcome


def build(scenario: Scenario) -> World:
    """The world of a scenario, without requests."""
    costs = scenario.costs
    times = Times(
        step=costs.base_ns,
        token=costs.prefill_token_ns,
        row=costs.decode_row_ns,
        context=costs.context_kilotoken_ns,
        straggle=0.05,
        cpu=150 * US,
        cpu_rank=20 * US,
    )
    config = SchedulerConfig(
        depth=DEPTHS[scenario.depth],
        max_rows=scenario.rows,
        step_tokens=STEP_TOKENS,
        chunk_tokens=STEP_TOKENS,
        max_waiting=1 << 20,
        deadline_s=3600.0,
        prefill_share=scenario.prefill_share,
    )
    return World(
        config,
        device_of(scenario.rows, costs),
        seed=scenario.seed,
        ranks=scenario.ranks,
        times=times,
        audit_every=AUDIT_EVERY,
        choose_kind=POLICIES[scenario.policy],
    )


class _Arrivals:
    """Lets one request after another arrive, until there were steps enough."""

    def __init__(
        self, world: World, record: Record, requests: Iterator[SimRequest], steps: int
    ) -> None:
        self._world, self._record = world, record
        self._requests, self._steps = requests, steps

    def next(self) -> None:
        """Submit the next one, and come back when it arrives."""
        if self._steps and len(self._record.spans) >= self._steps:
            return
        request = next(self._requests, None)
        if request is not None:
            clock = self._world.clock
            self._world.submit(request)
            clock.at(request.arrival_ns - clock.now, self.next)
