"""A request's time on the device, out of the steps that carried its rows."""

from pathlib import Path

import numpy as np
import pytest

from deepmesh import telemetry
from deepmesh.config import Config, MeshConfig
from deepmesh.recorder import Kind
from deepmesh.telemetry import SPAN_DEVICE_DECODE, SPAN_DEVICE_PREFILL, new_traceparent
from deepmesh.waterfall import Span, read_spans
from deepmesh.wire.messages import (
    Descriptor,
    DoneReason,
    RowMode,
    SlotInit,
    StepKind,
    StepResult,
    StepStatus,
    StepTimes,
    SubmitStep,
)
from deepmesh.wire.packed import RESULT, ROW, SLOT
from services.executor.traces import QUIET_S, Traces

EPOCH = 7 << 32
MS = 1_000_000
A, B = new_traceparent(), new_traceparent()


class Bench:
    """Steps in, results out, spans read back from the file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config = Config(mesh=MeshConfig(name="t", run_dir=str(folder)))
        self.tracer = telemetry.setup("executor", "executor-0-1", config)
        self.now = 100.0
        self.traces = Traces(self.tracer, rank=1, clock=lambda: self.now)

    def submit(
        self,
        number: int,
        rows: list[tuple[int, RowMode]],
        *,
        init: dict[int, str] | None = None,
        close: tuple[int, ...] = (),
    ) -> None:
        packed, closed = np.zeros(len(rows), ROW), np.zeros(len(close), SLOT)
        packed["slot"] = [slot for slot, _ in rows]
        packed["mode"] = [mode for _, mode in rows]
        closed["slot"] = close
        inits = [
            SlotInit(slot, 1, slot, 1, b"", 1, 9, traceparent=trace)
            for slot, trace in (init or {}).items()
        ]
        descriptor = Descriptor(StepKind.DECODE, 1, 1)
        self.traces.submit(
            SubmitStep(
                7,
                EPOCH + number,
                number,
                7,
                descriptor,
                packed.tobytes(),
                inits,
                close=closed.tobytes(),
            )
        )

    def result(
        self,
        number: int,
        begin_ms: int,
        end_ms: int,
        *,
        done: dict[int, DoneReason] | None = None,
        status: StepStatus = StepStatus.OK,
    ) -> None:
        rows = np.zeros(len(done or {}), RESULT)
        rows["slot"] = list(done or {})
        rows["done_reason"] = list((done or {}).values())
        times = StepTimes(begin_ns=begin_ms * MS, end_ns=end_ms * MS, copied_ns=end_ms * MS)
        self.traces.result(StepResult(7, EPOCH + number, 1, status, rows.tobytes(), times=times))

    def spans(self) -> list[Span]:
        """All spans so far."""
        self.tracer.flush()
        return list(read_spans(self.folder / "traces"))

    def seen(self) -> list[tuple[str, str, int, int, object]]:
        """(whose, name, begin, end, steps) of all spans so far, ms."""
        return [
            (
                "A" if span.trace_id == A[3:35] else "B",
                span.name,
                span.start_ns // MS,
                span.end_ns // MS,
                span.attributes["steps"],
            )
            for span in self.spans()
        ]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_prompt_and_output_are_spans_that_name_their_steps(bench: Bench) -> None:
    bench.submit(1, [(3, RowMode.PREFILL)], init={3: A})
    bench.submit(2, [(3, RowMode.PREFILL)])
    bench.result(1, 10, 14)
    bench.submit(3, [(3, RowMode.DECODE)])
    bench.result(2, 14, 20)
    bench.submit(4, [(3, RowMode.DECODE)])
    bench.result(3, 20, 27)
    bench.submit(5, [(3, RowMode.DECODE)])  # behind its end: planned before that was known
    bench.result(4, 27, 30, done={3: DoneReason.EOS})
    bench.result(5, 30, 31, done={3: DoneReason.NULL})
    assert bench.seen() == [
        ("A", SPAN_DEVICE_PREFILL, 10, 20, 2),
        ("A", SPAN_DEVICE_DECODE, 20, 30, 2),
    ]
    prefill, decode = bench.spans()
    assert prefill.parent_id == decode.parent_id == A[36:52]
    assert decode.attributes == {
        "rank": 1,
        "steps": 2,
        "busy_ms": 10.0,
        "first_step": 3,
        "last_step": 4,
        "slowest_step": 3,
        "slowest_ms": 7.0,
    }
    assert decode.links == [], "a step is a trace only if its scheduler's spans name it"


def test_the_timeline_has_what_each_step_waited_for(bench: Bench) -> None:
    bench.submit(1, [(0, RowMode.PREFILL)])
    bench.result(1, 10, 14)
    bench.submit(2, [(0, RowMode.DECODE)])
    bench.result(2, 20, 23, done={0: DoneReason.NONE})
    device = [piece for piece in bench.traces.slices(1) if piece[0] == Kind.DEVICE]
    assert device == [(Kind.DEVICE, 1, 10 * MS, 14 * MS, 0), (Kind.DEVICE, 2, 20 * MS, 23 * MS, 1)]
    assert {Kind(piece[0]) for piece in bench.traces.slices(1)} == {
        Kind.QUEUED,
        Kind.DEVICE,
        Kind.READBACK,
    }
    assert [piece[1] for piece in bench.traces.slices(20 * MS)] == [2, 2, 2]


def test_a_slot_that_changes_hands_in_flight_is_not_mistaken(bench: Bench) -> None:
    bench.submit(1, [(40, RowMode.DECODE), (2, RowMode.DECODE)], init={40: A})
    bench.submit(2, [(40, RowMode.DECODE)], init={40: B}, close=(40,))
    bench.submit(3, [(2, RowMode.DECODE)], close=(40,))
    for number in (1, 2, 3):
        bench.result(number, 10 * number, 10 * number + 5)
    assert bench.seen() == [
        ("A", SPAN_DEVICE_DECODE, 10, 15, 1),
        ("B", SPAN_DEVICE_DECODE, 20, 25, 1),
    ]


def test_what_is_not_sampled_and_failed_steps_leave_nothing(bench: Bench) -> None:
    bench.submit(1, [(0, RowMode.DECODE)], init={0: A[:-1] + "0", 1: "", 2: B})
    bench.result(1, 10, 11, done={0: DoneReason.LENGTH})
    bench.submit(2, [(2, RowMode.PREFILL), (0, RowMode.DUMMY)])
    bench.result(2, 11, 12, status=StepStatus.ERROR)
    bench.traces.abandon()
    assert bench.seen() == []


def test_what_rests_is_reported_and_goes_on_as_another_span(bench: Bench) -> None:
    bench.submit(1, [(0, RowMode.DECODE)], init={0: A})
    bench.result(1, 10, 11)
    bench.traces.quiet()
    assert bench.seen() == []
    bench.now += QUIET_S
    bench.traces.quiet()
    bench.traces.quiet()
    bench.submit(2, [(0, RowMode.DECODE)])
    bench.result(2, 900, 905)
    bench.traces.abandon()
    assert bench.seen() == [
        ("A", SPAN_DEVICE_DECODE, 10, 11, 1),
        ("A", SPAN_DEVICE_DECODE, 900, 905, 1),
    ]
