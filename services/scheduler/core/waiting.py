"""The waiting queue: most important first, then fairly by tenant, then oldest; bounded by the
intake."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from .policy import OUTPUT_SHARE, FairShare
from .request import Request


class WaitingQueue:
    """Requests without a slot. A preempted one keeps its age, so it stands in front again."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self.num_tokens = 0  # tokens to compute until all of them decode
        self._shares = FairShare()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put a request where its priority, its tenant's share and its age say."""
        if request.share < 0:
            tokens = len(request.ids) + min(request.generate.max_tokens, OUTPUT_SHARE)
            request.share = self._shares.place(request.generate.tenant, tokens)
        insort(self._requests, request, key=_order)
        self.num_tokens += len(request.ids)

    def admit(self, request: Request) -> None:
        """Take a request out that gets its slot."""
        self._shares.admitted(request.share)
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Take a request out."""
        at = bisect_left(self._requests, request.order, key=_order)
        assert self._requests[at] is request
        del self._requests[at]
        self.num_tokens -= len(request.ids)


def _order(request: Request) -> tuple[int, int, int]:
    return request.order
