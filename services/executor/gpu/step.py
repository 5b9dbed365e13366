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
    slots: Tensor  # [num_tokens, index_topk], int64
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


def to_device(plan: StepPlan, device: torch.device) -> DeviceStep:
    """Copy what the device's kernels read."""

    def angles(pair: Angles) -> Angles:
        return pair[0].to(device), pair[1].to(device)

    def ratio(own: RatioPlan) -> DeviceRatio:
        table = BlockTable(own.table.blocks.to(device), own.table.entries, own.table.null_row)
        return DeviceRatio(
            table=table,
            slots=own.table.slots(plan.row_of, own.all_visible).to(device),
            groups=[
                ScoreGroup(g.tokens.to(device), g.rows.to(device), g.visible.to(device), g.num_keys)
                for g in own.groups
            ],
            ending=own.ending.to(device),
            write_slots=own.write_slots.to(device),
            angles=angles(own.angles),
        )

    pairs = plan.pairs
    return DeviceStep(
        window_slots=plan.window_slots.to(device),
        window_writes=plan.window_writes.to(device),
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
