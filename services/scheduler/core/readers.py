"""How far tokenizers are behind with the token batches that were sent to them.

A scheduler that outruns its tokenizers gains nothing: tokens wait in their queues, where new
requests wait behind them, and its steps have few rows, since most requests wait for their text.
So rows of a tokenizer that is behind wait, which also lets it read several steps at once.
"""

from collections import deque

MAX_BEHIND = 12  # batches; a tokenizer says how far it is about every fourth


class Readers:
    """Counts batches of those tokenizers that say which they have taken (`Ack.group_step`)."""

    def __init__(self) -> None:
        self._unread: dict[str, deque[int]] = {}  # steps, by tokenizer
        self.behind: set[str] = set()  # whose rows wait

    def sent(self, peer: str, group_step: int) -> None:
        """A batch leaves."""
        unread = self._unread.get(peer)
        if unread is None:
            return  # it has never said what it took
        unread.append(group_step)
        if len(unread) >= MAX_BEHIND:
            self.behind.add(peer)

    def took(self, peer: str, group_step: int) -> None:
        """A tokenizer has taken all batches up to this step; 0: it says nothing."""
        if not group_step:
            return
        unread = self._unread.setdefault(peer, deque())
        while unread and unread[0] <= group_step:
            unread.popleft()
        if len(unread) < MAX_BEHIND:
            self.behind.discard(peer)

    def forget(self, peer: str) -> None:
        """Its link came or went: what was on it counts no more."""
        self._unread.pop(peer, None)
        self.behind.discard(peer)
