"""Which fault comes when: a function of the seed alone, so that a run can be had again."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# What a fault may happen to, by the kind of fault; "" stands for the mesh as a whole.
_SERVICES = ("gateway", "tokenizer", "router", "scheduler", "executor", "kvstore", "masks")
_LINES = ("tokenizer", "router", "scheduler", "kvstore", "")
TARGETS: dict[str, tuple[str, ...]] = {
    "kill": _SERVICES,
    "hang": _SERVICES,
    "pause": _SERVICES,
    "drop": _LINES,
    "duplicate": _LINES,
    "delay": _LINES,
    "reorder": _LINES,
    "cut": _LINES,
    "disk full": ("kvstore",),
    "redis down": ("killed", "hung"),
    "clock jump": ("ahead", "behind"),
    "memory limit": _SERVICES[:-1],
    "slow clients": ("",),
    "overload": ("",),
}
KINDS = tuple(TARGETS)


class Step(NamedTuple):
    """One fault to come."""

    number: int
    kind: str
    target: str  # of TARGETS
    seed: int  # of all else that is drawn for it


def steps(seed: int, kinds: Sequence[str] = KINDS) -> Iterator[Step]:
    """Without end. Each kind once in every round, each target of a kind as often as the others."""
    draw = random.Random(seed)
    targets = {kind: _in_turn(TARGETS[kind], draw.getrandbits(64)) for kind in KINDS}
    number = 0
    while True:
        for kind in draw.sample(kinds, len(kinds)):
            yield Step(number, kind, next(targets[kind]), draw.getrandbits(64))
            number += 1


def _in_turn(names: Sequence[str], seed: int) -> Iterator[str]:
    draw = random.Random(seed)
    while True:
        yield from draw.sample(names, len(names))
