"""What one API key may have: requests and tokens a minute, and requests open at once.

The limits are those of the mesh. Gateways do not ask each other: each grants its share, so that
all together grant no more, wherever clients are sent.
"""

import contextlib
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator

from deepmesh.config import GatewayConfig
from deepmesh.wire.messages import ErrorCode
from services.gateway.arrival import Arrival
from services.gateway.auth import Keys
from services.gateway.errors import ProblemError, Shape, problem

MINUTE_S = 60.0
_COUNTED = ("chat", "completions", "responses", "messages")  # those that keep an engine busy


class Bucket:
    """Fills steadily to what a minute allows; may be overdrawn by what is known too late."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is left."""
        gained = (now - self._at) * self._per_minute / MINUTE_S
        self._level, self._at = min(float(self._per_minute), self._level + gained), now
        return self._level

    def take(self, amount: float, now: float) -> None:
        """Take it out, whatever is left."""
        self._level = self.level(now) - amount

    def wait_s(self, amount: float, now: float) -> float:
        """Until so much is there."""
        return max(0.0, amount - self.level(now)) * MINUTE_S / self._per_minute


class Quotas:
    """Checks keys and their limits; 0 is none."""

    def __init__(
        self, keys: Keys, config: GatewayConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._limits = {
            "requests": _share(config.key_requests_per_minute, config.count),
            "tokens": _share(config.key_tokens_per_minute, config.count),
        }
        self._max_open = _share(config.key_max_requests, config.count)
        self._here = " at this gateway" if config.count > 1 else ""
        self._priorities = config.key_priorities
        self._clock = clock
        self._open: Counter[str] = Counter()  # by key
        self._buckets: dict[tuple[str, str], Bucket] = {}  # by key, of which there are few

    def priority(self, key: str) -> int:
        """Of all requests of a key; greater goes first."""
        return self._priorities.get(key, 0)

    @contextlib.contextmanager
    def enter(self, arrival: Arrival, protocol: str) -> Iterator[str]:
        """Hold a place for a request; gives the digest of its key.

        Raises:
            ProblemError: 401, or 429 when the key has used up what it may have.
        """
        key = arrival.key = self._keys.check(arrival.headers)
        if protocol not in _COUNTED:
            yield key
            return
        self._check(key, arrival)
        self._open[key] += 1
        try:
            yield key
        finally:
            self._open[key] -= 1

    def used(self, arrival: Arrival, tokens: int) -> None:
        """A request has ended; its tokens count now."""
        if self._limits["tokens"]:
            now = self._clock()
            self._bucket(arrival.key, "tokens", now).take(tokens, now)

    def _check(self, key: str, arrival: Arrival) -> None:
        """Every limit is looked at before anything is taken, and told whatever comes of it."""
        now = self._clock()
        wait_s, reason = 0.0, ""
        buckets = {
            kind: self._bucket(key, kind, now) for kind, limit in self._limits.items() if limit
        }
        for kind, bucket in buckets.items():
            if (left_s := bucket.wait_s(1, now)) > wait_s:
                wait_s, reason = (
                    left_s,
                    f"this API key may have {self._limits[kind]} {kind} a minute{self._here}",
                )
        if self._max_open and self._open[key] >= self._max_open:
            reason = f"{self._max_open} requests of this API key are open{self._here}"
            wait_s = max(wait_s, 1.0)
        if not reason and "requests" in buckets:
            buckets["requests"].take(1, now)
        for kind, bucket in buckets.items():
            told = _headers(arrival.shape, kind, self._limits[kind], bucket, now)
            arrival.headers_out = arrival.headers_out + told
        if reason:
            raise ProblemError(problem(ErrorCode.OVERLOADED, reason, retry_after_s=wait_s))

    def _bucket(self, key: str, kind: str, now: float) -> Bucket:
        if (key, kind) not in self._buckets:
            self._buckets[key, kind] = Bucket(self._limits[kind], now)
        return self._buckets[key, kind]


def _share(limit: int, num_gateways: int) -> int:
    """Of one gateway; at least 1 of a limit that there is."""
    return -(-limit // max(1, num_gateways))


def _headers(
    shape: Shape, kind: str, limit: int, bucket: Bucket, now: float
) -> list[tuple[bytes, bytes]]:
    """In the names of the caller's SDK."""
    left, full_s = str(max(0, math.floor(bucket.level(now)))), bucket.wait_s(limit, now)
    if shape is Shape.ANTHROPIC:
        reset = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + full_s))
        prefix, suffix = f"anthropic-ratelimit-{kind}-", ""
    else:
        prefix, suffix, reset = "x-ratelimit-", f"-{kind}", f"{full_s:.3f}s"
    values = {"limit": str(limit), "remaining": left, "reset": reset}
    return [(f"{prefix}{what}{suffix}".encode(), value.encode()) for what, value in values.items()]
