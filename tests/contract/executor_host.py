"""Plays the scheduler towards an executor: slots, blocks, steps, results."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    Descriptor,
    DoneReason,
    GpuDone,
    Grammar,
    Pool,
    RowMode,
    RowSource,
    SamplingParams,
    SlotInit,
    StepKind,
    StepResult,
    StepStatus,
    SubmitStep,
)
from deepmesh.wire.packed import BLOCK, CANCEL, RESULT, ROW, SLOT, pack_ids, unpack_ids
from services.executor.interface import Executor
from tests.tiny import VOCAB_SIZE

GREEDY = SamplingParams(temperature=0.0)
WAIT_S = 60.0  # for a result; a test that waits so long has failed


@dataclass
class Request:
    """One request in a slot, and what came of it."""

    init: SlotInit
    prompt: list[int]
    next_start: int
    last_step: int = 0
    tables: dict[Pool, list[int]] = field(
        default_factory=lambda: {Pool.GLOBAL: [], Pool.WINDOW: []}
    )
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    done: DoneReason = DoneReason.NONE
    num_null: int = 0

    @property
    def is_prefill(self) -> bool:
        """Whether prompt ids are left to submit."""
        return self.next_start < len(self.prompt)


class Host:
    """Hands out slots and blocks in an order drawn from `seed`."""

    def __init__(
        self, executor: Executor, capacity: Capacity, *, epoch: int = 1, seed: int = 0
    ) -> None:
        self.executor, self.capacity, self.epoch = executor, capacity, epoch
        draw = random.Random(seed)
        sizes = {
            Pool.GLOBAL: capacity.num_global_blocks,
            Pool.WINDOW: capacity.num_window_blocks,
            Pool.STATE: capacity.num_state_blocks,
        }
        self.free = {pool: draw.sample(range(size), size) for pool, size in sizes.items()}
        self.slots = draw.sample(range(capacity.num_slots), capacity.num_slots)
        self.gen = 0
        self.step_id = epoch << 40
        self.pending_init: list[SlotInit] = []
        self.pending_blocks: list[tuple[int, ...]] = []
        self.in_flight: dict[int, list[Request | None]] = {}
        self.watermarks: list[int] = []
        self.ops_done: list[tuple[int, int]] = []
        self.results: list[StepResult] = []

    def admit(
        self,
        prompt: Sequence[int],
        max_new: int,
        *,
        start: int = 0,
        tables: dict[Pool, list[int]] | None = None,
        state_block: int | None = None,
        prompt_len: int = 0,
        sampling: SamplingParams = GREEDY,
        seed: int = 0,
        sub_index: int = 0,
        stop_ids: Sequence[int] = (),
        min_len: int = 0,
        n_logprobs: int = 0,
        grammar: Grammar | None = None,
    ) -> Request:
        """Put a request into a slot; its first step will say so."""
        self.gen += 1
        init = SlotInit(
            self.slots.pop(),
            self.gen,
            rid=1000 + self.gen,
            epoch=self.gen % 3,
            ids=pack_ids(list(prompt)),
            prompt_len=prompt_len or len(prompt),
            max_len=(prompt_len or len(prompt)) + max_new,
            min_len=min_len,
            sampling=sampling,
            seed=seed,
            sub_index=sub_index,
            stop_ids=pack_ids(list(stop_ids)),
            n_logprobs=n_logprobs,
            grammar=grammar,
            start=start,
            state_block=self.free[Pool.STATE].pop() if state_block is None else state_block,
        )
        self.pending_init.append(init)
        request = Request(init, list(prompt), start)
        for pool, blocks in (tables or {}).items():
            for block in blocks:
                self._give(request, pool, block)
        return request

    def _give(self, request: Request, pool: Pool, block: int) -> None:
        table = request.tables[pool]
        where = (request.init.slot, request.init.gen, int(pool), len(table), block)
        self.pending_blocks.append(where)
        table.append(block)

    def reserve(self, request: Request, end: int) -> None:
        """Blocks for all positions below `end`."""
        for pool, table in request.tables.items():
            while len(table) * self.capacity.block_size < end:
                self._give(request, pool, self.free[pool].pop())

    def prefill_row(self, request: Request, count: int) -> tuple[Request, np.void]:
        """The next `count` prompt ids at most; samples if they are the last."""
        start = request.next_start
        end = min(start + count, len(request.prompt))
        row = self._row(request, RowMode.PREFILL, RowSource.HOST, end - start)
        row["start_lo"] = row["start_hi"] = start
        row["sample"] = end == len(request.prompt)
        request.next_start = end
        self.reserve(request, end)
        return request, row

    def decode_row(self, request: Request) -> tuple[Request, np.void]:
        """One more token behind whatever is in flight."""
        row = self._row(request, RowMode.DECODE, RowSource.DEVICE, 1)
        row["start_lo"], row["start_hi"] = len(request.prompt), request.next_start
        row["sample"], row["producer_step"] = 1, request.last_step
        request.next_start += 1
        self.reserve(request, min(request.next_start, request.init.max_len))
        return request, row

    def verify_row(self, request: Request, num_drafts: int) -> tuple[Request, np.void]:
        """The next tokens, with drafts behind the first."""
        _, row = self.decode_row(request)
        if num_drafts:
            row["mode"], row["q"] = RowMode.VERIFY, 1 + num_drafts
            request.next_start += num_drafts
            self.reserve(request, min(request.next_start, request.init.max_len))
        return request, row

    def row(self, request: Request, chunk: int = 1 << 20) -> tuple[Request, np.void]:
        """Whatever comes next for the request."""
        return self.prefill_row(request, chunk) if request.is_prefill else self.decode_row(request)

    def _row(self, request: Request, mode: RowMode, source: RowSource, q: int) -> np.void:
        row = np.zeros(1, ROW)[0]
        init = request.init
        row["rid"], row["epoch"], row["slot"], row["gen"] = (
            init.rid,
            init.epoch,
            init.slot,
            init.gen,
        )
        row["mode"], row["source"], row["q"] = mode, source, q
        return row

    def submit(
        self,
        *rows: tuple[Request | None, np.void],
        ops: Sequence[BlockOp] = (),
        close: Sequence[Request] = (),
        cancel: Sequence[Request] = (),
        epoch: int | None = None,
        flags: int = 0,
        descriptor: Descriptor | None = None,
    ) -> int:
        """Send a step; the id of it. `descriptor`: of a group; None: of these rows."""
        self.step_id += 1
        packed = np.array([row for _, row in rows], ROW)
        for request, _ in rows:
            if request is not None:
                request.last_step = self.step_id
        self.in_flight[self.step_id] = [request for request, _ in rows]
        inits, self.pending_init = self.pending_init, []
        blocks, self.pending_blocks = self.pending_blocks, []
        self.executor.submit(
            SubmitStep(
                self.epoch if epoch is None else epoch,
                self.step_id,
                group_step=self.step_id & 0xFFFF,
                group_epoch=1,
                descriptor=descriptor
                or Descriptor(StepKind.MIXED, int(packed["q"].sum()), len(rows), flags=flags),
                rows=packed.tobytes(),
                init=inits,
                blocks=np.array(blocks, BLOCK).tobytes(),
                ops=list(ops),
                close=np.array([(r.init.slot, r.init.gen) for r in close], SLOT).tobytes(),
                cancel=np.array(
                    [(r.init.rid, r.init.epoch, r.init.slot) for r in cancel], CANCEL
                ).tobytes(),
            )
        )
        return self.step_id

    def take(self) -> StepResult:
        """The next step result, applied to its requests; watermarks on the way are noted."""
        while True:
            message = self.executor.poll(WAIT_S)
            assert message is not None, "no result"
            self.watermarks.append(message.gpu_done)
            self.ops_done += message.ops_done
            if isinstance(message, StepResult):
                break
        self.results.append(message)
        self._apply(message, self.in_flight.pop(message.step_id))
        return message

    def take_watermark(self, step_id: int) -> None:
        """Wait until the tail of a step is known to be complete."""
        while not self.watermarks or self.watermarks[-1] < step_id:
            message = self.executor.poll(WAIT_S)
            assert isinstance(message, GpuDone), message
            self.watermarks.append(message.gpu_done)
            self.ops_done += message.ops_done

    def _apply(self, result: StepResult, requests: list[Request | None]) -> None:
        tokens = unpack_ids(result.tokens).tolist()
        logprobs = np.frombuffer(result.logprobs, "<f4").tolist()
        assert not logprobs or len(logprobs) == len(tokens)
        for request, row in zip(requests, np.frombuffer(result.rows, RESULT), strict=True):
            count = int(row["num_tokens"])
            if request is not None:
                request.output += tokens[:count]
                request.logprobs += logprobs[:count]
                request.num_null += row["done_reason"] == DoneReason.NULL
                if row["done_reason"] not in (DoneReason.NONE, DoneReason.NULL):
                    request.done = DoneReason(int(row["done_reason"]))
            tokens, logprobs = tokens[count:], logprobs[count:]
        assert not tokens

    def run(self, *requests: Request, chunk: int = 1 << 20, depth: int = 2) -> None:
        """All requests to their ends, `depth` steps in flight; prompts in chunks."""
        going = list(requests)
        while going or self.in_flight:
            if going and len(self.in_flight) < depth:
                self.submit(*(self.row(request, chunk) for request in going))
            else:
                assert self.take().status == StepStatus.OK, self.results[-1].error
            going = [r for r in going if r.done == DoneReason.NONE]


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ids of plain words."""
    return np.random.default_rng(seed).integers(600, VOCAB_SIZE, length).tolist()


def result_rows(result: StepResult) -> np.ndarray:
    """What a step says of each row (packed.RESULT)."""
    return np.frombuffer(result.rows, RESULT)


def broken(row: np.void, **fields: int) -> np.void:
    """A row with other fields."""
    copy = np.array([row], ROW)[0]
    for name, value in fields.items():
        copy[name] = value
    return copy
