"""Live data of the gateway: the feed, the mesh map, waterfalls and the timeline."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepmesh.config import (
    Config,
    ExecutorConfig,
    KvstoreConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from deepmesh.recorder import Kind
from deepmesh.wire.link import Peer
from deepmesh.wire.messages import (
    DeviceWork,
    ErrorCode,
    GetRecords,
    KeepTrace,
    LinkStats,
    Records,
    ReplicaStats,
    ServiceStats,
    StepKind,
    StepNote,
    Submit,
)
from services.gateway.live_figures import Figures, quantile
from services.gateway.live_mesh import RESTARTED_S, MeshMap
from services.gateway.metrics import Metrics
from tests.services.gateway_harness import FakeTokenizer, Mesh, make_config, running_mesh, until


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Mesh]:
    with running_mesh(tmp_path) as mesh:
        yield mesh


def get(mesh: Mesh, path: str) -> dict[str, Any]:
    response, body = mesh.get(path)
    assert response.status == 200, body
    return json.loads(body)


def first_state(mesh: Mesh) -> dict[str, Any]:
    client = mesh.client()
    client.request("GET", "/ui/api/feed?interval=0.25")
    response = client.getresponse()
    assert (response.getheader("content-type") or "").startswith("text/event-stream")
    name, data = response.readline(), response.readline()
    client.close()
    assert name == b"event: state\n"
    return json.loads(data.removeprefix(b"data: "))


def chat(mesh: Mesh) -> Submit:
    client = mesh.post(headers={"x-request-id": "label"})
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    mesh.tokenizer.finish(submit, 1, b"data: 1\n\n")
    client.getresponse().read()
    return submit


# ---------------------------------------------------------------- the feed


def test_the_feed_shows_requests_replicas_and_processes(mesh: Mesh) -> None:
    running = mesh.post()
    submit = mesh.tokenizer.expect(Submit)
    state = first_state(mesh)
    (row,) = state["requests"]
    assert (row["id"], row["state"], row["route"]) == (
        submit.rid.hex(),
        "running",
        "/v1/chat/completions",
    )
    mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
    until(lambda: first_state(mesh)["requests"][0]["output_tokens"] == 1)
    row = first_state(mesh)["requests"][0]
    assert row["state"] == "running"
    assert row["ttft_ms"] > 0, "while it runs"
    mesh.tokenizer.finish(submit, 1, b"data: 1\n\n")
    running.getresponse().read()
    until(lambda: first_state(mesh)["requests"][0]["state"] == "done")
    state = first_state(mesh)
    row = state["requests"][0]
    assert (row["status"], row["output_tokens"], row["cached_tokens"]) == (200, 2, 1)
    assert row["ttft_ms"] > 0
    assert row["trace_id"] == submit.traceparent[3:35]
    assert state["replicas"][0]["pools"]["global"] == {
        "total": 100,
        "free": 50,
        "cached": 25,
        "pinned": 0,
    }
    by_name = {process["name"]: process for process in state["processes"]}
    assert by_name["gateway-0"]["state"] == by_name["tokenizer-0"]["state"] == "up"
    assert by_name["scheduler-0"]["state"] == "down", "no link of it is told of"


def test_what_failed_says_why(mesh: Mesh) -> None:
    client = mesh.post()
    mesh.tokenizer.fail(mesh.tokenizer.expect(Submit), ErrorCode.INVALID)
    client.getresponse().read()
    until(lambda: first_state(mesh)["requests"][0]["state"] == "failed")
    assert first_state(mesh)["requests"][0]["error"]


def test_each_key_sees_its_own_requests(tmp_path: Path) -> None:
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob")}
    with running_mesh(tmp_path, api_keys=list(keys.values())) as mesh:
        client = mesh.post(headers={"authorization": "Bearer ann"})
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.finish(submit, 0, b"data: 1\n\n")
        client.getresponse().read()
        assert mesh.get("/ui/api/history")[0].status == 401
        path = f"/ui/api/requests/{submit.rid.hex()}"
        assert mesh.get(path, headers={"authorization": "Bearer bob"})[0].status == 404
        assert mesh.get("/ui/api/history", headers={"x-api-key": "bob"})[0].status == 200


@pytest.mark.parametrize(
    "path", ["feed?interval=0", "feed?interval=x", "timeline?last=61", "timeline?last=nan"]
)
def test_numbers_out_of_range_are_refused(mesh: Mesh, path: str) -> None:
    response, body = mesh.get(f"/ui/api/{path}")
    assert response.status == 400
    assert json.loads(body)["error"]["param"] in ("interval", "last")


# ---------------------------------------------------------------- questions


def answer(mesh: Mesh, records: Records) -> None:
    order = mesh.tokenizer.expect(GetRecords)
    mesh.tokenizer.send(msgspec.structs.replace(records, op_id=order.op_id))


def get_while(mesh: Mesh, path: str, records: Records) -> dict[str, Any]:
    """The answer to a question that a tokenizer is asked in turn."""
    client = mesh.client()
    client.request("GET", path)
    answer(mesh, records)
    response = client.getresponse()
    assert response.status == 200
    return json.loads(response.read())


def test_a_waterfall_has_the_spans_of_all_processes(mesh: Mesh) -> None:
    submit = chat(mesh)
    root_id = submit.traceparent[36:52]
    line = {
        "trace_id": submit.traceparent[3:35],
        "span_id": "a" * 16,
        "parent_id": root_id,
        "name": "tokenize",
        "service": "tokenizer",
        "process": "tokenizer-0",
        "start_ns": 1,
        "end_ns": 2,
    }
    records = Records(0, "tokenizer-0", "tokenizer", spans=json.dumps(line).encode() + b"\n")
    until(lambda: first_state(mesh)["requests"][0]["state"] == "done")
    for name in (submit.rid.hex(), "label", submit.traceparent[3:35]):
        found = get_while(mesh, f"/ui/api/requests/{name}", records)
        assert found["request_id"] == "label"
        spans = {span["name"]: span for span in found["spans"]}
        assert {"request", "read body", "stream", "tokenize"} <= set(spans)
        assert spans["tokenize"]["parent_id"] == spans["request"]["span_id"] == root_id
        assert spans["tokenize"]["depth"] == 1
        assert spans["stream"]["waits"]
    assert mesh.get("/ui/api/requests/nobody")[0].status == 404


def test_the_timeline_puts_processes_side_by_side(mesh: Mesh) -> None:
    until(lambda: mesh.get("/ready")[0].status == 200)
    began_ns = 2**62  # in the future: not shown
    rid = bytes(range(16))

    def records(now_ns: int) -> Records:
        slices = [
            (int(Kind.PLAN), 7, now_ns - 3000, now_ns - 1000, 1),
            (int(Kind.PLAN), 8, began_ns, began_ns, 1),
            (99, 7, now_ns, now_ns, 0),  # of a later version
        ]
        return Records(
            0,
            "scheduler-0",
            "scheduler",
            slices,
            [StepNote(7, StepKind.DECODE, 2, 2, [rid])],
        )

    client = mesh.client()
    client.request("GET", "/ui/api/timeline?last=5")
    order = mesh.tokenizer.expect(GetRecords)
    now_ns = order.since_ns + 4_000_000_000
    told = msgspec.structs.replace(records(now_ns), op_id=order.op_id)
    mesh.tokenizer.send(told)
    found = json.loads(client.getresponse().read())
    assert found["tracks"] == [{"process": "scheduler-0", "service": "scheduler", "name": "plan"}]
    (piece,) = found["slices"]
    assert (piece["kind"], piece["step"], piece["dur_us"]) == ("plan", 7, 2.0)
    assert piece["start_us"] == pytest.approx(4e6 - 3)
    assert found["steps"][0]["requests"] == [rid.hex()[:12]]


def test_a_request_that_failed_is_traced_by_all_whatever_the_ratio(tmp_path: Path) -> None:
    unsampled = TelemetryConfig(sample_ratio=0.0)
    config = msgspec.structs.replace(make_config(tmp_path), telemetry=unsampled)
    mesh = Mesh(config, [FakeTokenizer(config)])
    try:
        mesh.tokenizer.linked()
        for code in (None, ErrorCode.INVALID, ErrorCode.INTERNAL):
            client = mesh.post()
            submit = mesh.tokenizer.expect(Submit)
            assert submit.traceparent.endswith("-00")
            if code is None:
                mesh.tokenizer.finish(submit, 0, b"data: 1\n\n")
            else:
                mesh.tokenizer.fail(submit, code)
            client.getresponse().read()
            if code is ErrorCode.INTERNAL:
                assert mesh.tokenizer.expect(KeepTrace) == KeepTrace(submit.traceparent[3:35])
        kept = submit.traceparent[3:35]
    finally:
        mesh.stop()
    (path,) = (tmp_path / "traces").glob("gateway-0*.jsonl")
    spans = [json.loads(line) for line in path.read_text().splitlines()]
    assert {span["trace_id"] for span in spans} == {kept}
    assert {"request", "read body", "hop", "write end"} <= {span["name"] for span in spans}
    (root,) = [span for span in spans if span["name"] == "request"]
    assert root["error"] == "HTTP 500"


# ---------------------------------------------------------------- the map, pure


def link(
    name: str, peer: str, *, ready: bool = True, sent: int = 0, life: bytes = b""
) -> LinkStats:
    return LinkStats(
        name,
        name.split("-")[0],
        peer,
        peer.split("-")[0],
        ready,
        1,
        sent,
        received=2 * sent,
        incarnation=life,
    )


def states(
    mesh_map: MeshMap, told: list[LinkStats], *, with_tokenizer: bool = True
) -> dict[str, str]:
    own = [link("gateway-0", "tokenizer-0")] if with_tokenizer else []
    peers = [Peer("tokenizer", "tokenizer-0", "k", b"")] if with_tokenizer else []
    if peers:
        peers[0].stats = ServiceStats(True, 0, links=told)
    links = mesh_map.links(peers, own)
    return {str(row["name"]): str(row["state"]) for row in mesh_map.processes(links, peers, 0)}


@pytest.fixture
def small_map() -> MeshMap:
    config = Config(
        scheduler=SchedulerConfig(count=2),
        executor=ExecutorConfig(ranks=1),
        kvstore=KvstoreConfig(count=1),
    )
    return MeshMap(config, "gateway-0")


def test_a_process_is_down_when_nobody_is_linked_to_it(small_map: MeshMap) -> None:
    told = [
        link("tokenizer-0", "scheduler-0"),
        link("tokenizer-0", "scheduler-1", ready=False),
        link("tokenizer-0", "gateway-1"),
        link("scheduler-0", "executor-0-0"),
        link("scheduler-0", "operator-0"),
    ]
    assert states(small_map, told) == {
        "gateway-0": "up",
        "tokenizer-0": "up",
        "scheduler-0": "up",
        "scheduler-1": "starting",
        "executor-0-0": "up",
        "executor-1-0": "down",
        "kvstore-0": "down",
        "gateway-1": "up",
    }


def test_behind_a_lost_tokenizer_nothing_is_known(small_map: MeshMap) -> None:
    found = states(small_map, [], with_tokenizer=False)
    assert found["tokenizer-0"] == "down"
    assert found["scheduler-0"] == found["executor-0-0"] == found["kvstore-0"] == "unknown"
    assert states(small_map, [link("tokenizer-0", "scheduler-0")])["executor-1-0"] == "unknown"


def look(small_map: MeshMap, now_s: float, *lives: bytes, ready: bool = True) -> str:
    """The state of an executor of which links with these incarnations tell."""
    told = [link("scheduler-0", "executor-0-0", life=life, ready=ready) for life in lives]
    own = [link("gateway-0", "tokenizer-0"), link("tokenizer-0", "scheduler-0")]
    peers = [Peer("tokenizer", "tokenizer-0", "k", b"")]
    small_map.watch([*own, *told], peers, now_s, now_s * 1e3)
    rows = small_map.processes([*own, *told], peers, 0)
    return next(str(row["state"]) for row in rows if row["name"] == "executor-0-0")


def test_a_restart_that_nobody_saw_down_is_shown_for_some_seconds(small_map: MeshMap) -> None:
    assert look(small_map, 100.0, b"first") == "up"
    assert look(small_map, 100.1, b"second") == "restarted"
    assert look(small_map, 100.1 + RESTARTED_S - 0.1, b"second") == "restarted"
    assert look(small_map, 100.1 + RESTARTED_S, b"second") == "up"
    assert small_map.restarts["executor-0-0"] == 1
    news = [(n.at_ms, n.was, n.state) for n in small_map.news if n.process == "executor-0-0"]
    assert news == [(100_100.0, "up", "restarted"), (106_100.0, "restarted", "up")]


def test_who_tells_of_the_life_before_a_restart_makes_no_second_one(small_map: MeshMap) -> None:
    look(small_map, 100.0, b"first", b"first")
    look(small_map, 101.0, b"first", b"second")
    look(small_map, 102.0, b"second", b"first")
    look(small_map, 103.0, b"second", b"second")
    assert small_map.restarts["executor-0-0"] == 1


def test_transfers_of_an_executor_are_no_other_life(small_map: MeshMap) -> None:
    told = [
        link("scheduler-0", "executor-0-0", life=b"a"),
        link("kvstore-0", "executor-0-0", life=b"b"),
    ]
    small_map.watch(told, [], 100.0, 0.0)
    small_map.watch(told[::-1], [], 101.0, 0.0)
    assert small_map.restarts["executor-0-0"] == 0


def test_a_death_that_lasts_is_news_and_so_is_the_return(small_map: MeshMap) -> None:
    look(small_map, 100.0, b"first")
    assert look(small_map, 101.0) == "down"
    assert look(small_map, 103.0, b"second", ready=False) == "restarted"
    assert look(small_map, 110.0, b"second", ready=False) == "starting"
    assert look(small_map, 111.0, b"second") == "up"
    states = [n.state for n in small_map.news if n.process == "executor-0-0"]
    assert states == ["down", "restarted", "starting", "up"]


def test_a_link_shows_what_went_over_it_a_second(small_map: MeshMap) -> None:
    small_map.tick([link("a", "b", sent=10)], 100.0)
    small_map.tick([link("a", "b", sent=10)], 101.0)
    small_map.tick([link("a", "b", sent=50)], 102.0)
    (row,) = small_map.rows([link("a", "b", sent=50)])
    assert (row["sent_per_s"], row["received_per_s"]) == (20.0, 40.0)
    small_map.tick([link("a", "b", sent=50)], 110.0)
    assert small_map.rows([link("a", "b", sent=50)])[0]["sent_per_s"] == 0.0
    small_map.tick([link("a", "b", sent=3)], 111.0)  # dialled again
    assert small_map.rows([link("a", "b", sent=3)])[0]["sent_per_s"] == 0.0


# ---------------------------------------------------------------- figures, pure


def test_shares_of_the_peaks_are_those_of_the_last_seconds() -> None:
    figures = Figures(Metrics())

    def tick(at_s: float, *devices: DeviceWork) -> dict[str, object]:
        figures.tick([ReplicaStats("s", True, devices=list(devices))], at_s)
        return figures.points[-1]

    second = 1_000_000_000
    assert tick(100.0)["mfu"] is None
    tick(101.0, DeviceWork(0, 9, second, 9e9, 9e9, 1e10, 1e10))
    for at_s in range(102, 112):  # what was before is out of sight
        tick(float(at_s), DeviceWork(0, 9, second, 9e9, 9e9, 1e10, 1e10))
    assert figures.points[-1]["mfu"] is None, "no step in these seconds"
    now = DeviceWork(0, 12, 3 * second, 9e9 + 5e9, 9e9 + 1e9, 1e10, 1e10)
    point = tick(112.0, now, DeviceWork(1, 3, second, 1e9, 0, 1e10, 0))
    assert point["mfu"] == pytest.approx((5e9 + 1e9) / (3 * 1e10))
    assert point["bandwidth_share"] == pytest.approx(1e9 / (2 * 1e10))
    by_rank = [(row["rank"], row["mfu"], row["bandwidth_share"]) for row in figures.devices()]
    assert by_rank == [(0, 0.25, 0.05), (1, 0.1, None)]
    again = DeviceWork(0, 1, second, 2e9, 0, 1e10, 1e10)
    tick(113.0, again)
    assert figures.devices()[0]["mfu"] == pytest.approx(0.2), "restarted: it counts anew"


def test_figures_are_those_of_the_last_seconds() -> None:
    metrics = Metrics()
    figures = Figures(metrics)
    replica = ReplicaStats("s", True, running=2, waiting=1, output_tokens=1000)
    figures.tick([replica], 100.0)
    assert figures.points[-1]["ttft_ms"] is None
    metrics.first["chat"].observe(0.03)
    metrics.between["chat"].observe(0.02, count=100)
    metrics.requests["chat", 200] += 4
    figures.tick([msgspec.structs.replace(replica, output_tokens=1200)], 102.0)
    point = figures.points[-1]
    assert (point["requests_per_s"], point["output_tokens_per_s"]) == (2.0, 100.0)
    assert (point["running"], point["waiting"]) == (2, 1)
    assert point["ttft_ms"] == {"p50": 30.0, "p90": 38.0, "p99": 39.8}
    for second in range(20):
        figures.tick([replica], 103.0 + second)
    assert figures.points[-1]["itl_ms"] is None, "too long ago"
    assert figures.points[-1]["output_tokens_per_s"] == 0, "a restarted replica counts anew"


def test_a_quantile_lies_within_its_bin() -> None:
    assert quantile([0, 10, 0], 5, (1.0, 2.0)) == pytest.approx(1.5)
    assert quantile([4, 0, 0], 4, (1.0, 2.0)) == pytest.approx(1.0)
    assert quantile([0, 0, 3], 1, (1.0, 2.0)) == 2.0
