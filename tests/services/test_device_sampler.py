"""Sampling on a device against that of the CPU: the same tokens and bits, step by step."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import SamplingParams, SlotInit
from deepmesh.wire.packed import pack_ids
from kernels.sampling.sample_cuda import ROW_FIELDS, MaskFlag, SampleBuffers, SampleOut
from services.executor.gpu.flight import NUM_BUFFERS
from services.executor.gpu.sampler import NUM_GIVEN, DeviceSampler
from services.executor.interface import Sampled
from services.executor.memory_plan import Demand, working_bytes
from services.executor.model_config import parse_config
from services.executor.presets import preset_config
from services.executor.sample_row import SampleRow
from services.executor.sampler import sample

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
every_device = pytest.mark.parametrize("device", DEVICES)
NUM_SLOTS, MAX_ROWS = 24, 16
MISSED = 2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def copy(to: Tensor, values: NDArray[np.int32]) -> None:
    to.copy_(torch.from_numpy(values.copy()))


@dataclass
class Request:
    """A request in a slot, with the tokens that the host knows of."""

    init: SlotInit
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)

    def row(self, mask: NDArray[np.int32] | None = None) -> SampleRow:
        return SampleRow(self.init, self.stop_ids, np.array(self.tokens, np.int32), mask)


def some_params(draw: np.random.Generator, vocab: int) -> SamplingParams:
    """Any mixture of parameters, each of them off more often than not."""

    def pick(*values: float) -> float:
        return float(draw.choice([values[0], values[0], *values]))

    def ids(most: int) -> list[int]:
        return draw.choice(vocab, draw.integers(1, min(most, vocab) + 1), replace=False).tolist()

    words = [pack_ids(draw.integers(0, vocab, n).tolist()) for n in (1, 2, 3)]
    bias = [(i, float(draw.normal() * 3)) for i in ids(9)]
    return SamplingParams(
        temperature=pick(1.0, 0.0, 0.3, 2.0),
        top_k=int(pick(0, 1, 5, 40, 2000)),
        top_p=pick(1.0, 0.9, 0.05, 0.9999),
        min_p=pick(0.0, 0.05, 0.5),
        presence_penalty=pick(0.0, 0.7, -1.0),
        frequency_penalty=pick(0.0, 0.3),
        repetition_penalty=pick(1.0, 1.4, 0.7),
        logit_bias=bias if draw.random() < 0.3 else [],
        allowed_token_ids=pack_ids(ids(vocab)) if draw.random() < 0.2 else b"",
        bad_words=words[: draw.integers(1, 4)] if draw.random() < 0.3 else [],
    )


def some_request(draw: np.random.Generator, slot: int, vocab: int, gen: int = 1) -> Request:
    tokens = draw.integers(0, vocab, draw.integers(1, 30)).tolist()
    prompt_len = int(draw.integers(1, len(tokens) + 1))
    init = SlotInit(
        slot=slot,
        gen=gen,
        rid=gen * 100 + slot,
        epoch=0,
        ids=pack_ids(tokens),
        prompt_len=prompt_len,
        max_len=1000,
        min_len=int(draw.choice([0, len(tokens) + 3])),
        sampling=some_params(draw, vocab),
        seed=int(draw.integers(0, 2**62)),
        sub_index=int(draw.integers(0, 3)),
        n_logprobs=min(vocab, int(draw.choice([-1, 0, 3, 20]))),
    )
    stops = draw.integers(0, vocab, 3).tolist()
    return Request(init, frozenset(stops), tokens)


def some_logits(draw: np.random.Generator, rows: int, vocab: int) -> Tensor:
    """Random ones; in some rows ties everywhere, nothing but ties, or what is not finite."""
    logits = torch.from_numpy(draw.normal(size=(rows, vocab)).astype(np.float32))
    logits *= float(draw.choice([0.1, 3.0, 8.0]))
    kinds = draw.choice([*["plain"] * 8, "ties", "flat", "nan", "inf"], rows)
    for row, kind in zip(logits, kinds, strict=True):
        match kind:
            case "ties":
                row[:] = row.round()
            case "flat":
                row[:] = 1.5
            case "nan" | "inf":
                row[draw.integers(vocab)] = float(kind)
    return logits


def sampled(out: SampleOut, num_rows: int) -> Sampled:
    """The first rows of a step's results, which lie in host memory."""
    counts = out.num_top[:num_rows].tolist()
    return Sampled(
        out.tokens[:num_rows].numpy(),
        out.found[:num_rows].numpy() != 0,
        out.logprobs[:num_rows].numpy(),
        [out.top_ids[i, :count].numpy() for i, count in enumerate(counts)],
        [out.top_logprobs[i, :count].numpy() for i, count in enumerate(counts)],
    )


