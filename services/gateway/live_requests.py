"""The last requests of this gateway, for the page and `deepmesh top`: what they asked and got."""

import time
from collections import deque

from deepmesh.telemetry import trace_id_of
from services.gateway.arrival import Arrival
from services.gateway.metrics import RequestTimer

MAX_SEEN = 200
GONE = 499  # status of a request whose client hung up


class SeenRequest:
    """One request, from its headers on."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "duration_s",
        "error",
        "finish_reason",
        "output_tokens",
        "prompt_tokens",
        "protocol",
        "route",
        "state",
        "timer",
        "trace_id",
    )

    def __init__(self, arrival: Arrival, route: str, protocol: str, traceparent: str) -> None:
        self.arrival, self.route, self.protocol = arrival, route, protocol
        self.trace_id = trace_id_of(traceparent)
        self.state, self.error, self.finish_reason = "running", "", ""
        self.duration_s = 0.0
        self.timer: RequestTimer | None = None  # of its stream, as it runs
        self.prompt_tokens = self.cached_tokens = self.output_tokens = 0

    def end(self, duration_s: float) -> None:
        """It is over; `arrival.status` is final."""
        self.duration_s = duration_s
        status = self.arrival.status
        self.state = "gone" if status == GONE else "done" if status < 400 else "failed"

    def row(self) -> dict[str, object]:
        """For the list."""
        arrival = self.arrival
        is_running = self.state == "running"
        ttft_s, events = (t.ttft_s, t.num_events) if (t := self.timer) else (0.0, 0)
        lasts_s = time.monotonic() - arrival.start_s if is_running else self.duration_s
        return {
            "id": arrival.rid.hex(),
            "request_id": arrival.request_id,
            "trace_id": self.trace_id,
            "route": self.route,
            "protocol": self.protocol,
            "state": self.state,
            "status": arrival.status,
            "started_ms": arrival.start_ns / 1e6,
            "duration_ms": lasts_s * 1e3,
            "ttft_ms": ttft_s * 1e3 if ttft_s else None,
            "events": events,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens or events,  # about: an event is a token or more
            "finish_reason": self.finish_reason,
            "error": self.error,
        }


class SeenRequests:
    """Bounded; the newest are kept, running or not."""

    def __init__(self) -> None:
        self._seen: deque[SeenRequest] = deque(maxlen=MAX_SEEN)

    def begin(self, arrival: Arrival, route: str, protocol: str, traceparent: str) -> SeenRequest:
        """A request has come."""
        seen = SeenRequest(arrival, route, protocol, traceparent)
        self._seen.append(seen)
        return seen

    def rows(self, key: str, most: int = 100) -> list[dict[str, object]]:
        """Newest first; of one API key, or all when no key is asked for."""
        mine = (seen for seen in reversed(self._seen) if not key or seen.arrival.key == key)
        return [seen.row() for seen, _ in zip(mine, range(most), strict=False)]

    def find(self, wanted: str, key: str) -> SeenRequest | None:
        """By its id, the label of its client, or its trace's id; the newest."""
        for seen in reversed(self._seen):
            names = (seen.arrival.rid.hex(), seen.arrival.request_id, seen.trace_id)
            if wanted in names and (not key or seen.arrival.key == key):
                return seen
        return None
