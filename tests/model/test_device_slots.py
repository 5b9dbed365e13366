"""Index tensors that a device makes from its slots: those of a plan made on the host."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import Capacity, Pool, SamplingParams, SlotInit
from deepmesh.wire.packed import BLOCK, pack_ids
from kernels.step.slots_portable import ROW_FIELDS, RowFlag, Sampling
from services.executor.batch import BatchRow, StepBatch
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.slots import DeviceSlots
from services.executor.gpu.step import DeviceStep, to_device
from services.executor.kv_cache import KvCache
from services.executor.model_config import ModelConfig, load_config
from services.executor.models.engram import last_compressed_ids
from services.executor.models.plan import Ropes, plan_step

CONFIG = load_config(Path(__file__).parents[2] / "models/tiny")
NUM_SLOTS, MAX_LEN, BLOCKS = 9, 700, 80
on_each = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@dataclass
class Drawn:
    """A request that has ids up to the one to compute."""

    slot: int
    ids: NDArray[np.int32]
    tables: dict[Pool, NDArray[np.int32]]
    state_block: int
    stops: tuple[int, ...] = ()
    max_len: int = MAX_LEN


def drawn(slot: int, length: int, seed: int) -> Drawn:
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, CONFIG.vocab_size, length).astype(np.int32)
    count = -(-length // 64)
    tables = {pool: draw.permutation(BLOCKS)[:count].astype(np.int32) for pool in list(Pool)[:2]}
    return Drawn(slot, ids, tables, int(draw.integers(0, 12)))


class Rig:
    """Slots on a device, and memory that the host shares with it."""

    def __init__(self, device: str) -> None:
        capacity = Capacity(1, 0, BLOCKS, BLOCKS, 12, NUM_SLOTS, MAX_LEN, CONFIG.vocab_size, 64)
        table = np.random.default_rng(1).permutation(CONFIG.vocab_size)
        self.compressed_ids = torch.from_numpy(table)
        self.device = torch.device(device)
        self.slots = DeviceSlots(CONFIG, capacity, self.compressed_ids, 8, self.device)

    def shared(self, values: NDArray[np.int32]) -> Tensor:
        made = torch.from_numpy(values)
        return made.pin_memory() if self.device.type == "cuda" else made

    def apply(self) -> None:
        changes = self.slots.changes.take()
        self.slots.apply(self.shared(changes).data_ptr(), len(changes))
        self.settle()

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def admit(self, *requests: Drawn) -> None:
        for one in requests:
            self.slots.open(
                SlotInit(
                    one.slot,
                    1,
                    rid=one.slot,
                    epoch=0,
                    ids=pack_ids(one.ids),
                    prompt_len=len(one.ids),
                    max_len=one.max_len,
                    sampling=SamplingParams(),
                    stop_ids=pack_ids(list(one.stops)),
                    start=len(one.ids) - 1,
                    state_block=one.state_block,
                )
            )
            rows = [
                (one.slot, 1, int(pool), index, block)
                for pool, table in one.tables.items()
                for index, block in enumerate(table.tolist())
            ]
            self.slots.append(np.array(rows, BLOCK))
        self.apply()

    def begin(self, *slots: int, sampling: Sampling = Sampling.TOKEN) -> None:
        rows = np.full((len(slots), ROW_FIELDS), -1, np.int32)
        rows[:, 0], rows[:, 1], rows[:, 2] = slots, 1, sampling
        self.slots.begin(self.shared(rows).data_ptr(), 0, len(slots))
        self.settle()

    def advance(self, tokens: list[int], finite: list[int]) -> tuple[list[int], list[int]]:
        results = self.shared(np.zeros((2, len(tokens)), np.int32))
        both = [torch.tensor(x, dtype=torch.int32, device=self.device) for x in (tokens, finite)]
        where = results[0].data_ptr(), results[1].data_ptr()
        self.slots.advance(0, len(tokens), (both[0], both[1]), where)
        self.settle()
        return results[0].tolist(), results[1].tolist()

    def plan(self, num_tokens: int) -> DecodeStep:
        step = DecodeStep.empty(CONFIG, num_tokens, self.slots.max_blocks, self.device)
        for tensor in (step.ids, step.last_ids, step.window_slots, step.plain[0]):
            tensor.fill_(77)  # everything has to be written
        self.slots.plan(step)
        self.settle()
        return step


def on_host(requests: list[Drawn], config: ModelConfig) -> tuple[StepBatch, DeviceStep, KvCache]:
    rows = [
        BatchRow(
            one.ids[-1:],
            len(one.ids) - 1,
            one.tables[Pool.GLOBAL],
            one.tables[Pool.WINDOW],
            one.state_block,
            one.ids[:-1],
        )
        for one in requests
    ]
    batch = StepBatch.build(rows, config.context_ids)
    cache = KvCache(config, BLOCKS, BLOCKS, 12)
    plan = plan_step(batch, cache, config, Ropes(config))
    null_row = cache.window.shape[1] - 1
    return batch, to_device(plan, torch.device("cpu"), torch.int32, null_row), cache


LENGTHS = (1, 2, 64, 65, 66, 129, 130, 699)


@on_each
def test_index_tensors_are_those_of_a_plan(device: str) -> None:
    """Odd and even positions, at edges of blocks, with more rows than are selected or fewer."""
    rig = Rig(device)
    requests = [drawn(8 - i, length, seed=i) for i, length in enumerate(LENGTHS)]
    rig.admit(*requests)
    rig.begin(*[one.slot for one in requests])
    found = rig.plan(len(requests))
    batch, wanted, _ = on_host(requests, CONFIG)

    def same(ours: Tensor, theirs: Tensor) -> None:
        assert torch.equal(ours.cpu(), theirs.to(ours.dtype))

    same(found.ids, batch.ids)
    same(found.positions, batch.positions)
    order = CONFIG.engram_max_ngram_size
    row_of = torch.arange(len(requests))
    same(found.last_ids, last_compressed_ids(batch, rig.compressed_ids, row_of, order))
    same(found.state_blocks, batch.state_blocks)
    same(found.window_slots, wanted.window_slots)
    same(found.window_writes, wanted.window_writes)
    width = batch.global_blocks.shape[1]
    same(found.blocks[:, :width], batch.global_blocks)
    assert (found.blocks[:, width:] == -1).all()
    for ours, theirs in ((found.plain, wanted.plain), (found.compressed, wanted.compressed)):
        same(ours[0], theirs[0])
        same(ours[1], theirs[1])
    for ratio, own in found.ratios.items():
        theirs = wanted.ratios[ratio]
        same(own.slots, theirs.slots)
        same(own.visible, (batch.positions + 1) // ratio)
        ends = theirs.ending
        others = torch.ones(len(requests), dtype=torch.bool).index_fill(0, ends, False)
        same(own.write_slots[ends], theirs.write_slots)
        assert (own.write_slots.cpu()[others] == -1).all()
        same(own.angles[0][ends], theirs.angles[0])
        same(own.angles[1][ends], theirs.angles[1])


@on_each
def test_padding_and_rows_of_requests_that_are_done_do_nothing(device: str) -> None:
    rig = Rig(device)
    live, done = drawn(3, 70, seed=0), drawn(5, 71, seed=1)
    rig.admit(live, done)
    rig.slots.end(np.array([5]))
    rig.apply()
    rig.begin(5, 3, -1)
    found = rig.plan(3)
    empty = DecodeStep.empty(CONFIG, 3, rig.slots.max_blocks, rig.device)
    for index in (0, 2):
        for name in ("ids", "last_ids", "positions", "blocks", "state_blocks", "window_slots"):
            assert torch.equal(getattr(found, name)[index], getattr(empty, name)[index]), name
        assert found.window_writes[index] == -1
        assert all((x[index] == 0).all() for x in (*found.plain, *found.compressed))
        for own in found.ratios.values():
            assert (own.slots[index] == -1).all()
            assert (own.visible[index], own.write_slots[index]) == (0, -1)
    assert found.positions.tolist() == [-1, 69, -1]
    flags, ends = rig.advance([7, 8, 9], [1, 1, 1])
    assert flags == [0, RowFlag.LIVE | RowFlag.FINITE, 0]
    assert ends == [0, 70, 0]


@on_each
def test_a_token_is_the_next_steps_input_until_it_ends_the_request(device: str) -> None:
    rig = Rig(device)
    requests = [drawn(slot, 10 + slot, seed=slot) for slot in range(5)]
    requests[1].stops, requests[2].max_len = (40, 41), 13
    rig.admit(*requests)
    took = RowFlag.LIVE | RowFlag.FINITE
    over = took | RowFlag.DONE
    rig.begin(*range(5))
    flags, ends = rig.advance([30, 41, 32, 33, CONFIG.vocab_size], [1, 1, 1, 0, 1])
    lost = RowFlag.LIVE | RowFlag.DONE
    assert flags == [took, over, over, lost, lost]
    assert ends == [10, 11, 12, 13, 14]
    rig.begin(*range(5))
    found = rig.plan(5)
    assert found.positions.tolist() == [10, -1, -1, -1, -1]
    assert found.ids.tolist() == [30, 0, 0, 0, 0]
    newest = [30, *requests[0].ids[::-1][: CONFIG.engram_max_ngram_size - 1].tolist()]
    assert found.last_ids[0].tolist() == rig.compressed_ids[newest].tolist()


@on_each
def test_a_position_without_its_mask_is_computed_again(device: str) -> None:
    rig = Rig(device)
    rig.admit(drawn(2, 10, seed=0))
    rig.begin(2, sampling=Sampling.MISSED)
    assert rig.advance([30], [1]) == ([RowFlag.LIVE], [9])
    rig.begin(2)
    before = rig.plan(1)
    assert before.positions.tolist() == [9]
    assert rig.advance([30], [1]) == ([RowFlag.LIVE | RowFlag.FINITE], [10])


def test_the_last_of_several_changes_counts() -> None:
    rig = Rig("cpu")
    changes = rig.slots.changes
    changes.add(4, [1, 2, 3])
    changes.scatter(np.array([5, 9]), np.array([8, 7]))
    assert changes.take().tolist() == [[4, 1], [5, 8], [6, 3], [9, 7]]
    assert changes.take().shape == (0, 2)
