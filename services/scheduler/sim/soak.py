"""Worlds drawn from a seed: geometry, depth, ranks, workload, delays and faults together."""

import random

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity

from .clock import MS, Times
from .faults import KINDS, STORE_KINDS, FaultKind, schedule_faults
from .store import OpFaults
from .workload import mixed
from .world import World


def draw_capacity(draw: random.Random) -> Capacity:
    """A small device: everything runs short now and then."""
    window, block_size = draw.choice([8, 16, 24, 40]), draw.choice([4, 8, 16])
    align = block_size * draw.choice([1, 2, 4])
    least_windows = (window + align + 8) // block_size + 4
    return Capacity(
        engine_epoch=0,
        rank=0,
        num_global_blocks=draw.randrange(144, 480) // block_size,
        num_window_blocks=draw.randrange(least_windows, least_windows + 26),
        num_state_blocks=draw.randrange(1, 12),
        num_slots=draw.randrange(1, 12),
        max_model_len=draw.choice([150, 300, 512]),
        vocab_size=97,
        window=window,
        block_size=block_size,
        chunk_align=align,
        draft_len=draw.choice([0, 0, 1, 3, 7]),
        one_kernel_class=draw.random() < 0.8,
    )


def draw_config(draw: random.Random) -> SchedulerConfig:
    """Depth, budgets and bounds."""
    return SchedulerConfig(
        depth=draw.choice((1, 2, 3)),
        max_rows=draw.randrange(1, 12),
        step_tokens=draw.choice([16, 64, 128]),
        chunk_tokens=draw.choice([16, 32, 64]),
        prefix_cache=draw.random() < 0.8,
    )


def draw_stores(draw: random.Random) -> tuple[int, OpFaults]:
    """Half of the worlds have kvstores; a third of these have transfers that go wrong."""
    if draw.random() < 0.5:
        return 0, OpFaults()
    faults = OpFaults(never=0.05, late=0.1, twice=0.1, lost=0.03)
    return draw.choice([1, 1, 2]), faults if draw.random() < 0.35 else OpFaults()


def draw_world(seed: int, *, faults: int = 0, kinds: tuple[FaultKind, ...] = KINDS) -> World:
    """A world with its workload submitted and its faults scheduled; call `run` and `verify`."""
    draw = random.Random(seed)
    capacity = draw_capacity(draw)
    kvstores, op_faults = draw_stores(random.Random(~seed))
    world = World(
        draw_config(draw),
        capacity,
        seed=seed,
        ranks=draw.choice([1, 1, 1, 2, 3]),
        tokenizers=draw.choice([1, 2]),
        mask_miss=draw.choice([0.0, 0.1, 0.4]),
        times=Times(
            link=draw.choice([10_000, 100_000, 1_000_000]),
            tail=draw.choice([10_000, 300_000, 3_000_000]),
        ),
        max_unacked=draw.choice([8, 2048]),
        kvstores=kvstores,
        op_faults=op_faults,
    )
    workload = mixed(
        seed, draw.randrange(4, 20), capacity, abort_share=draw.choice([0.0, 0.2, 0.5])
    )
    for request in workload:
        world.submit(request, draw.randrange(len(world.tokenizers)))
    for peer in (*world.executors, *world.tokenizers):
        peer.link.duplicates = draw.choice([0.0, 0.1])
    schedule_faults(world, faults, span_ns=150 * MS, kinds=kinds)
    if kvstores and faults:
        schedule_faults(world, 1, span_ns=150 * MS, kinds=STORE_KINDS)
    return world
