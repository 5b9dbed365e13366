"""What a simulated device refuses: steps and rows that a real one would run into the ground."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    Capacity,
    Descriptor,
    RowMode,
    RowSource,
    SlotInit,
    StepKind,
)

from ..core.pace import FINE_ALIGN
from .shadow import ShadowError, Writer

DUMMY_SLOT = 0xFFFFFFFF  # the scratch slot of dummy rows
# Looking up a member of an enumeration takes longer than comparing two numbers.
_PREFILL, _HOST = int(RowMode.PREFILL), int(RowSource.HOST)
_MIXED, _DECODE_STEP, _PREFILL_STEP = map(int, (StepKind.MIXED, StepKind.DECODE, StepKind.PREFILL))


def check_dummy(rows: NDArray[np.void]) -> None:
    """I23: a dummy row owns nothing and is alone.

    Raises:
        ShadowError: it is not.
    """
    if len(rows) != 1 or rows["slot"][0] != DUMMY_SLOT or rows["rid"][0]:
        raise ShadowError(f"a dummy row owns something or is not alone (I23): {rows}")


def check_descriptor(descriptor: Descriptor, rows: NDArray[np.void], rank: int) -> None:
    """A rank's rows must fit the shape that all ranks run.

    Raises:
        ShadowError: names the rank and what does not fit.
    """
    if len(set(rows["slot"].tolist())) != len(rows):
        raise ShadowError(f"rank {rank} runs two rows of one slot in a step")
    tokens, split = int(rows["q"].sum()), descriptor.split
    if split is not None:
        part = (rank - split.home - 1) % (len(split.bounds) - 1)
        if tokens != (split.bounds[-1] - split.bounds[0]) * (rank == split.home) or len(rows) > 1:
            raise ShadowError(f"rank {rank} has {tokens} tokens beside the chunk that all compute")
        tokens = split.bounds[part + 1] - split.bounds[part]
    by_decode = rows["mode"] != _PREFILL
    walks = int(rows["q"][by_decode & (rows["source"] == _HOST)].max(initial=1)) - 1
    prefill = tokens - int(rows["q"][by_decode].sum())
    agreed = descriptor.decode_rows, descriptor.walks, descriptor.prefill_tokens
    if any(
        ours > theirs
        for ours, theirs in zip((by_decode.sum(), walks, prefill), agreed, strict=True)
    ):
        raise ShadowError(
            f"I22 rank {rank} has {by_decode.sum()} decode rows, walks {walks} positions and has "
            f"{prefill} prompt tokens, the group agreed on {agreed}"
        )
    if tokens > descriptor.padded_tokens or len(rows) > descriptor.padded_rows:
        raise ShadowError(
            f"I22 rank {rank} has {tokens} tokens in {len(rows)} rows, the group agreed on "
            f"{descriptor.padded_tokens} in {descriptor.padded_rows}"
        )
    if descriptor.kind == _MIXED or len(rows) == 0:
        return
    is_prefill = rows["mode"] == _PREFILL
    if descriptor.kind == _DECODE_STEP and is_prefill.any():
        raise ShadowError(f"I22 rank {rank} prefills in a step of kind DECODE")
    if descriptor.kind == _PREFILL_STEP and not (is_prefill | (rows["source"] == _HOST)).all():
        raise ShadowError(f"I22 rank {rank} decodes in a step of kind PREFILL")


def check_row(
    row: np.void,
    init: SlotInit,
    capacity: Capacity,
    start: int,
    length: int,
    producer: int,
    who: Writer,
) -> None:
    """A row against what the slot holds: `start` positions computed, `length` tokens known.

    Raises:
        ShadowError: the row is not this request's, or begins, ends or takes its input elsewhere.
    """
    if init.gen != row["gen"] or init.rid != row["rid"] or init.epoch != row["epoch"]:
        raise ShadowError(f"{who} runs in a slot that is not its own (I16)")
    low, high, end = int(row["start_lo"]), int(row["start_hi"]), start + int(row["q"])
    if not low <= start <= high:
        raise ShadowError(f"{who} starts at {start}, the host said {low}..{high}")
    is_prefill = row["mode"] == RowMode.PREFILL
    if not capacity.one_kernel_class and (
        end > init.prompt_len if is_prefill else start < init.prompt_len
    ):
        raise ShadowError(f"D4 {who} computes {start}..{end} with the kernels of the other class")
    if row["source"] == RowSource.DEVICE:
        if row["producer_step"] != producer:
            raise ShadowError(f"{who} takes its token from another row (I15)")
        if start + (1 if row["mode"] == RowMode.VERIFY else int(row["q"])) > length:
            raise ShadowError(f"{who} computes positions without tokens")
        return
    if row["skip"] > (row["q"] if is_prefill and capacity.prefill_halo else 0):
        raise ShadowError(f"{who} leaves out layers that it must not leave out")
    if low != high:
        raise ShadowError(f"{who} has ids of the host, but begins somewhere in {low}..{high}")
    if end > length:
        raise ShadowError(f"{who} computes positions without tokens")
    if is_prefill:
        _check_grid(init, capacity, start, end, length, who)


def _check_grid(
    init: SlotInit, capacity: Capacity, start: int, end: int, length: int, who: Writer
) -> None:
    """D1, D2: chunks and hits end on the request's own grid, at the target, or at P. The grid is
    finer where chunks are sized by time, which one kernel class allows."""
    align, ends = capacity.chunk_align, {length, length - 1, init.prompt_len}
    is_paced = capacity.one_kernel_class and capacity.costs.prefill_token_ns > 0
    grid = min(FINE_ALIGN, align) if is_paced else align
    if init.start % align or any(at % grid and at not in ends for at in (start, end)):
        raise ShadowError(f"{who} computes {start}..{end}, off the grid of {grid}")
