"""Worlds drawn from a seed: geometry, depth, ranks, workload, delays and faults together."""

import random
from dataclasses import dataclass, field

from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity, PromptWork, StepCosts

from .clock import MS, Times
from .coverage import STATES
from .faults import KINDS, STORE_KINDS, FaultKind, schedule_faults
from .store import OpFaults
from .workload import mixed
from .world import DEPTHS, World

RANKS = (1, 2, 8, 32, 128)
_WEIGHTS = (50, 25, 17, 6, 2)  # a world of many ranks takes as long as many worlds of one
_RARE = (
    "preempt pending",
    "preempted",
    "loading",
    "parked",
    "orphaned",
    "without an engine",
    "waiting for a prefix",
    "waiting for a kvstore",
)
_HUNTED = (*STATES, *_RARE, *_RARE)  # states that pass quickly are aimed at more often
_CROWDED = ("preempt pending", "preempted")
AUDIT_EVERY = {1: 1, 2: 1, 8: 4, 32: 16, 128: 64}


def draw_capacity(draw: random.Random, *, ranks: int, is_crowd: bool = False) -> Capacity:
    """A small device: everything runs short now and then. The more ranks, the smaller."""
    window, block_size = draw.choice([8, 16, 24, 40]), draw.choice([4, 8, 16])
    align = block_size * draw.choice([1, 2, 4])
    least_windows = (window + align + 8) // block_size + 4
    is_small = ranks > 2 or is_crowd
    tokens = draw.randrange(112, 168) if is_small else draw.randrange(144, 480)
    slots = draw.randrange(6, 9) if is_crowd else draw.randrange(2 if is_small else 1, 12)
    return Capacity(
        engine_epoch=0,
        rank=0,
        num_global_blocks=tokens // block_size,
        num_window_blocks=draw.randrange(least_windows, least_windows + 26) + 20 * is_crowd,
        num_state_blocks=draw.randrange(1, 12) + 8 * is_crowd,
        num_slots=slots if ranks <= 2 else min(slots, 5),
        max_model_len=100 if is_small else draw.choice([150, 300, 512]),
        vocab_size=97,
        window=window,
        block_size=block_size,
        chunk_align=align,
        draft_len=draw.choice([0, 0, 1, 3, 7]),
        one_kernel_class=draw.random() < 0.8,
    )


def draw_config(draw: random.Random, depth: int, *, is_crowd: bool) -> SchedulerConfig:
    """Budgets and bounds."""
    return SchedulerConfig(
        depth=DEPTHS[depth],
        max_rows=draw.randrange(5 if is_crowd else 1, 12),
        step_tokens=draw.choice([16, 64, 128]),
        chunk_tokens=draw.choice([16, 32, 64]),
        prefix_cache=draw.random() < (0.4 if is_crowd else 0.8),
    )


def draw_stores(draw: random.Random) -> tuple[int, OpFaults]:
    """Half of the worlds have kvstores; a third of these have transfers that go wrong."""
    if draw.random() < 0.5:
        return 0, OpFaults()
    faults = OpFaults(never=0.05, late=0.1, twice=0.1, lost=0.03)
    return draw.choice([1, 1, 2]), faults if draw.random() < 0.35 else OpFaults()


def draw_grammars(draw: random.Random) -> tuple[int, int, float]:
    """Grammars that an executor keeps, how long one takes, and how many nobody answers for."""
    kept = draw.choice([0, 1, 3, 256])
    return kept, draw.choice([0, 3, 20]) * MS, draw.choice([0.0, 0.0, 0.2])


def draw_sharing(draw: random.Random, capacity: Capacity) -> tuple[Capacity, int]:
    """A device that computes chunks with others in two of three worlds; tokens of a part."""
    align, last = draw.choice([4, 8]), capacity.max_model_len - 1
    work = PromptWork([0, capacity.window, last], [8, 12, 12 + draw.randrange(20)], align)
    is_shared = capacity.one_kernel_class and draw.random() < 0.67
    return replace(capacity, prompt_work=work if is_shared else None), draw.choice([1, 16])


def draw_draft_costs(draw: random.Random, capacity: Capacity) -> StepCosts:
    """Nobody knows them in a third of the worlds; where drafts are dear few steps have some."""
    if not capacity.draft_len or draw.random() < 0.33:
        return StepCosts()
    most = capacity.num_slots * (1 + capacity.draft_len)
    token_ns = draw.choice([2_000, 50_000, 400_000])
    tiers = sorted({1, most, *(draw.randrange(1, most + 1) for _ in range(draw.randrange(6)))})
    return StepCosts(
        verify=[(tokens, MS + token_ns * tokens) for tokens in tiers],
        draft_base_ns=draw.choice([10_000, 500_000]),
        draft_row_ns=draw.choice([1_000, 20_000]),
    )


