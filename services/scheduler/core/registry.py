"""Every request by its id, from acceptance to the last acknowledgement, and how requests end."""

from collections import OrderedDict

from deepmesh.wire.messages import ErrorCode, Failed, Finished, FinishReason

from .outbox import Outbox, finished
from .request import Ended, Request
from .residency import Residency
from .waiting import WaitingQueue

TOMBSTONE_NS = 10_000_000_000
MAX_TOMBSTONES = 65_536
ENDED_NS = 60_000_000_000
MAX_ENDED = 4096


class Registry:
    """Owns the lookup by rid, the ended requests that were not acknowledged, and tombstones."""

    def __init__(self, waiting: WaitingQueue, outbox: Outbox) -> None:
        self.live: dict[bytes, Request] = {}
        self.ended: OrderedDict[bytes, Ended] = OrderedDict()
        self.tombstones: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # attempt, until
        self.residency: Residency | None = None  # none until the engine is loaded
        self.num_finished = 0
        self.num_failed = 0
        self._waiting = waiting
        self._outbox = outbox

    def confirmed_len(self, request: Request) -> int:
        """K of a live request."""
        if request.slot < 0 or self.residency is None:
            return len(request.ids)
        return int(self.residency.table.confirmed[request.slot])

    def finish(
        self, request: Request, reason: FinishReason, now: int, keep: int | None = None
    ) -> None:
        """End a request well; `keep` cuts its output there. What is in flight becomes overrun."""
        if keep is not None and request.slot >= 0 and self.residency is not None:
            self.residency.forget_beyond(request, request.prompt_len + keep)
        self._remove(request)
        output = len(request.ids) - request.prompt_len
        final = output if keep is None else min(keep, output)
        request.ids = request.ids[: request.prompt_len + final]
        self.num_finished += 1
        self._end(request, finished(request, reason, final), now)

    def fail(
        self,
        request: Request,
        code: ErrorCode,
        detail: str,
        now: int,
        *,
        param: str = "",
        retry_after_s: float = 0.0,
    ) -> None:
        """End a request badly."""
        self._remove(request)
        final = len(request.ids) - request.prompt_len
        self.num_failed += 1
        self._end(
            request,
            Failed(
                request.generate.rid,
                code,
                detail,
                param=param,
                retry_after_s=retry_after_s,
                final_pos=final,
            ),
            now,
        )

    def bury(self, rid: bytes, attempt: int, now: int) -> None:
        """Remember an abort: it may have overtaken its Generate."""
        self.tombstones[rid] = (attempt, now + TOMBSTONE_NS)
        self.tombstones.move_to_end(rid)
        if len(self.tombstones) > MAX_TOMBSTONES:
            self.tombstones.popitem(last=False)

    def expire(self, now: int) -> None:
        """Drop tombstones and unacknowledged ends that are old enough."""
        while self.tombstones and next(iter(self.tombstones.values()))[1] <= now:
            self.tombstones.popitem(last=False)
        while self.ended:
            oldest = next(iter(self.ended.values()))
            if len(self.ended) <= MAX_ENDED and oldest.ended_ns + ENDED_NS > now:
                break
            self.ended.popitem(last=False)

    def _remove(self, request: Request) -> None:
        """Out of slot or queue; leases end by their fences."""
        del self.live[request.generate.rid]
        if request.slot >= 0:
            assert self.residency is not None
            self.residency.leave(request)
        else:
            self._waiting.remove(request)

    def _end(self, request: Request, terminal: Finished | Failed, now: int) -> None:
        self.ended[request.generate.rid] = Ended(request, terminal, now)
        self._outbox.ended(request, terminal, now)
