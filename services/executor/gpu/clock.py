"""A device's clock on the wall clock, though the two drift apart. No torch."""

WINDOW = 512  # times that somebody heard of what a device did; the quickest of them tells the drift
TOLERANCE_NS = 100_000  # of drift that is let be: each correction falls into one gap between steps


class WallClock:
    """Adds what lies between the clocks.

    The host hears of an event some time after it, but hardly ever sooner than the least of many
    times before: when the least of a window differs from that of the first one, a clock has moved.
    """

    def __init__(self, offset_ns: int) -> None:
        """`offset_ns`: from the device's clock to the wall clock, now."""
        self._offset_ns, self._usual_ns = offset_ns, -1
        self._least_ns, self._count = 1 << 62, 0

    def at(self, device_ns: int) -> int:
        """Wall clock, ns, of what the device's clock said."""
        return device_ns + self._offset_ns

    def heard(self, device_ns: int, now_ns: int) -> None:
        """What happened on the device at that time is known to the host now (wall clock)."""
        self._least_ns = min(self._least_ns, now_ns - self.at(device_ns))
        self._count += 1
        if self._count < WINDOW:
            return
        if self._usual_ns < 0:
            self._usual_ns = max(0, self._least_ns)
        elif abs(self._least_ns - self._usual_ns) > TOLERANCE_NS:
            self._offset_ns += self._least_ns - self._usual_ns
        self._least_ns, self._count = 1 << 62, 0
