"""The waiting queue: most important and oldest first, bounded by the intake."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .request import Request


class WaitingQueue:
    """Requests without a slot. A preempted one keeps its age, so it stands in front again."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # tokens to compute until all of them decode

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request where its priority and age say."""
        insort(self._requests, request, key=_order)
        self.num_tokens += len(request.ids)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        at = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[at] is request
        del self._requests[at]
        self.num_tokens -= len(request.ids)


def _order(request: Request) -> tuple[int, int]:
    return request.order
