"""What the ranks of a group run together: one kind, one descriptor, bounded padding."""

import pytest

from deepmesh.wire.messages import StepKind
from services.scheduler.core.alignment import HOLD_STEPS, choose_kind
from services.scheduler.core.group import decide

MIXED, DECODE, PREFILL = StepKind.MIXED, StepKind.DECODE, StepKind.PREFILL


@pytest.mark.parametrize(
    ("decode", "prefill", "held", "kind"),
    [
        ([0, 0], [0, 0], 0, DECODE),
        ([8, 8], [0, 0], 0, DECODE),
        ([0, 0], [64, 0], 0, PREFILL),
        ([8, 8], [64, 64], 0, MIXED),
        ([8, 8], [64, 0], 0, MIXED),  # 144 padded, 80 real
        ([8, 8, 8, 8], [64, 64, 0, 0], 0, MIXED),
        ([8, 8, 8, 8], [512, 0, 0, 0], 0, DECODE),  # a lone prefill waits for others
        ([8, 8, 8, 8], [512, 0, 0, 0], HOLD_STEPS, PREFILL),  # but not for long
        ([8, 8, 8, 8], [512, 512, 512, 0], 0, MIXED),
    ],
)
def test_the_kind_of_a_step(
    decode: list[int], prefill: list[int], held: int, kind: StepKind
) -> None:
    assert choose_kind(decode, prefill, held=held) == kind


def test_the_descriptor_has_the_widest_rank() -> None:
    descriptor = decide([3, 5, 0], [3, 4, 0], [0, 64, 0])
    assert descriptor.kind == MIXED
    assert (descriptor.padded_tokens, descriptor.padded_rows) == (68, 5)
    assert decide([0, 0], [0, 0], [0, 0]).padded_rows == 1