def draw_world(
    seed: int,
    *,
    faults: int = 0,
    kinds: tuple[FaultKind, ...] = KINDS,
    ranks: int = 0,
    depth: int = 0,
    audit_every: int = 0,
) -> World:
    """A world with its workload submitted and its faults scheduled; call `run` and `verify`.

    Args:
        ranks, depth: drawn, too, unless given.
        audit_every: as of `World`; chosen by the number of ranks unless given.
    """
    draw = random.Random(seed)
    drawn_ranks, drawn_depth = draw.choices(RANKS, _WEIGHTS)[0], draw.choice((1, 2, 3))
    ranks, depth = ranks or drawn_ranks, depth or drawn_depth
    is_crowd = draw.random() < 0.5
    capacity = draw_capacity(draw, ranks=ranks, is_crowd=is_crowd)
    kvstores, op_faults = draw_stores(random.Random(~seed))
    kept, compile_ns, deaf = draw_grammars(random.Random(seed * 7 + 3))
    capacity, least = draw_sharing(random.Random(seed * 11 + 5), capacity)
    draft_costs = draw_draft_costs(random.Random(seed * 13 + 7), capacity)
    world = World(
        replace(draw_config(draw, depth, is_crowd=is_crowd), context_parallel_tokens=least),
        replace(capacity, grammars=kept, costs=draft_costs),
        seed=seed,
        ranks=ranks,
        tokenizers=draw.choice([1, 2]),
        mask_miss=draw.choice([0.0, 0.1, 0.4]),
        times=Times(
            link=draw.choice([10_000, 100_000, 1_000_000]),
            tail=draw.choice([10_000, 300_000, 3_000_000]),
            compile=compile_ns,
            cpu=0 if ranks <= 2 else draw.choice([50_000, 200_000]),  # mail gathers meanwhile
        ),
        max_unacked=draw.choice([8, 2048]),
        audit_every=audit_every or AUDIT_EVERY.get(ranks, 1),
        kvstores=kvstores,
        op_faults=op_faults,
        deaf=deaf,
    )
    count = draw.randrange(4, 20) if ranks <= 2 else ranks + draw.randrange(8, 16 + ranks // 2)
    if is_crowd:
        count = {1: 16, 2: 32, 128: 320}.get(ranks, 5 * ranks)
    workload = mixed(
        seed,
        count,
        capacity,
        span_ns=(50 if ranks <= 2 else 20) * MS,
        abort_share=0.0 if is_crowd else draw.choice([0.0, 0.2, 0.5]),
        most_output=80 if ranks <= 2 else 30,
        is_crowd=is_crowd,
    )
    hunted = draw.choice([0.0, 0.5, 1.0]) if not is_crowd else draw.choice([0.0, 0.3])
    for request in workload:
        world.submit(request, draw.randrange(len(world.tokenizers)))
        if draw.random() < hunted:
            world.hunter.want(request, draw.choice(_CROWDED if is_crowd else _HUNTED))
    for peer in (*world.executors, *world.tokenizers):
        peer.link.duplicates = draw.choice([0.0, 0.1])
    schedule_faults(world, faults, span_ns=150 * MS, kinds=kinds)
    if kvstores and faults:
        schedule_faults(world, 1, span_ns=150 * MS, kinds=STORE_KINDS)
    return world


@dataclass(frozen=True, slots=True)
class SoakRun:
    """What one world came to."""

    seed: int
    depth: int
    ranks: int
    counts: dict[str, int] = field(default_factory=dict[str, int])
    error: str = ""  # what was wrong, and of which kind
    kind: str = ""  # oracle, audit, shadow, unfinished


def soak_run(
    seed: int, faults: int, ranks: int = 0, depth: int = 0, audit_every: int = 0
) -> SoakRun:
    """Draw, run and verify the world of a seed."""
    world = draw_world(seed, faults=faults, ranks=ranks, depth=depth, audit_every=audit_every)
    error = kind = ""
    try:
        world.run()
        world.verify()
    except AssertionError as found:
        error = f"{type(found).__name__}: {found}"
        kinds = {"AuditError": "audit", "ShadowError": "shadow"}
        kind = kinds.get(type(found).__name__, "unfinished" if world.unfinished() else "oracle")
    coverage = world.covered()
    return SoakRun(seed, coverage.depth, coverage.ranks, dict(coverage.counts), error, kind)
