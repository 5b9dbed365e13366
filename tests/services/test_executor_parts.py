"""Ranks that compute a chunk together do so whether its row is alive or not."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.wire.messages import (
    Capacity,
    Descriptor,
    Load,
    Part,
    Pool,
    Split,
    StepKind,
    SubmitStep,
)
from deepmesh.wire.packed import pack_ids
from services.executor.batch import BatchRow, StepBatch
from services.executor.interface import LiveRows, Sampled
from services.executor.kv_cache import KvCache
from services.executor.runner import ModelEngine
from services.executor.slots import SlotTable
from services.executor.weights import load_model

MODEL = Path(__file__).parents[2] / "models" / "tiny"
BOUNDS = [128, 256, 448]  # of a chunk behind a prefix that the helper lacks
IDS = np.random.default_rng(3).integers(20, 400, BOUNDS[-1]).astype(np.int32)
HOME, BLOCKS = 0, 7
NOBODY = LiveRows(
    *(np.zeros(0, np.int64) for _ in range(4)), *(np.zeros(0, np.bool_) for _ in range(3))
)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ModelEngine]]:
    config = Config(
        mesh=MeshConfig(run_dir=str(tmp_path_factory.mktemp("p"))),
        scheduler=SchedulerConfig(max_rows=2, max_model_len=1024),
        executor=ExecutorConfig(ranks=2, masks=False),
    )
    engines = [ModelEngine(config) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        orders = [Load(1, rank, 2, str(MODEL), "bf16") for rank in range(2)]
        list(pool.map(lambda pair: load(*pair), zip(engines, orders, strict=True)))
    yield engines
    for engine in engines:
        engine.close()


def load(engine: ModelEngine, order: Load) -> Capacity:
    capacity = engine.load(order, lambda stage, done, total: None)
    engine.begin_epoch(1)
    return capacity


def step(rank: int, number: int, split: Split | None, start: int, end: int) -> SubmitStep:
    descriptor = Descriptor(StepKind.PREFILL, BOUNDS[-1], 1, split=split)
    part = Part(
        ids=pack_ids(IDS[max(0, start - 64) : end]),
        global_blocks=pack_ids([(block + rank) % BLOCKS for block in range(BLOCKS)]),
        first_window=0,
        window_blocks=pack_ids(range(BLOCKS)),
        state_block=rank,
    )
    shared = part if split is not None else None
    return SubmitStep(1, (1 << 32) + number, number, 1, descriptor, b"", part=shared)


def both(engines: list[ModelEngine], steps: list[SubmitStep]) -> list[Sampled]:
    """Nobody's row is alive, on either rank."""
    slots = [SlotTable(Capacity(1, rank, BLOCKS, BLOCKS, 2, 1, 512, 4096, 64)) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        return list(
            pool.map(lambda e, s, t: e.compute(NOBODY, s, t), engines, slots, steps, timeout=60)
        )


@pytest.mark.timeout(120)
def test_a_chunk_whose_row_is_dead_is_computed_by_all_and_nobody_draws(
    engines: list[ModelEngine],
) -> None:
    first = Split(HOME, [0, 64, 128], 0, 0)
    rest = Split(HOME, BOUNDS, 0, 0)  # the helper is given the first chunk again
    for number, split in enumerate((first, rest), 1):
        parts = [((rank - HOME - 1) % 2) for rank in range(2)]
        steps = [
            step(rank, number, split, split.bounds[part], split.bounds[part + 1])
            for rank, part in enumerate(parts)
        ]
        if number == 2:  # what the helper had is gone
            for block in range(BLOCKS):
                engines[1 - HOME].cache.poison_block(Pool.GLOBAL, block)
        drawn = both(engines, steps)
        assert [len(sampled.tokens) for sampled in drawn] == [0, 0]
    model = load_model(MODEL, "bf16")
    alone = KvCache(model.config, BLOCKS, BLOCKS, 1)
    row = BatchRow(IDS, 0, range(BLOCKS), range(BLOCKS), 0)
    model.forward(StepBatch.build([row], model.config.context_ids), alone)
    size = KvCache.block_bytes(model.config)[Pool.GLOBAL]
    for block in range(BLOCKS):
        wanted = np.zeros(size, np.uint8)
        alone.export_block(Pool.GLOBAL, block, wanted)
        for rank, engine in enumerate(engines):
            found = np.zeros(size, np.uint8)
            engine.export_block(Pool.GLOBAL, (block + rank) % BLOCKS, found)
            assert np.array_equal(found, wanted), f"rank {rank}, block {block}"
