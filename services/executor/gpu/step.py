"""The index tensors of a step on their device: worked out on the host, copied as they are."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.attention.block_slots import BlockTable
from services.executor.models.plan import Angles, RatioPlan, ScoreGroup, StepPlan


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
        return held.to(device)

    def narrow(held: Tensor) -> Tensor:
        return held.to(index_type).to(device)

    def angles(pair: Angles) -> Angles:
        return pair[0].to(device), pair[1].to(device)

    def ratio(own: RatioPlan) -> DeviceRatio:
        null_row = own.table.null_row
        table = BlockTable(narrow(own.table.blocks), own.table.entries, null_row)
        return DeviceRatio(
            table=table,
            slots=slots(own.table.slots(plan.row_of, own.all_visible), null_row),
            groups=[
                ScoreGroup(g.tokens.to(device), narrow(g.rows), narrow(g.visible), g.num_keys)
                for g in own.groups
            ],
            ending=own.ending.to(device),
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
            pairs.resumed.to(device),
            pairs.resumed_blocks.to(device),
            pairs.open_tokens.to(device),
            pairs.open_blocks.to(device),
        ),
    )