class Rig:
    """A device's sampler and the requests in its slots."""

    def __init__(self, device: str, vocab: int, seed: int) -> None:
        self.device, self.vocab = torch.device(device), vocab
        self.draw = np.random.default_rng(seed)
        self.sampler = DeviceSampler(NUM_SLOTS, vocab, MAX_ROWS, self.device)
        self.requests = [self.open(slot) for slot in range(NUM_SLOTS)]

    def open(self, slot: int, gen: int = 1) -> Request:
        request = some_request(self.draw, slot, self.vocab, gen)
        self.sampler.stage(request.row())
        return request

    def some_masks(self, count: int) -> tuple[list[int], list[NDArray[np.int32] | None]]:
        """States of rows, and the masks of those that have one."""
        states = self.draw.choice([MaskFlag.FREE, MaskFlag.FREE, MaskFlag.MASK, 0, 3], count)
        words = -(-self.vocab // 32)
        masks = self.draw.integers(-(2**31), 2**31, (count, words)).astype(np.int32)
        return states.tolist(), [
            m if state == MaskFlag.MASK else None for m, state in zip(masks, states, strict=True)
        ]

    def run(
        self,
        logits: Tensor,
        slots: list[int],
        states: list[int],
        masks: list[NDArray[np.int32] | None],
    ) -> tuple[Sampled, list[int]]:
        """One step, a slot -1 being padding: what was sampled, and the kinds of rows behind it."""
        sampler, count = self.sampler, len(slots)
        sampler.flush(copy)
        rows = np.full((count, ROW_FIELDS), -1, np.int32)
        starts = np.full(count, -1, np.int32)
        sampler.states[:count] = torch.tensor(states, dtype=torch.int32)
        for i, slot in enumerate(slots):
            if slot >= 0:
                total = len(self.requests[slot].tokens)
                width = 1 + i % min(3, total)
                rows[i], starts[i] = (slot, width, 1), total - width
            if (mask := masks[i]) is not None:
                sampler.masks[i] = torch.from_numpy(mask).to(self.device)
        on = torch.from_numpy(rows).to(self.device)
        sampler.out.all.fill_(-7)
        sampler.sample(logits.to(self.device), on, torch.from_numpy(starts).to(self.device))
        found = sampled(SampleOut.over(sampler.out.all.cpu()), count)
        return found, on[:, 2].tolist()

    def check(self, logits: Tensor, slots: list[int]) -> None:
        """One step against the CPU's sampler; requests get their tokens."""
        states, masks = self.some_masks(len(slots))
        ours, kinds = self.run(logits, slots, states, masks)
        for i, slot in enumerate(slots):
            may_draw = slot >= 0 and states[i] in (MaskFlag.FREE, MaskFlag.MASK)
            assert kinds[i] == (-1 if slot < 0 else 1 if may_draw else MISSED)
            if not may_draw:
                assert not ours.finite[i]
                assert ours.logprobs[i] == 0
                continue
            request = self.requests[slot]
            wanted = sample(logits[i : i + 1], [request.row(masks[i])])
            assert bool(ours.finite[i]) == bool(wanted.finite[0])
            if not wanted.finite[0]:
                continue
            assert ours.tokens[i] == wanted.tokens[0], request
            assert ours.logprobs[i] == wanted.logprobs[0]
            assert ours.top_ids[i].tolist() == wanted.top_ids[0].tolist()
            assert ours.top_logprobs[i].tolist() == wanted.top_logprobs[0].tolist()
            request.tokens.append(int(wanted.tokens[0]))


@every_device
@pytest.mark.parametrize(
    ("vocab", "steps"), [(1, 6), (7, 30), (33, 30), (1000, 30), (2051, 20), (4096, 20)]
)
def test_tokens_are_those_of_the_cpu_whatever_is_asked_for(
    device: str, vocab: int, steps: int
) -> None:
    rig = Rig(device, vocab, seed=vocab)
    for step in range(steps):
        count = int(rig.draw.integers(1, MAX_ROWS + 1))
        slots = rig.draw.choice(NUM_SLOTS, count, replace=False)
        slots[rig.draw.random(count) < 0.2] = -1
        rig.check(some_logits(rig.draw, count, vocab), slots.tolist())
        slot = step % NUM_SLOTS  # a request leaves, another one comes
        rig.requests[slot] = rig.open(slot, gen=step + 2)


@every_device
def test_tokens_are_those_of_the_cpu_over_a_large_vocabulary(device: str) -> None:
    rig = Rig(device, 129_280, seed=5)
    rig.check(some_logits(rig.draw, 6, 129_280), [3, 9, 1, -1, 22, 8])


@every_device
def test_a_row_depends_on_nothing_but_its_request(device: str) -> None:
    vocab, count = 777, 12
    together, alone = Rig(device, vocab, seed=2), Rig(device, vocab, seed=2)
    wide = torch.zeros(MAX_ROWS, vocab + 5)[:, :vocab]  # rows of another stride
    for step in range(4):
        states, masks = together.some_masks(count)
        logits = some_logits(together.draw, count, vocab)
        slots = [(7 * i + step) % NUM_SLOTS for i in range(count)]
        ours, kinds = together.run(logits, slots, states, masks)
        for i in together.draw.permutation(count).tolist():
            place = int(together.draw.integers(MAX_ROWS))
            wide[place] = logits[i]
            at, other = [-1] * MAX_ROWS, [int(MaskFlag.MASK)] * MAX_ROWS
            at[place], other[place] = slots[i], states[i]
            own: list[NDArray[np.int32] | None] = [None] * MAX_ROWS
            own[place] = masks[i]
            single, kind = alone.run(wide, at, other, own)
            assert kind[place] == kinds[i]
            assert single.finite[place] == ours.finite[i]
            assert single.tokens[place] == ours.tokens[i]
            assert single.logprobs[place] == ours.logprobs[i]
            assert single.top_logprobs[place].tolist() == ours.top_logprobs[i].tolist()
            if ours.finite[i]:
                for rig in (together, alone):
                    rig.requests[slots[i]].tokens.append(int(ours.tokens[i]))


def test_its_memory_is_what_the_plan_says() -> None:
    config = parse_config(preset_config("v41-flash", layers=2))
    vocab, rows, slots = config.vocab_size, 64, 3
    buffers = SampleBuffers.of(slots, vocab, rows, torch.device("cpu"))
    held = (buffers.records, buffers.states, buffers.masks, buffers.out.all, buffers.scratch)
    everything = SamplingParams(
        presence_penalty=1.0,
        logit_bias=[(3, 1.0)],
        allowed_token_ids=pack_ids(range(99)),
        bad_words=[pack_ids([1, 2, 3])] * 64,
    )
    init = SlotInit(0, 1, 1, 0, pack_ids([1]), 1, 100, min_len=9, sampling=everything)
    tables: list[int] = []
    sampler = DeviceSampler(slots, vocab, 1, torch.device("cpu"))
    sampler.stage(SampleRow(init, frozenset([2]), np.array([1], np.int32)))
    sampler.flush(lambda to, _: tables.append(4 * to.numel()))
    used = sum(part.nbytes for part in held) + slots * max(tables)
    planned = working_bytes(config, Demand(rows, 1, slots), 1)["sampling"]
    assert used <= planned <= 1.3 * used


def test_shapes_that_do_not_fit_are_refused_by_name() -> None:
    rig = Rig("cpu", 40, seed=0)
    rows, starts = torch.zeros(2, ROW_FIELDS, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"logits: \[2, 41\]"):
        rig.sampler.sample(torch.zeros(2, 41), rows, starts)
    with pytest.raises(ValueError, match=r"starts: \[1\] for 2"):
        rig.sampler.sample(torch.zeros(2, 40), rows, starts[:1])


@pytest.mark.gpu
@pytest.mark.parametrize(("vocab", "count"), [(1000, 5), (4096, 16)])
def test_a_graph_samples_what_single_launches_do_and_nobody_waits(vocab: int, count: int) -> None:
    eager, graph = Rig("cuda", vocab, seed=3), Rig("cuda", vocab, seed=3)
    for rig in (eager, graph):
        rig.sampler.flush(copy)
    kinds, draw = {"dtype": torch.int32, "device": "cuda"}, eager.draw
    logits = torch.empty(count, vocab, device="cuda")
    rows, starts = torch.full((count, ROW_FIELDS), -1, **kinds), torch.full((count,), -1, **kinds)
    graph.sampler.capture(logits, rows, starts)
    for _ in range(6):
        given = np.full((count, ROW_FIELDS), 1, np.int32)
        given[:, 0] = np.where(draw.random(count) < 0.2, -1, draw.choice(NUM_SLOTS, count, False))
        begins = [len(eager.requests[slot].tokens) - 1 for slot in given[:, 0].tolist()]
        logits.copy_(some_logits(draw, count, vocab))
        starts.copy_(torch.tensor(begins, dtype=torch.int32))
        found: list[Tensor] = []
        for rig in (eager, graph):
            on = rows if rig is graph else rows.clone()
            on.copy_(torch.from_numpy(given))
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                rig.sampler.sample(logits, on, starts)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            found.append(rig.sampler.out.all.clone())
        assert torch.equal(*found)
        for slot, token in zip(given[:, 0].tolist(), found[0][:count].tolist(), strict=True):
            if slot >= 0:
                eager.requests[slot].tokens.append(token)


def test_changes_stay_until_every_step_that_may_read_them_is_over() -> None:
    assert NUM_GIVEN > NUM_BUFFERS
