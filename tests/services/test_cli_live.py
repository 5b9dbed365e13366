"""`deepmesh timeline` and `deepmesh top` against a gateway, and the trace that Perfetto opens."""

import io
import json
import threading
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from deepmesh import timeline
from deepmesh.cli.app import app
from deepmesh.cli.timeline import seconds
from deepmesh.cli.top import picture
from deepmesh.live_client import Device, Figures, News, Process, State
from deepmesh.recorder import Kind
from deepmesh.wire.messages import GetRecords, Records, StepKind, StepNote, Submit
from tests.services.gateway_harness import Mesh, running_mesh

RID = bytes(range(16))
MS = 1_000_000


def slices(*pieces: tuple[Kind, int, int, int]) -> list[tuple[int, int, int, int, int]]:
    return [(int(kind), step, start * MS, end * MS, 1) for kind, step, start, end in pieces]


def records() -> list[Records]:
    """Plan of step 8 while step 7 runs on two ranks."""
    scheduler = slices((Kind.PLAN, 7, 1000, 1001), (Kind.PLAN, 8, 1003, 1004))
    device = slices((Kind.DEVICE, 7, 1002, 1009), (Kind.DEVICE, 8, 1009, 1015))
    return [
        Records(1, "executor-0-0", "executor", device, work=[(7, 14e9, 7e8)], peaks=(4e12, 1e12)),
        Records(1, "executor-0-1", "executor", device, rank=1),
        Records(
            1,
            "scheduler-0",
            "scheduler",
            scheduler,
            [StepNote(7, StepKind.DECODE, 2, 2, [RID])],
        ),
    ]


def test_a_trace_has_processes_threads_and_the_requests_of_each_step() -> None:
    found = json.loads(timeline.chrome(timeline.build(records(), 900 * MS, 2000 * MS)))
    events = found["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    assert list(names) == ["scheduler-0", "executor-0-0", "executor-0-1"], "as a request meets them"
    threads = [(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    assert threads == [(1, "plan"), (2, "device"), (3, "device")]
    whole = [e for e in events if e["ph"] == "X"]
    assert {e["name"] for e in whole} == {"plan 7", "plan 8", "device 7", "device 8"}
    seven = [e for e in whole if e["name"] == "device 7"]
    assert all(e["ts"] == pytest.approx(1002e3) and e["dur"] == 7000 for e in seven)
    assert {e["args"]["requests"] for e in seven} == {RID.hex()[:12]}
    assert all(set(e) >= {"ph", "name", "pid", "tid", "ts"} for e in whole)


def test_a_step_on_a_device_says_what_it_computed() -> None:
    built = timeline.build(records(), 900 * MS, 2000 * MS)
    events = json.loads(timeline.chrome(built))["traceEvents"]
    work = [e["args"] for e in events if e["ph"] == "X" and "mfu" in e["args"]]
    assert [(w["step"], w["flops"], w["bytes"]) for w in work] == [(7, 14e9, 7e8)]
    assert work[0]["mfu"] == pytest.approx(14e9 / 7e-3 / 4e12)
    assert work[0]["bandwidth_share"] == pytest.approx(7e8 / 7e-3 / 1e12)


def test_arrows_lead_from_a_plan_to_every_rank() -> None:
    events = json.loads(timeline.chrome(timeline.build(records(), 900 * MS, 2000 * MS)))
    arrows = [e for e in events["traceEvents"] if e["ph"] in "sf"]
    begins, ends = [[e for e in arrows if e["ph"] == phase] for phase in "sf"]
    assert len(begins) == len(ends) == 4
    assert {e["id"] for e in begins} == {e["id"] for e in ends}
    assert {e["pid"] for e in begins} == {1}
    assert {e["pid"] for e in ends} == {2, 3}


@pytest.mark.parametrize(("text", "value"), [("5s", 5), ("500ms", 0.5), ("1m", 60), ("2", 2)])
def test_durations(text: str, value: float) -> None:
    assert seconds(text) == pytest.approx(value)


def test_a_wrong_duration_is_refused() -> None:
    result = CliRunner().invoke(app, ["timeline", "--last", "soon", "--url", "http://localhost:1"])
    assert result.exit_code == 2
    assert "no duration" in result.output


def answer_once(mesh: Mesh) -> None:
    order = mesh.tokenizer.expect(GetRecords)
    until_ns = order.since_ns + 1_000 * MS
    pieces = [(int(Kind.DEVICE), 3, until_ns - 5 * MS, until_ns, 2)]
    mesh.tokenizer.send(Records(order.op_id, "executor-0-0", "executor", pieces))


def test_timeline_writes_what_the_gateway_collects(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh:
        helper = threading.Thread(target=answer_once, args=[mesh])
        helper.start()
        output = tmp_path / "trace.json"
        result = CliRunner().invoke(
            app, ["timeline", "--url", mesh.server.url, "--last", "2s", "-o", str(output)]
        )
        helper.join()
    assert result.exit_code == 0, result.output
    assert "1 slices of 1 processes" in result.output
    names = [event["name"] for event in json.loads(output.read_text())["traceEvents"]]
    assert "device 3" in names


def test_top_shows_processes_groups_and_requests(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh:
        client = mesh.post()
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.finish(submit, 0, b"data: 1\n\n")
        client.getresponse().read()
        url = ["--url", mesh.server.url]
        plain = CliRunner().invoke(app, ["top", "--once", *url], env={"COLUMNS": "160"})
        as_json = CliRunner().invoke(app, ["top", "--json", *url])
    assert plain.exit_code == 0, plain.output
    for word in ("tokenizer-0", "scheduler-0", submit.rid.hex()[:12], "/v1/chat/completions"):
        assert word in plain.output
    state = json.loads(as_json.output)
    assert {process["name"] for process in state["processes"]} >= {"gateway-0", "tokenizer-0"}
    assert state["replicas"][0]["waiting"] == 3


def test_top_shows_shares_of_the_peaks_and_what_happened() -> None:
    figures = Figures(5.0, 60.0, 20.0, 1, 0, 0.5, mfu=0.25, bandwidth_share=0.5)
    state = State(
        model="m",
        version="1",
        processes=[Process("executor-0-0", "executor", "restarted", 1, restarts=3)],
        links=[],
        replicas=[],
        figures=figures,
        requests=[],
        news=[News(1e12, "executor-0-0", "up", "restarted")],
        devices=[Device("scheduler-0", 1, 0.125)],
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(picture(state))
    shown = console.export_text()
    for words in ("MFU 25.0%", "bandwidth 50.0%", "scheduler-0 rank 1", "12.5%", "up → restarted"):
        assert words in shown


def test_without_a_mesh_top_says_so() -> None:
    result = CliRunner().invoke(app, ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert result.exit_code != 0
    assert "is the mesh up?" in str(result.exception)
