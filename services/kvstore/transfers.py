"""Transfers that wait for the other side, each with a deadline. No I/O."""

from typing import NamedTuple

from .eviction import Key

Keys = dict[int, Key]  # index in the order -> key


class Transfer(NamedTuple):
    """One order of a peer: what it may write, or reads."""

    keys: Keys
    deadline_s: float


class Transfers:
    """Open transfers by peer and op_id. One that its peer forgets ends at its deadline."""

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._open: dict[tuple[str, int], Transfer] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, peer: str, op_id: int, keys: Keys, now_s: float) -> None:
        """Remember what a peer was allowed; an `op_id` is used once."""
        assert (peer, op_id) not in self._open
        if keys:
            self._open[peer, op_id] = Transfer(keys, now_s + self._ttl_s)

    def is_open(self, peer: str, op_id: int) -> bool:
        """Whether this op_id is in use."""
        return (peer, op_id) in self._open

    def began_s(self, peer: str, op_id: int) -> float | None:
        """When an open transfer began."""
        transfer = self._open.get((peer, op_id))
        return transfer.deadline_s - self._ttl_s if transfer is not None else None

    def end(self, peer: str, op_id: int) -> Keys:
        """What it was allowed, once; nothing when it is unknown or over its deadline."""
        transfer = self._open.pop((peer, op_id), None)
        return transfer.keys if transfer is not None else {}

    def end_peer(self, peer: str) -> list[Key]:
        """All that a lost peer was allowed."""
        lost = [name for name in self._open if name[0] == peer]
        return [key for name in lost for key in self._open.pop(name).keys.values()]

    def end_overdue(self, now_s: float) -> list[Key]:
        """All that is over its deadline."""
        overdue: list[Key] = []
        while self._open:
            name, transfer = next(iter(self._open.items()))
            if transfer.deadline_s > now_s:
                break
            del self._open[name]
            overdue += transfer.keys.values()
        return overdue
