"""Worlds with kvstores: what is stored and loaded is right, in whatever order transfers end."""

import random
from functools import partial

import pytest
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity
from services.scheduler.sim.clock import MS
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.store import OpFaults
from services.scheduler.sim.world import World

CONFIG = SchedulerConfig(max_rows=8, step_tokens=64, chunk_tokens=32)
CAPACITY = Capacity(
    engine_epoch=0,
    rank=0,
    num_global_blocks=40,
    num_window_blocks=24,
    num_state_blocks=8,
    num_slots=8,
    max_model_len=300,
    vocab_size=97,
    window=16,
    block_size=8,
    chunk_align=16,
    has_masks=True,
    prefill_halo=38,
)
SPAN_NS = 600 * MS


def conversations(seed: int, count: int) -> list[SimRequest]:
    """Few long beginnings, asked for again and again: more than the device can keep."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(97) for _ in range(draw.randrange(60, 140))] for _ in range(6)]
    return [
        SimRequest(
            rid=number.to_bytes(16, "big"),
            prompt=draw.choice(beginnings) + [draw.randrange(97) for _ in range(5)],
            max_tokens=draw.randrange(1, 30),
            arrival_ns=draw.randrange(SPAN_NS),
            seed=draw.randrange(1 << 30),
            abort_ns=draw.randrange(1, 20 * MS) if draw.random() < 0.2 else 0,
        )
        for number in range(count)
    ]


def again(request: SimRequest, rid: bytes, arrival_ns: int) -> SimRequest:
    """The same prompt, asked for again."""
    return SimRequest(rid, request.prompt, request.max_tokens, arrival_ns, request.seed)


def simulate(
    seed: int,
    *,
    depth: int = 2,
    ranks: int = 1,
    kvstores: int = 1,
    faults: OpFaults | None = None,
    kills: bool = True,
    capacity: Capacity = CAPACITY,
) -> World:
    world = World(
        replace(CONFIG, depth=depth),
        capacity,
        seed=seed,
        ranks=ranks,
        kvstores=kvstores,
        op_faults=faults,
    )
    for request in conversations(seed, 28):
        world.submit(request)
    if kills:
        world.clock.at(150 * MS, partial(world.kill_executor, 0, 10 * MS))
        world.clock.at(300 * MS, partial(world.kill_scheduler, 10 * MS))
        if kvstores:
            world.clock.at(450 * MS, partial(world.kill_store, 0, 20 * MS))
    world.run()
    world.verify()
    assert world.num_failed == 0
    return world


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefixes_outlive_executors_and_schedulers(depth: int) -> None:
    loaded = 0
    for seed in range(3):
        world = simulate(seed, depth=depth, kvstores=1 + seed % 2)
        loaded += world.core.stores.counters["hit_tokens"]  # by the last scheduler
    assert loaded >= 500


def test_who_waits_for_a_place_is_loaded_ahead() -> None:
    """A store that outlived its executor, and a queue before a device with room for one."""
    faults = OpFaults(late=0.1, twice=0.2, lost=0.1)
    tokens = 0
    for seed in range(3):
        world = World(
            CONFIG, replace(CAPACITY, num_slots=1), seed=seed, kvstores=1, op_faults=faults
        )
        for request in conversations(seed, 20):
            world.submit(request)
        world.clock.at(SPAN_NS, partial(world.kill_executor, 0, 10 * MS))
        draw = random.Random(seed)
        for number, old in enumerate(conversations(seed, 12)):
            later = SPAN_NS + 20 * MS + draw.randrange(5 * MS)
            rid = (1000 + number).to_bytes(16, "big")
            world.submit(again(old, rid, later))
        world.run()
        world.verify()
        tokens += world.core.group.cache.prefetched_tokens
    assert tokens >= 64


def test_transfers_that_go_wrong_cost_time_and_no_tokens() -> None:
    faults = OpFaults(never=0.1, late=0.1, twice=0.3, lost=0.1)
    late = failed = 0
    for seed in range(3):
        world = simulate(seed, faults=faults, ranks=1 + seed % 2)
        late += world.core.stores.counters["loads_late"]
        failed += world.core.stores.counters["loads_failed"]
    assert late >= 1
    assert failed >= 1


def test_transfers_that_never_end_do_not_lock_a_small_device() -> None:
    tiny = replace(CAPACITY, num_global_blocks=24, num_window_blocks=16, num_state_blocks=4)
    world = simulate(5, faults=OpFaults(never=0.15), kills=False, capacity=tiny)
    assert world.core.group.engine_epoch > 1  # the only way to get their blocks back


def test_a_kvstore_changes_no_token() -> None:
    outputs = []
    for kvstores in (0, 1, 2):
        world = simulate(9, kvstores=kvstores)
        ended = [r for r in world.requests.values() if not r.abort_ns]
        outputs.append([(request.rid, request.output) for request in ended])
    assert outputs[0] == outputs[1] == outputs[2]


def test_equal_seeds_give_equal_logs() -> None:
    faults = OpFaults(never=0.05, late=0.1, twice=0.2, lost=0.1)
    assert simulate(3, faults=faults).clock.digest == simulate(3, faults=faults).clock.digest
