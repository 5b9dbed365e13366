"""Two groups, one of which computes the prompts: right tokens whatever dies, is late, is short."""

import random
from collections.abc import Callable
from functools import partial

import pytest
from msgspec.structs import replace

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import Capacity, HandoverStats
from services.scheduler.sim.clock import MS, SECOND
from services.scheduler.sim.link import MISHAPS, WAYS
from services.scheduler.sim.pair import Pair
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.store import OpFaults

CONFIG = SchedulerConfig(max_rows=8, step_tokens=64, chunk_tokens=32)
CAPACITY = Capacity(
    engine_epoch=0,
    rank=0,
    num_global_blocks=64,
    num_window_blocks=40,
    num_state_blocks=12,
    num_slots=8,
    max_model_len=300,
    vocab_size=97,
    window=16,
    block_size=8,
    chunk_align=16,
    has_masks=True,
    block_bytes=(100, 10, 1),
)
SMALL = replace(CAPACITY, num_global_blocks=40, num_window_blocks=24, num_state_blocks=6)
SPAN_NS = 400 * MS
Disturb = Callable[[Pair], None]


def prompts(seed: int, count: int, *, aborts: float = 0.2) -> list[SimRequest]:
    """Some beginnings that several share, and prompts of their own, shorter than a chunk, too."""
    draw = random.Random(seed)
    beginnings = [[draw.randrange(97) for _ in range(draw.randrange(40, 140))] for _ in range(4)]
    requests: list[SimRequest] = []
    for number in range(count):
        own = [draw.randrange(97) for _ in range(draw.randrange(1, 80))]
        prompt = draw.choice(beginnings) + own[:20] if draw.random() < 0.5 else own
        requests.append(
            SimRequest(
                rid=number.to_bytes(16, "big"),
                prompt=prompt,
                max_tokens=draw.randrange(1, 30),
                arrival_ns=draw.randrange(SPAN_NS),
                seed=draw.randrange(1 << 30),
                grammar=draw.random() < 0.2,
                sub_index=draw.randrange(3),
                abort_ns=draw.randrange(1, 20 * MS) if draw.random() < aborts else 0,
            )
        )
    return requests


def simulate(
    seed: int,
    disturb: Disturb = lambda pair: None,
    *,
    config: SchedulerConfig = CONFIG,
    depth: int = 2,
    ranks: int = 1,
    kvstores: int = 0,
    faults: OpFaults | None = None,
    capacity: Capacity = CAPACITY,
    aborts: float = 0.2,
    count: int = 14,
) -> Pair:
    pair = Pair(
        replace(config, depth=depth),
        capacity,
        seed=seed,
        ranks=ranks,
        kvstores=kvstores,
        faults=faults,
    )
    for request in prompts(seed, count, aborts=aborts):
        pair.submit(request)
    disturb(pair)
    pair.run()
    pair.verify()
    assert pair.decode.num_failed == 0
    return pair


def stats(pair: Pair) -> HandoverStats:
    return pair.decode.core.stats().handovers


@pytest.mark.parametrize(("depth", "ranks"), [(1, 1), (2, 2), (3, 1)])
def test_prompts_that_another_group_computes_bring_the_same_tokens(depth: int, ranks: int) -> None:
    pair = simulate(1, depth=depth, ranks=ranks, aborts=0.0)
    seen = stats(pair)
    assert seen.loaded >= 3
    assert seen.failed == 0
    assert seen.tokens >= 16 * seen.loaded
    assert seen.bytes >= seen.loaded * 111
    assert pair.prefill.core.stats().handovers.served == seen.loaded


def kill_all_in_turn(pair: Pair) -> None:
    at = pair.clock.at
    at(60 * MS, partial(pair.prefill.kill_executor, 0, 10 * MS))
    at(120 * MS, partial(pair.decode.kill_executor, 0, 10 * MS))
    at(180 * MS, partial(pair.prefill.kill_scheduler, 10 * MS))
    at(240 * MS, partial(pair.decode.kill_scheduler, 10 * MS))
    at(300 * MS, pair.cut)


def test_either_side_may_die_and_the_link_be_cut() -> None:
    loaded = 0
    for seed in range(3):
        pair = simulate(seed, kill_all_in_turn, depth=1 + seed % 3, ranks=1 + seed % 2)
        loaded += stats(pair).loaded  # by the last scheduler
    assert loaded >= 3


