"""The index tensors of a step on their device: worked out on the host, copied as they are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from services.executor.models.plan import Angles, RatioPlan, ScoreGroup, StepPlan


def sent(x: Tensor, device: torch.device) -> Tensor:
    """x on the device; the copy is in the order of the stream, and nobody waits for it."""
    if device.type != "cuda" or x.is_cuda:
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class DeviceRatio:
    """`RatioPlan`; `slots` are those of the entries that a token sees if it need leave out none."""

    table: BlockTable
    slots: Tensor  # [num_tokens, index_topk]
    groups: list[ScoreGroup]
    ending: Tensor
    write_slots: Tensor
    angles: Angles


@dataclass(frozen=True)
class DevicePairs:
    """`PairPlan`."""

    resumed: Tensor
    resumed_blocks: Tensor
    open_tokens: Tensor
    open_blocks: Tensor


@dataclass(frozen=True)
class DeviceStep:
    """`StepPlan`."""

    window_slots: Tensor
    window_writes: Tensor
    plain: Angles
    compressed: Angles
    ratios: dict[int, DeviceRatio]
    pairs: DevicePairs


def to_device(
    plan: StepPlan, device: torch.device, index_type: torch.dtype, null_window_row: int
) -> DeviceStep:
    """Copy what the device's kernels read.

    Args:
        index_type: of slots and tables, see `Rows`.
        null_window_row: of the window pool.
    """

    def slots(held: Tensor, null_row: int) -> Tensor:
        if index_type is torch.int32:
            held = torch.where(held == null_row, -1, held).int()
        return sent(held, device)

    def narrow(held: Tensor) -> Tensor:
        return sent(held.to(index_type), device)

    def angles(pair: Angles) -> Angles:
        return sent(pair[0], device), sent(pair[1], device)

    def ratio(own: RatioPlan) -> DeviceRatio:
        null_row = own.table.null_row
        table = BlockTable(narrow(own.table.blocks), own.table.entries, null_row)
        return DeviceRatio(
            table=table,
            slots=slots(own.table.slots(plan.row_of, own.all_visible), null_row),
            groups=[
                ScoreGroup(sent(g.tokens, device), narrow(g.rows), narrow(g.visible), g.num_keys)
                for g in own.groups
            ],
            ending=sent(own.ending, device),
            write_slots=slots(own.write_slots, null_row),
            angles=angles(own.angles),
        )

    pairs = plan.pairs
    return DeviceStep(
        window_slots=slots(plan.window_slots, null_window_row),
        window_writes=slots(plan.window_writes, null_window_row),
        plain=angles(plan.plain),
        compressed=angles(plan.compressed),
        ratios={number: ratio(own) for number, own in plan.ratios.items()},
        pairs=DevicePairs(
            sent(pairs.resumed, device),
            sent(pairs.resumed_blocks, device),
            sent(pairs.open_tokens, device),
            sent(pairs.open_blocks, device),
        ),
    )
