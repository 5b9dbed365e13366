"""Records of many processes as one timeline: for the page, and as a trace for Perfetto. Pure."""

from collections.abc import Iterable, Sequence

import msgspec

from deepmesh.recorder import Kind
from deepmesh.wire.messages import Records, StepNote

RID_DIGITS = 12  # of a request's id, as in logs
_ORDER = ("gateway", "tokenizer", "router", "scheduler", "executor", "kvstore")
_TRACKS = {  # which slices of a process lie on one line, and how it is called
    Kind.PLAN: "plan",
    Kind.SUBMIT: "wire",
    Kind.APPLY: "apply",
    Kind.QUEUED: "queue",
    Kind.DEVICE: "device",
    Kind.COLLECTIVE: "collectives",
    Kind.READBACK: "readback",
    Kind.DETOKENISE: "detokenise",
    Kind.LOAD: "loads",
    Kind.STORE: "stores",
}
_NAMES = {kind: kind.name.lower() for kind in Kind}


class Track(msgspec.Struct, frozen=True):
    """A line of the timeline."""

    process: str
    service: str
    name: str


class Slice(msgspec.Struct, frozen=True, omit_defaults=True):
    """A piece of time on a track."""

    track: int
    kind: str
    step: int  # group step; 0: of none
    start_us: float  # from the timeline's begin
    dur_us: float
    value: int  # see `recorder.Kind`
    # Of a step on a device that counts: what it computed and moved, and the shares of the peaks
    flops: float = 0.0
    bytes: float = 0.0
    mfu: float = 0.0
    bandwidth_share: float = 0.0


class Step(msgspec.Struct, frozen=True):
    """What a group step held."""

    step: int
    replica: str
    kind: str
    rows: int
    tokens: int
    requests: list[str]  # first digits of their ids


class Timeline(msgspec.Struct, frozen=True):
    """All processes on one clock."""

    begin_ms: float
    end_ms: float
    tracks: list[Track]
    slices: list[Slice]
    steps: list[Step]


def build(records: Sequence[Records], since_ns: int, until_ns: int) -> Timeline:
    """Put what the processes told side by side, in the order in which a request meets them."""
    tracks: dict[tuple[str, str], int] = {}
    found: list[Track] = []
    slices: list[Slice] = []
    for each in sorted(records, key=lambda r: (_order(r.service), r.process)):
        work = {step: (flops, moved) for step, flops, moved in each.work}
        for kind, step, start_ns, end_ns, value in sorted(each.slices, key=_line):
            if start_ns > until_ns or kind not in _NAMES:
                continue
            name = _TRACKS[Kind(kind)]
            if (each.process, name) not in tracks:
                tracks[each.process, name] = len(found)
                found.append(Track(each.process, each.service, name))
            start_us, dur_us = (start_ns - since_ns) / 1e3, (end_ns - start_ns) / 1e3
            track = tracks[each.process, name]
            piece = Slice(track, _NAMES[Kind(kind)], step, start_us, max(0.0, dur_us), value)
            if kind == Kind.DEVICE and step in work:
                piece = _with_work(piece, work[step], each.peaks)
            slices.append(piece)
    steps = [_step(each.process, note) for each in records for note in each.steps]
    return Timeline(since_ns / 1e6, until_ns / 1e6, found, slices, steps)


def _with_work(piece: Slice, work: tuple[float, float], peaks: tuple[float, float]) -> Slice:
    shares = [
        done / (piece.dur_us * 1e-6 * peak) if piece.dur_us and peak else 0.0
        for done, peak in zip(work, peaks, strict=True)
    ]
    flops, moved = work
    return msgspec.structs.replace(
        piece, flops=flops, bytes=moved, mfu=shares[0], bandwidth_share=shares[1]
    )


def _line(piece: tuple[int, int, int, int, int]) -> tuple[int, int]:
    kind, _, start_ns, _, _ = piece
    return kind, start_ns


def _order(service: str) -> int:
    return _ORDER.index(service) if service in _ORDER else len(_ORDER)


def _step(replica: str, note: StepNote) -> Step:
    requests = [rid.hex()[:RID_DIGITS] for rid in note.rids]
    return Step(note.step, replica, note.kind.name, note.rows, note.tokens, requests)


# ---------------------------------------------------------------- for Perfetto

Event = dict[str, object]


def chrome(timeline: Timeline) -> bytes:
    """The JSON format that Perfetto and chrome://tracing open: complete events and names.

    A process of the mesh is a process there, a track one of its threads. Arrows lead from a
    step's plan to each rank's device.
    """
    pids: dict[str, int] = {}
    for track in timeline.tracks:
        pids.setdefault(track.process, len(pids) + 1)
    held = {(step.replica, step.step): step for step in timeline.steps}
    events = [*_names(timeline, pids), *_pieces(timeline, pids, held), *_arrows(timeline, pids)]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events})


def _names(timeline: Timeline, pids: dict[str, int]) -> Iterable[Event]:
    for process, pid in pids.items():
        yield _meta("process_name", pid, 0, name=process)
        yield _meta("process_sort_index", pid, 0, sort_index=pid)
    for number, track in enumerate(timeline.tracks, 1):
        yield _meta("thread_name", pids[track.process], number, name=track.name)
        yield _meta("thread_sort_index", pids[track.process], number, sort_index=number)


def _meta(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _pieces(
    timeline: Timeline, pids: dict[str, int], held: dict[tuple[str, int], Step]
) -> Iterable[Event]:
    for piece in timeline.slices:
        track = timeline.tracks[piece.track]
        args: Event = {"step": piece.step, "value": piece.value}
        if piece.flops:
            args |= {"flops": piece.flops, "bytes": piece.bytes}
            args |= {"mfu": piece.mfu, "bandwidth_share": piece.bandwidth_share}
        if (step := held.get((_replica(track), piece.step))) is not None:
            args |= {
                "kind": step.kind,
                "rows": step.rows,
                "tokens": step.tokens,
                "requests": ", ".join(step.requests),
            }
        yield {
            "ph": "X",
            "name": f"{piece.kind} {piece.step}" if piece.step else piece.kind,
            "cat": piece.kind,
            "pid": pids[track.process],
            "tid": piece.track + 1,
            "ts": timeline.begin_ms * 1e3 + piece.start_us,
            "dur": piece.dur_us,
            "args": args,
        }


def _replica(track: Track) -> str:
    """Whose steps they are."""
    if track.service == "executor":
        return f"scheduler-{track.process.split('-')[1]}"
    return track.process


def _arrows(timeline: Timeline, pids: dict[str, int]) -> Iterable[Event]:
    """From a step's plan to the begin of its device time on each rank."""
    plans = {
        (_replica(timeline.tracks[piece.track]), piece.step): piece
        for piece in timeline.slices
        if piece.kind == "plan"
    }
    for number, piece in enumerate(timeline.slices, 1):
        plan = plans.get((_replica(timeline.tracks[piece.track]), piece.step))
        if piece.kind != "device" or plan is None:
            continue
        ends = (("s", plan, plan.start_us + plan.dur_us), ("f", piece, piece.start_us))
        for phase, end, at_us in ends:
            yield {
                "ph": phase,
                "bp": "e",
                "id": number,
                "name": "step",
                "cat": "step",
                "pid": pids[timeline.tracks[end.track].process],
                "tid": end.track + 1,
                "ts": timeline.begin_ms * 1e3 + at_us,
            }