def test_without_the_other_group_prompts_are_computed_here() -> None:
    pair = simulate(3, lambda pair: pair.prefill.kill_scheduler(2 * SECOND))
    assert stats(pair).loaded == 0


@pytest.mark.parametrize("way", ["there", "back"])
@pytest.mark.parametrize("mishap", ["lose", "repeat", "overtake", "delay"])
def test_messages_between_the_groups_may_be_lost_doubled_or_late(way: str, mishap: str) -> None:
    def disturb(pair: Pair) -> None:
        for at in range(20, 380, 30):
            pair.clock.at(at * MS, partial(pair.link.spoil, way, mishap))

    assert stats(simulate(1, disturb, aborts=0.3)).asked >= 3


def test_transfers_that_fail_are_late_or_short_cost_time_and_no_tokens() -> None:
    faults = OpFaults(never=0.05, late=0.1, twice=0.3, lost=0.05, full=0.1)
    loaded = failed = 0
    for seed in range(3):
        pair = simulate(seed, faults=faults, ranks=1 + seed % 2)
        loaded += stats(pair).loaded
        failed += stats(pair).failed
    assert loaded >= 3
    assert failed >= 3


def test_blocks_of_a_transfer_that_never_ends_are_counted_and_not_given_away() -> None:
    quarantined = 0
    for seed in range(2):
        pair = simulate(seed, faults=OpFaults(never=0.3), aborts=0.0)
        quarantined += pair.decode.core.stats().quarantined_blocks
    assert quarantined >= 1


def test_small_devices_do_not_lock() -> None:
    """Prompts that are loaded take nothing that running ones need to end (B40)."""
    for seed in range(2):
        faults = OpFaults(never=0.05, lost=0.05)
        simulate(seed, capacity=SMALL, faults=faults if seed % 2 else None)


def test_what_another_group_does_not_bring_a_kvstore_may_have() -> None:
    hits = 0
    for seed in range(2):
        pair = simulate(seed, kill_all_in_turn, kvstores=1, faults=OpFaults(full=0.5))
        hits += pair.decode.core.stores.counters["hit_tokens"]
    assert hits >= 16


def test_a_group_that_is_late_is_not_waited_for() -> None:
    config = replace(CONFIG, handover_wait_s=0.01)
    pair = simulate(
        1, lambda pair: setattr(pair.prefill.executors[0], "slower", 20.0), config=config
    )
    assert stats(pair).failed >= 2


def test_where_kernels_differ_by_class_the_prompt_alone_is_handed_over() -> None:
    capacity = replace(CAPACITY, one_kernel_class=False)
    for seed in range(2):
        simulate(seed, kill_all_in_turn, capacity=capacity)


def test_equal_seeds_give_equal_logs() -> None:
    faults = OpFaults(never=0.05, late=0.1, twice=0.2, lost=0.1)
    first, second = (simulate(4, kill_all_in_turn, faults=faults) for _ in range(2))
    assert first.clock.digest == second.clock.digest


@pytest.mark.long
@pytest.mark.timeout(600)
def test_many_worlds_with_mishaps_of_all_kinds() -> None:
    """On 1 to 3 ranks, with kvstores or without, small devices and large ones."""
    loaded = failed = 0
    for seed in range(1000, 1024):
        draw = random.Random(seed)

        def disturb(pair: Pair, draw: random.Random = draw) -> None:
            for _ in range(draw.randrange(6)):
                act = draw.choice(
                    [
                        partial(pair.prefill.kill_executor, 0, 10 * MS),
                        partial(pair.decode.kill_executor, 0, 10 * MS),
                        partial(pair.prefill.kill_scheduler, 10 * MS),
                        partial(pair.decode.kill_scheduler, 10 * MS),
                        pair.cut,
                        partial(pair.link.spoil, draw.choice(WAYS), draw.choice(MISHAPS)),
                    ]
                )
                pair.clock.at(draw.randrange(SPAN_NS), act)

        pair = simulate(
            seed,
            disturb,
            depth=1 + seed % 3,
            ranks=1 + seed // 3 % 3,
            kvstores=seed % 2,
            count=24,
            capacity=draw.choice([SMALL, CAPACITY]),
            faults=OpFaults(
                never=draw.choice([0.0, 0.05]), late=0.05, twice=0.1, lost=0.02, full=0.05
            ),
        )
        loaded += stats(pair).loaded
        failed += stats(pair).failed
    assert loaded >= 100
    assert failed >= 30
