"""What steps take on a GPU as it launches them, measured at load on pools that hold nothing yet."""

from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    Capacity,
    Descriptor,
    Pool,
    RowMode,
    RowSource,
    SamplingParams,
    SlotInit,
    StepCosts,
    StepKind,
    SubmitStep,
)
from deepmesh.wire.packed import BLOCK, ROW, pack_ids
from services.executor.capacity import verified_tokens
from services.executor.flights import Flight, Settling
from services.executor.slots import SlotTable
from services.executor.step_costs import VERIFIED, verify_tiers
from services.executor.turn import Turn

Launch = Callable[[Settling, Callable[[], None]], Flight]

ROWS = 16  # of the larger decode step
CONTEXT = 512  # positions before all rows
CHUNK = 128  # tokens of the prompt beside them
REPEATS = 5  # of each step, behind one that warms up; the quickest counts


def measure_device_costs(
    launch: Launch, capacity: Capacity, *, max_rows: int, with_drafts: bool = False
) -> StepCosts:
    """Costs of decode rows, and of prefill beside them, by the device's clock; all 0 if pools or
    slots are too few for that. Whatever the pools held is lost.

    Args:
        max_rows: of a step.
        with_drafts: those of draft passes and of what verifies them, too, if there are any.
    """
    width = 1 + capacity.draft_len
    context = min(CONTEXT, capacity.max_model_len // 2)
    chunk = min(CHUNK, capacity.max_model_len - context - 1)
    behind = max(chunk, 2 * REPEATS + 4, (REPEATS + 3) * width)
    blocks = -(-(context + behind) // capacity.block_size)
    pools = min(capacity.num_global_blocks, capacity.num_window_blocks)
    rows = min(ROWS, max_rows, capacity.num_slots, capacity.num_state_blocks, pools // blocks) - 1
    if rows < 2 or chunk < 1:
        return StepCosts()
    probe = _Probe(launch, capacity, context, blocks)
    one = probe.best_ns([0])
    many = probe.best_ns(range(rows))
    mixed = min(probe.mixed_ns(range(rows), chunk) for _ in range(REPEATS))
    each = max(0, many - one) // (rows - 1)
    costs = StepCosts(
        base_ns=max(0, one - each),
        prefill_token_ns=max(1, (mixed - many) // chunk),
        decode_row_ns=each,
    )
    if not with_drafts or width == 1:
        return costs
    tiers = [tokens for tokens in VERIFIED if tokens <= rows * width]
    verify, drafts = zip(*(probe.verify_ns(tokens, rows, width) for tokens in tiers), strict=True)
    most = verified_tokens(max_rows, capacity.draft_len)
    row_ns = max(0, drafts[-1] - drafts[0]) // (rows - 1)
    return msgspec.structs.replace(
        costs,
        verify=verify_tiers(list(zip(tiers, verify, strict=True)), most),
        draft_base_ns=max(0, drafts[0] - row_ns),
        draft_row_ns=row_ns,
    )


class _Probe:
    """Plays the scheduler: request i has slot, state block and run of blocks i."""

    def __init__(self, launch: Launch, capacity: Capacity, context: int, blocks: int) -> None:
        self._launch, self._context, self._blocks = launch, context, blocks
        self._slots = SlotTable(capacity)
        self._max_len, self._vocab_size = capacity.max_model_len, capacity.vocab_size
        self._draw = np.random.default_rng(0)
        self._step_id = 0
        self._latest: dict[int, int] = {}  # step of each request's latest row
        self._gens: dict[int, int] = {}

    def best_ns(self, requests: Sequence[int]) -> int:
        """Of a step with a decode row of each."""
        self._decode(requests)
        return min(self._decode(requests)[0] for _ in range(REPEATS))

    def mixed_ns(self, requests: Sequence[int], chunk: int) -> int:
        """Of a step with decode rows, and a chunk of another request's prompt."""
        other = len(requests)
        self._latest.pop(other, None)
        return self._decode(requests, extra=(other, chunk))[0]

    def verify_ns(self, tokens: int, rows: int, width: int) -> tuple[int, int]:
        """Of a step that verifies so many tokens, and of its draft pass.

        Args:
            rows: at most.
            width: tokens of a row, at most.
        """
        requests = range(min(tokens, rows))
        for request in requests:
            self._latest.pop(request, None)
        agreed = Descriptor(
            StepKind.DECODE,
            0,
            len(requests),
            n_draft_passes=width - 1,
            verify_capacity=tokens,
        )
        self._decode(requests, agreed=agreed)  # whose drafts the next one verifies
        found = [self._decode(requests, agreed=agreed) for _ in range(1 + REPEATS)]
        return min(step - own for step, own in found), min(own for _, own in found)

    def _decode(
        self,
        requests: Sequence[int],
        extra: tuple[int, int] | None = None,
        agreed: Descriptor | None = None,
    ) -> tuple[int, int]:
        fresh = [i for i in requests if i not in self._latest]
        rows = np.zeros(len(requests) + (extra is not None), ROW)
        for row, i in zip(rows, requests, strict=False):
            row["slot"], row["mode"], row["q"], row["sample"] = i, RowMode.DECODE, 1, 1
            row["source"] = RowSource.HOST if i in fresh else RowSource.DEVICE
            row["start_lo"], row["start_hi"] = self._context, self._max_len
            row["producer_step"] = self._latest.get(i, 0)
            if agreed is not None and i not in fresh:
                row["mode"], row["q"] = RowMode.VERIFY, 1 + agreed.n_draft_passes
        inits = [self._init(i, self._context + 1) for i in fresh]
        if extra is not None:
            other, chunk = extra
            inits.append(self._init(other, self._context + chunk))
            last = rows[-1]
            last["slot"], last["mode"], last["q"] = other, RowMode.PREFILL, chunk
            last["source"], last["sample"] = RowSource.HOST, 1
            last["start_lo"] = last["start_hi"] = self._context
        rows["rid"], rows["gen"] = (
            rows["slot"],
            [self._gens[slot] for slot in rows["slot"].tolist()],
        )
        return self._run(rows, inits, agreed)

    def _init(self, i: int, length: int) -> SlotInit:
        """Request i anew; its first positions are in the pools, whatever they hold."""
        self._gens[i] = self._gens.get(i, 0) + 1
        return SlotInit(
            i,
            self._gens[i],
            rid=i,
            epoch=0,
            ids=pack_ids(self._draw.integers(0, self._vocab_size, length).astype(np.int32)),
            prompt_len=self._context if length == self._context + 1 else length,
            max_len=self._max_len,
            sampling=SamplingParams(temperature=0.0),
            start=self._context,
            state_block=i,
        )

    def _run(
        self, rows: NDArray[np.void], inits: list[SlotInit], agreed: Descriptor | None
    ) -> tuple[int, int]:
        """ns on the device, and those of the draft pass."""
        self._step_id += 1
        blocks = [
            (init.slot, init.gen, int(pool), index, init.slot * self._blocks + index)
            for init in inits
            for pool in (Pool.GLOBAL, Pool.WINDOW)
            for index in range(self._blocks)
        ]
        is_prompt = rows["mode"] == RowMode.PREFILL
        kind = agreed or Descriptor(
            StepKind.MIXED,
            int(rows["q"].sum()),
            len(rows),
            decode_rows=int((~is_prompt).sum()),
            prefill_tokens=int(rows["q"][is_prompt].sum()),
        )
        packed = np.array(blocks, BLOCK).tobytes()
        step = SubmitStep(
            0, self._step_id, self._step_id, 0, kind, rows.tobytes(), init=inits, blocks=packed
        )
        settling = Settling(Turn(step, []), self._slots)
        flight = self._launch(settling, lambda: None)
        begin, end = flight.wait()
        live = settling.live()
        sampled = flight.sampled(live)
        flight.settled(live, settling.turn.outcome(self._slots, live, sampled).rows)
        flight.land()
        self._latest |= dict.fromkeys(rows["slot"].tolist(), self._step_id)
        return end - begin, 0 if sampled.drafting is None else sampled.drafting.took_ns
