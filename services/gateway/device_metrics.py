"""What each device computed and moved, and which share of its peaks that is."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deepmesh.wire.messages import DeviceWork, ReplicaStats

_NS = 1e-9
_LABELS = ["replica", "rank"]
_COUNTERS: list[tuple[str, str, Callable[[DeviceWork], float]]] = [
    ("flops", "Floating point operations of steps, by the model's shapes", lambda d: d.flops),
    ("bytes", "Bytes that steps moved between a device and its memory", lambda d: d.moved_bytes),
    ("busy_seconds", "Begin to end of steps on a device", lambda d: d.busy_ns * _NS),
]
_PEAKS: list[tuple[str, str, Callable[[DeviceWork], float]]] = [
    ("peak_flops", "Floating point operations a second at most", lambda d: d.peak_flops),
    ("peak_bytes", "Bytes of memory a second at most", lambda d: d.peak_bytes),
]


def mfu(now: DeviceWork, before: DeviceWork | None = None) -> float | None:
    """Model FLOPs over what the device could do in the time of its steps; None: not known."""
    before = before or DeviceWork()
    return _share(now.flops - before.flops, now.busy_ns - before.busy_ns, now.peak_flops)


def bandwidth_share(now: DeviceWork, before: DeviceWork | None = None) -> float | None:
    """The same of the bytes moved."""
    before = before or DeviceWork()
    moved = now.moved_bytes - before.moved_bytes
    return _share(moved, now.busy_ns - before.busy_ns, now.peak_bytes)


def _share(done: float, busy_ns: int, peak: float) -> float | None:
    return done / (busy_ns * _NS * peak) if busy_ns > 0 and peak > 0 and done >= 0 else None


def device_metrics(replicas: Sequence[ReplicaStats]) -> Iterator[Metric]:
    """Of ranks that count their work."""
    devices = [(replica.name, each) for replica in replicas for each in replica.devices]
    for name, doc, read in _COUNTERS:
        counter = CounterMetricFamily(f"deepmesh_device_{name}", doc, labels=_LABELS)
        for replica, each in devices:
            counter.add_metric([replica, str(each.rank)], read(each))
        yield counter
    for name, doc, read in _PEAKS:
        gauge = GaugeMetricFamily(f"deepmesh_device_{name}", doc, labels=_LABELS)
        for replica, each in devices:
            gauge.add_metric([replica, str(each.rank)], read(each))
        yield gauge
    for name, doc, share in (
        ("mfu", "Model FLOPs of steps over the peak in their time, since the start", mfu),
        ("bandwidth_share", "Bytes of steps over the peak in their time", bandwidth_share),
    ):
        gauge = GaugeMetricFamily(f"deepmesh_{name}", doc, labels=_LABELS)
        for replica, each in devices:
            if (value := share(each)) is not None:
                gauge.add_metric([replica, str(each.rank)], value)
        yield gauge
