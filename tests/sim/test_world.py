"""The real core in virtual time: oracle tokens, shadow KV, external writer, audit throughout."""

from functools import partial

import pytest
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity
from services.scheduler.sim.clock import MS, Times
from services.scheduler.sim.shadow import ShadowError
from services.scheduler.sim.workload import mixed
from services.scheduler.sim.world import World

CONFIG = SchedulerConfig(max_rows=8, step_tokens=64, chunk_tokens=32)
ROOMY = Capacity(
    engine_epoch=0,
    rank=0,
    num_global_blocks=400,
    num_window_blocks=160,
    num_state_blocks=24,
    num_slots=12,
    max_model_len=512,
    vocab_size=97,
    window=16,
    block_size=8,
    chunk_align=16,
    prefill_halo=38,
)
TINY = replace(ROOMY, num_global_blocks=20, num_window_blocks=18, num_state_blocks=6, num_slots=7)


def simulate(
    seed: int, depth: int, capacity: Capacity, *, count: int = 16, ranks: int = 1, kills: int = 0
) -> World:
    config = replace(CONFIG, depth=depth)
    world = World(config, capacity, seed=seed, ranks=ranks, mask_miss=0.1)
    for request in mixed(seed, count, capacity):
        world.submit(request)
    for kill in range(kills):
        world.clock.at((15 + 40 * kill) * MS, partial(world.kill_executor, kill % ranks, 8 * MS))
    world.run()
    world.verify()
    assert world.num_failed == 0
    return world


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_crowds_on_a_tiny_device_get_the_oracles_tokens(depth: int) -> None:
    worlds = [simulate(seed, depth, TINY) for seed in range(6)]
    assert sum(world.num_preemptions for world in worlds) >= 20
    assert sum(world.writer.num_writes for world in worlds) >= 1500
    assert sum(world.num_cached_tokens for world in worlds) >= 32


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_device_with_room_never_preempts(depth: int) -> None:
    worlds = [simulate(seed, depth, ROOMY, count=8) for seed in range(2)]
    assert sum(world.num_preemptions for world in worlds) == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_executors_that_die_cost_time_and_no_tokens(depth: int) -> None:
    for seed in range(20, 23):
        world = simulate(seed, depth, TINY, kills=2)
        assert world.core.group.engine_epoch == 3


def test_depth_changes_nothing_but_time() -> None:
    outputs = []
    for depth in (1, 2, 3):
        config = replace(CONFIG, depth=depth)
        world = World(config, TINY, seed=5)
        for request in mixed(77, 14, TINY, abort_share=0):
            request.stop_at = 0
            world.submit(request)
        world.run()
        world.verify()
        outputs.append([request.output for request in world.requests.values()])
    assert outputs[0] == outputs[1] == outputs[2]


def test_depth_two_hides_the_way_over_the_wire() -> None:
    ends = {}
    for depth in (1, 2):
        times = Times(link=800_000)
        world = World(replace(CONFIG, depth=depth), ROOMY, seed=5, times=times, audit_every=0)
        for request in mixed(78, 8, ROOMY, span_ns=1, abort_share=0, grammar_share=0):
            request.stop_ids, request.stop_at, request.max_tokens = frozenset(), 0, 40
            world.submit(request)  # nearly all of its steps decode
        world.run()
        ends[depth] = max(request.ended_ns for request in world.requests.values())
    assert ends[2] < 0.7 * ends[1]


def test_the_same_seed_gives_the_same_events_and_another_one_others() -> None:
    first, again, other = (simulate(seed, 2, TINY, count=10) for seed in (9, 9, 10))
    assert first.clock.digest == again.clock.digest
    assert first.clock.num_events == again.clock.num_events
    assert first.clock.digest != other.clock.digest


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_of_a_group_run_every_step_with_dummies_where_they_have_no_rows(ranks: int) -> None:
    for seed in range(30, 32):
        simulate(seed, 2, TINY, ranks=ranks)


def test_a_rank_that_dies_takes_the_group_down_and_it_comes_back() -> None:
    simulate(33, 2, TINY, ranks=2, kills=2)


def test_freeing_at_tokens_ready_is_caught() -> None:
    """The suite must be able to see a use-after-free: here the watermark runs ahead."""
    world = World(replace(CONFIG, depth=2, prefix_cache=False), TINY, seed=1, audit_every=0)
    for request in mixed(1, 16, TINY):
        world.submit(request)
    world.executors[0].free_at_tokens_ready = True
    with pytest.raises(ShadowError):
        world.run()
