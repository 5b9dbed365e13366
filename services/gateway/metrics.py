"""What the gateway counts and measures. Plain numbers; `exposition.py` gives them their names."""

from bisect import bisect_left
from collections import Counter, defaultdict

# Bounds in seconds: a token of the tiny model takes 1 ms, a long prompt a minute.
TOKEN_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
FIRST_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
TOTAL_BOUNDS = (0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0)


SIZE_BOUNDS = (1.0, 8.0, 32.0, 128.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 32768.0, 131072.0)


class Histogram:
    """Counts by upper bound. A tenth of the cost of prometheus_client's, which locks."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one is beyond all bounds
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    def merge(self, other: "Histogram") -> None:
        """Add all that another one of the same bounds has seen."""
        self.counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        self.total += other.total

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bounds and cumulative counts, as Prometheus has them."""
        labels = [*map(str, self.bounds), "+Inf"]
        running, result = 0, list[tuple[str, float]]()
        for label, count in zip(labels, self.counts, strict=True):
            running += count
            result.append((label, running))
        return result


class Metrics:
    """Counters since the start, by protocol."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # (protocol, status)
        self.running: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()
        self.disconnects: Counter[str] = Counter()
        self.first: dict[str, Histogram] = defaultdict(lambda: Histogram(FIRST_BOUNDS))
        self.between: dict[str, Histogram] = defaultdict(lambda: Histogram(TOKEN_BOUNDS))
        self.prompts, self.outputs = Histogram(SIZE_BOUNDS), Histogram(SIZE_BOUNDS)
        self.whole: dict[str, Histogram] = defaultdict(lambda: Histogram(TOTAL_BOUNDS))


class RequestTimer:
    """TTFT and ITL of one stream: request in to first event out, and between events out."""

    def __init__(self, metrics: Metrics, protocol: str, start_s: float) -> None:
        self._first = metrics.first[protocol]
        self._between = metrics.between[protocol]
        self._start_s = start_s
        self._last_s = 0.0
        self.ttft_s = 0.0
        self.num_events = 0

    def wrote(self, now_s: float, num_events: int) -> None:
        """Events that went out in one write share its time evenly."""
        self.num_events += num_events
        if not self._last_s:
            self.ttft_s = now_s - self._start_s
            self._first.observe(self.ttft_s)
        else:
            self._between.observe((now_s - self._last_s) / num_events, num_events)
        self._last_s = now_s
