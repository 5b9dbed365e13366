"""Chunks that all ranks compute together, under shadow KV: when, by what blocks, what may fail."""

import random
from functools import partial

import pytest
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity, PromptWork
from services.scheduler.sim.clock import MS
from services.scheduler.sim.faults import schedule_faults
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.world import World

CONFIG = SchedulerConfig(max_rows=8, step_tokens=64, chunk_tokens=32, context_parallel_tokens=16)
SHARING = Capacity(
    engine_epoch=0,
    rank=0,
    num_global_blocks=200,
    num_window_blocks=80,
    num_state_blocks=24,
    num_slots=12,
    max_model_len=512,
    vocab_size=97,
    window=16,
    block_size=8,
    chunk_align=16,
    prompt_work=PromptWork([0, 511], [10, 30], align=8),
)
TIGHT = replace(
    SHARING, num_global_blocks=66, num_window_blocks=20, num_state_blocks=5, num_slots=4
)


def prompts(seed: int, count: int, *, gap_ns: int, abort_share: float = 0.0) -> list[SimRequest]:
    """Long prompts one after the other, some with a beginning in common."""
    draw = random.Random(seed)
    common = [draw.randrange(97) for _ in range(160)]
    return [
        SimRequest(
            rid=number.to_bytes(16, "big"),
            prompt=common[: draw.choice([0, 0, 64, 160])]
            + [draw.randrange(97) for _ in range(draw.randrange(40, 300))],
            max_tokens=draw.randrange(1, 24),
            arrival_ns=number * gap_ns + draw.randrange(gap_ns),
            seed=draw.randrange(1 << 30),
            grammar=draw.random() < 0.2,
            abort_ns=draw.randrange(1, 40 * MS) if draw.random() < abort_share else 0,
        )
        for number in range(count)
    ]


def world_of(
    seed: int, requests: list[SimRequest], capacity: Capacity = SHARING, **how: int
) -> World:
    config = replace(
        CONFIG,
        depth=how.get("depth", 2),
        context_parallel_tokens=how.get("least", 16),
    )
    world = World(config, capacity, seed=seed, ranks=how.get("ranks", 2), mask_miss=0.1)
    for request in requests:
        world.submit(request)
    return world


@pytest.mark.parametrize(("ranks", "depth"), [(2, 1), (2, 2), (4, 2), (3, 3)])
@pytest.mark.parametrize("halo", [0, 46])
def test_chunks_of_all_ranks_leave_the_oracles_tokens(ranks: int, depth: int, halo: int) -> None:
    capacity = replace(SHARING, prefill_halo=halo)
    world = world_of(7, prompts(7, 8, gap_ns=60 * MS), capacity, ranks=ranks, depth=depth)
    world.run()
    world.verify()
    assert world.num_failed == 0
    assert world.rendezvous.chunks.num_chunks >= 8
    assert world.core.stats().shared_prompt_tokens > 800


def test_a_long_prompt_alone_comes_to_its_first_token_sooner() -> None:
    first: dict[int, int] = {}
    for least in (0, 16):
        world = world_of(3, prompts(5, 1, gap_ns=1), least=least)
        (request,) = world.requests.values()
        request.prompt = request.prompt * 2
        world.run()
        world.verify()
        first[least] = request.first_token_ns - request.arrival_ns
    assert first[16] < 0.8 * first[0]


def test_two_prompts_on_two_ranks_run_side_by_side() -> None:
    requests = prompts(11, 2, gap_ns=1)
    for request in requests:
        request.prompt, request.arrival_ns = [request.rid[-1]] * 200, 0
    world = world_of(11, requests)
    world.run()
    world.verify()
    assert world.rendezvous.chunks.num_chunks == 0


@pytest.mark.parametrize("ranks", [2, 4])
def test_small_pools_lend_and_take_back(ranks: int) -> None:
    chunks = 0
    for seed in range(20, 24):
        requests = prompts(seed, 12, gap_ns=12 * MS)
        world = world_of(seed, requests, replace(TIGHT, prefill_halo=46 * (seed % 2)), ranks=ranks)
        world.run()
        world.verify()
        chunks += world.rendezvous.chunks.num_chunks
    assert chunks > 8


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_request_may_go_at_any_moment_of_its_chunks(depth: int) -> None:
    """Its row is dead, on one rank perhaps before the others know: all compute their parts."""
    chunks = 0
    for moment in range(1, 40, 3):
        requests = prompts(31, 3, gap_ns=30 * MS)
        requests[0].prompt, requests[0].arrival_ns = requests[0].prompt * 2, 0
        requests[0].abort_ns = moment * MS
        world = world_of(moment, requests, TIGHT, depth=depth)
        world.run()
        world.verify()
        chunks += world.rendezvous.chunks.num_chunks
    assert chunks > 12


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_may_die_at_any_moment_of_a_chunk(rank: int) -> None:
    for moment in range(8, 60, 6):
        world = world_of(moment, prompts(41, 3, gap_ns=15 * MS))
        world.clock.at(moment * MS, partial(world.kill_executor, rank, 6 * MS))
        world.run()
        world.verify()
        assert world.num_failed == 0


def test_anything_may_fail() -> None:
    chunks = 0
    for seed in range(60, 66):
        halo = 46 * (seed % 2)
        requests = prompts(seed, 8, gap_ns=15 * MS, abort_share=0.2)
        capacity = replace(SHARING if seed % 3 else TIGHT, prefill_halo=halo)
        world = world_of(seed, requests, capacity, ranks=2 + 2 * (seed % 2), depth=1 + seed % 3)
        schedule_faults(world, 3, span_ns=120 * MS)
        world.run()
        world.verify()
        chunks += world.rendezvous.chunks.num_chunks
    assert chunks > 8
