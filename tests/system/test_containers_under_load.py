"""The mesh of compose/compose.yaml while 32 streams are open: kills, cuts, pauses, more tokenizers,
another version. No stream is lost, and all get the tokens that they get in peace.
"""

import http.client
import json
import time
from collections.abc import Iterator

import pytest

from tests.system.conftest import KEY, NEXT_WIRE
from tests.system.containers import EXECUTORS, SERVICES, ComposeMesh
from tests.system.engine import NEXT_TAG
from tests.system.streams import NUM_STREAMS, Load, answers

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

BACK_S = 180.0
UP = ("up", "restarted")


@pytest.fixture(scope="module")
def load(mesh: ComposeMesh) -> Iterator[Load]:
    """32 streams that go on through all the tests that ask for it."""
    with Load(mesh.url, KEY, answers(mesh.url, KEY)) as load:
        load.finish_round()
        yield load
    assert load.wrong == []


def processes(mesh: ComposeMesh) -> dict[str, str]:
    """State of each process, as the gateway's page shows it."""
    client = http.client.HTTPConnection(mesh.url.removeprefix("http://"), timeout=30)
    client.request("GET", "/ui/api/feed", headers={"Authorization": f"Bearer {KEY}"})
    response = client.getresponse()
    assert response.readline() == b"event: state\n"
    state = json.loads(response.readline().removeprefix(b"data: "))
    client.close()
    return {each["name"]: each["state"] for each in state["processes"]}


def test_the_kvstore_shares_what_it_has_in_redis(mesh: ComposeMesh, load: Load) -> None:
    load.finish_round()
    assert int(mesh.shell("redis", "redis-cli dbsize")) > 0


def test_the_operator_holds_the_mesh_and_lets_it_go_on(mesh: ComposeMesh, load: Load) -> None:
    assert mesh.order("pause").split() == ["scheduler-0:", "paused", "scheduler-1:", "paused"]
    assert mesh.order("resume").split() == ["scheduler-0:", "resumed", "scheduler-1:", "resumed"]
    load.finish_round()


def test_tokenizers_are_scaled_to_three(mesh: ComposeMesh, load: Load) -> None:
    began = mesh.scale("tokenizer", 3)
    mesh.wait_healthy(["tokenizer-3"], since=began, timeout_s=BACK_S)
    load.finish_round()
    tokenizers = {n: s for n, s in processes(mesh).items() if n.startswith("tokenizer")}
    assert tokenizers == dict.fromkeys(("tokenizer-1", "tokenizer-2", "tokenizer-3"), "up")


@pytest.mark.parametrize("service", [*SERVICES, "redis"])
def test_a_killed_container_loses_no_stream_and_comes_back(
    mesh: ComposeMesh, load: Load, times: dict[str, str], service: str
) -> None:
    # A gateway holds its clients' connections: with it they go, and the clients ask again.
    load.may_break, before = service == "gateway-0", load.asked_again
    killed = mesh.kill(service)
    took = mesh.wait_healthy([service], since=killed, timeout_s=BACK_S)[service]
    assert load.finish_round() == NUM_STREAMS
    load.may_break = False
    assert mesh.inspect(service)["RestartCount"] == 1
    again = load.asked_again - before
    assert (again > 0) is (service == "gateway-0")
    times[f"{service} killed"] = f"healthy after {took:.1f} s" + (f", {again} again" * bool(again))


@pytest.mark.parametrize("service", ["tokenizer-2", "scheduler-1"])
def test_a_cut_network_loses_no_stream(mesh: ComposeMesh, load: Load, service: str) -> None:
    mesh.cut(service)
    wait_missed(mesh, service)
    mesh.join(service)
    assert load.finish_round() == NUM_STREAMS
    wait_all_up(mesh)


@pytest.mark.parametrize("service", ["executor-1-0", "router-0"])
def test_a_paused_container_loses_no_stream(mesh: ComposeMesh, load: Load, service: str) -> None:
    mesh.pause(service)
    wait_missed(mesh, service)
    mesh.go_on(service)
    assert load.finish_round() == NUM_STREAMS
    wait_all_up(mesh)


def wait_missed(mesh: ComposeMesh, service: str) -> None:
    """Until the gateway hears that its neighbours have given it up: links.timeout_s, and a bit."""
    give_up = time.monotonic() + BACK_S
    while processes(mesh).get(service) in UP:
        assert time.monotonic() < give_up, "nobody misses it"


def wait_all_up(mesh: ComposeMesh) -> None:
    """Until the gateway hears of every process that it can work."""
    give_up = time.monotonic() + BACK_S
    while not_up := {n: s for n, s in processes(mesh).items() if s not in UP}:
        assert time.monotonic() < give_up, not_up


@pytest.mark.parametrize(
    "service",
    [
        *("kvstore-0", *EXECUTORS, "scheduler-0", "scheduler-1", "router-0", "tokenizer"),
        "gateway-0",
    ],
)
def test_a_service_is_rolled_to_the_next_version(
    mesh: ComposeMesh, load: Load, times: dict[str, str], service: str
) -> None:
    load.may_break = service == "gateway-0"
    began = mesh.roll(service, NEXT_TAG)
    containers = mesh.numbers(service) if service == "tokenizer" else [service]
    took = mesh.wait_healthy(containers, since=began, timeout_s=BACK_S)
    assert load.finish_round() == NUM_STREAMS
    load.may_break = False
    for container in containers:
        labels = mesh.inspect(container)["Config"]["Labels"]  # type: ignore[index]
        assert labels["deepmesh.wire"] == NEXT_WIRE
    times[f"{service} rolled"] = f"healthy after {max(took.values()):.1f} s"


def test_the_mesh_of_the_next_version_is_whole(mesh: ComposeMesh, load: Load) -> None:
    wait_all_up(mesh)
    assert load.finish_round() == NUM_STREAMS
