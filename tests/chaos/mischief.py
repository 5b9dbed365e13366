"""What happens to the messages of a line, as ordered. Time is given, so it can be tested."""

import random
from collections import Counter
from typing import Literal, NamedTuple

import msgspec

from tests.chaos.zmtp import Unit

CARRIED_OUT = ("drop", "duplicate", "reorder")  # kinds of orders that are over after `count`
LATE_S = (0.05, 0.35)  # of a message that is delayed
_SHARE = 0.3  # of the messages that an order with a count is carried out on


class Order(msgspec.Struct, frozen=True):
    """From the test to the proxy."""

    kind: Literal["drop", "duplicate", "reorder", "delay", "hold", "break", "ask"]
    line: int = -1  # -1: all of them
    count: int = 0  # messages, of a kind in CARRIED_OUT
    s: float = 0.0  # how long, of the others
    seed: int = 0


class State(msgspec.Struct, frozen=True):
    """The proxy's answer."""

    left: int  # messages that orders are still to be carried out on
    num_links: int  # that are up, over all lines


class Sending(NamedTuple):
    """Bytes, and how long they wait."""

    data: bytes
    late_s: float = 0.0


class Direction:
    """One way of one connection: what is held back of it."""

    def __init__(self) -> None:
        self.held = b""  # goes behind the next message
        self.not_before_s = 0.0  # messages keep their order when they are late


class Mischief:
    """Orders for one line."""

    def __init__(self) -> None:
        self.left: Counter[str] = Counter()  # messages, by kind
        self.done: Counter[str] = Counter()
        self._until_s: dict[str, float] = {}
        self._draw = random.Random(0)

    def order(self, order: Order, now_s: float) -> None:
        """From now on."""
        self._draw = random.Random(order.seed)
        if order.kind in CARRIED_OUT:
            self.left[order.kind] += order.count
        else:
            self._until_s[order.kind] = now_s + order.s

    def lasts(self, kind: str, now_s: float) -> bool:
        """Whether an order for some time is still in force."""
        return now_s < self._until_s.get(kind, 0.0)

    def treat(self, unit: Unit, way: Direction, now_s: float) -> list[Sending]:
        """What is sent instead of a unit."""
        if not unit.is_message:
            return [self._in_time(unit.data, way, now_s)]
        if self._takes("drop"):
            return []
        if not way.held and self._takes("reorder"):
            way.held = unit.data
            return []
        data = unit.data + (unit.data if self._takes("duplicate") else b"") + way.held
        way.held = b""
        return [self._in_time(data, way, now_s)]

    def _in_time(self, data: bytes, way: Direction, now_s: float) -> Sending:
        due_s = now_s + (self._draw.uniform(*LATE_S) if self.lasts("delay", now_s) else 0.0)
        way.not_before_s = max(way.not_before_s, due_s)
        return Sending(data, way.not_before_s - now_s)

    def _takes(self, kind: str) -> bool:
        if self.left[kind] and self._draw.random() < _SHARE:
            self.left[kind] -= 1
            self.done[kind] += 1
            return True
        return False
