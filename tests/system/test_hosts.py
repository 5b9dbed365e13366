"""A mesh over three hosts, encrypted: strangers stay outside, a cut cable loses no token."""

import json
import shutil
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import zmq
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.client import Client
from deepmesh.gateway_address import gateway_problem
from deepmesh.key_folder import make_keys
from deepmesh.run_dir import tail
from tests.e2e.steady_load import SteadyLoad, reference
from tests.system.conftest import TIMES
from tests.system.hosts import Host, Network, left
from tests.system.test_containers import KNOCK

pytestmark = [pytest.mark.system, pytest.mark.timeout(420)]

ROOT = Path(__file__).resolve().parents[2]
START_S, CUT_S = 180.0, 4.0
# What a peer without keys says first (ZMTP 3.0, mechanism NULL). Reads [[host, port]]. A real one
# may hang up before all of it has arrived, and the listener only knows that somebody was there.
PLAIN = """
import json, socket, sys
for host, port in json.load(sys.stdin):
    with socket.create_connection((host, port), 10) as peer:
        peer.sendall(bytes([255, 0, 0, 0, 0, 0, 0, 0, 1, 127, 3, 0]) + b"NULL".ljust(52, b"\\0"))
        while peer.recv(4096):
            pass
"""
PLACES = {  # what runs where: the edge, the first groups, the last group and the kvstore
    0: [("tokenizer", 0), ("router", 0), ("gateway", 0)],
    1: [("scheduler", 0), ("executor", 0), ("scheduler", 1), ("executor", 1)],
    2: [("kvstore", 0), ("scheduler", 2), ("executor", 2)],
}
MESH = """
[mesh]
name = "hosts"
run_dir = "{run_dir}"
model = "{root}/models/tiny"
[links]
keys = "keys"
bind = "0.0.0.0"
heartbeat_s = 0.3
timeout_s = 2.0
[gateway]
host = "0.0.0.0"
port = 8000
[tokenizer]
address = "tcp://edge.mesh:7000"
[router]
count = 1
address = "tcp://edge.mesh:7100"
[scheduler]
count = 3
address = "tcp://group-{{index}}.mesh:720{{index}}"
roles = ["prefill", "decode", "decode"]
store_load_s = 10.0
[executor]
handover_address = "tcp://group-{{index}}.mesh:750{{index}}"
[kvstore]
count = 1
address = "tcp://store.mesh:7300"
memory_bytes = 33554432
"""
NAMES = {"edge.mesh": 0, "group-0.mesh": 1, "group-1.mesh": 1, "group-2.mesh": 2, "store.mesh": 2}
LONG = "Tell me about the river and the old house on the hill. " * 40


class Mesh:
    """All processes of PLACES."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.url = f"http://{network.outside}:8000"

    def host_of(self, name: str) -> Host:
        """Where a process runs."""
        return next(host for host in self.network.hosts if name in host.processes)

    def log(self, name: str) -> str:
        """All that a process has said."""
        return self.host_of(name).log(name).read_text()

    def total(self, metric: str, **labels: str) -> float:
        """Sum of a metric over what has these labels."""
        families = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=10).text)
        samples = [sample for family in families for sample in family.samples]
        return sum(
            s.value for s in samples if s.name == metric and labels.items() <= s.labels.items()
        )

    def wait(self, problem: Callable[[], object], what: str, timeout_s: float) -> float:
        """Until nothing is wrong any more; how long that took, s."""
        began_s, pause = time.monotonic(), threading.Event()
        while found := problem():
            assert time.monotonic() - began_s < timeout_s, f"{what}: {found}"
            pause.wait(0.05)
        return time.monotonic() - began_s

    def wait_whole(self, timeout_s: float) -> float:
        """Until all three groups can be used from the edge."""
        return self.wait(self._missing, "groups that are not there", timeout_s)

    def _missing(self) -> str:
        if problem := gateway_problem(self.url):
            return problem
        up = self.total("deepmesh_replica_ready")
        return "" if up == 3 else f"{up:g} of 3 replicas"


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("hosts")
    make_keys(folder / "keys")
    with Network(folder, len(PLACES), NAMES) as network:
        for number, host in enumerate(network.hosts):
            text = MESH.format(run_dir=host.folder / "run", root=ROOT)
            (host.folder / "mesh.toml").write_text(text)
            for service in {service for service, _ in PLACES[number]}:  # its own keys, no others
                shutil.copytree(folder / "keys" / service, host.folder / "keys" / service)
            for service, index in PLACES[number]:
                host.serve(service, index)
        mesh = Mesh(network)
        try:
            took = mesh.wait_whole(START_S)
            pytestconfig.stash[TIMES]["mesh over three hosts"] = f"up after {took:.1f} s"
            yield mesh
        except BaseException as error:
            for host in network.hosts:
                for name in host.processes:
                    error.add_note(f"{name}:\n  " + "\n  ".join(tail(host.log(name), 8)))
            raise
    assert left() == []


@pytest.fixture(scope="module")
def answers(mesh: Mesh) -> list[str]:
    """What comes while all is well."""
    return reference(mesh.url)


def ask(url: str, text: str, salt: str) -> str:
    """The answer to one question; requests of two salts share no cache."""
    fields: dict[str, object] = {
        "model": "tiny",
        "seed": 3,
        "temperature": 1.0,
        "max_tokens": 40,
        "ignore_eos": True,
        "cache_salt": salt,
        "thinking": {"type": "disabled"},
    }
    with Client(url, timeout_s=60) as client:
        events = client.stream_chat([{"role": "user", "content": text}], fields)
        return "".join(event.text for event in events if event.kind == "text")


def test_hosts_share_nothing_but_the_network(mesh: Mesh) -> None:
    edge, groups, store = mesh.network.hosts
    script = "import os; print(sorted(os.listdir('/dev/shm')))"
    assert edge.python(script) == "[]\n"
    assert "deepmesh-hosts" in store.python(script)
    assert store.python(script) != groups.python(script)
    found = groups.python("import socket; print(socket.gethostbyname('store.mesh'))")
    assert found.strip() == store.address


def test_a_prompt_computed_on_one_host_is_answered_on_another(mesh: Mesh) -> None:
    handed = ask(mesh.url, LONG, "one")
    again = ask(mesh.url, LONG, "two")
    assert handed == again
    mesh.wait(lambda: mesh.total("deepmesh_handovers_loaded_total") < 2, "hand-overs", 60.0)
    assert mesh.total("deepmesh_handover_bytes_total") > 1e5
    assert mesh.total("deepmesh_handovers_failed_total") == 0


def test_an_unlisted_key_and_a_plain_peer_are_refused_and_the_log_says_so(mesh: Mesh) -> None:
    """By one who stands in the network and knows all public keys."""
    edge, groups, store = mesh.network.hosts
    file = tomllib.loads((edge.folder / "keys" / "tokenizer" / "keys.toml").read_text())
    public = {name: keys[0] for name, keys in file["public"].items()}
    listed = (public["tokenizer"], file["secret"])
    stranger = tuple(key.decode() for key in zmq.curve_keypair())
    scheduler, kvstore = "tcp://group-1.mesh:7201", "tcp://store.mesh:7300"
    knocks = [
        (scheduler, public["scheduler"], *listed),
        (scheduler, public["scheduler"], *stranger),
        (kvstore, public["kvstore"], *stranger),
        (scheduler, "", "", ""),
    ]
    given = json.dumps(knocks).replace("group-1.mesh", groups.address)
    events = edge.python(KNOCK, given.replace("store.mesh", store.address)).split()
    assert events[:3] == ["HANDSHAKE_SUCCEEDED", "HANDSHAKE_FAILED_AUTH", "HANDSHAKE_FAILED_AUTH"]
    assert set(events[3:]) <= {"HANDSHAKE_FAILED_PROTOCOL", "HANDSHAKE_FAILED_NO_DETAIL"}
    edge.python(PLAIN, json.dumps([(groups.address, 7201), (store.address, 7300)]))
    for name in ("scheduler-1", "kvstore-0"):
        host = mesh.host_of(name)
        assert host in (groups, store)
        unlisted = f"refused a link from {edge.address}: its key is not on the allow-list"
        mesh.wait(lambda n=name, words=unlisted: words not in mesh.log(n), unlisted, 60.0)
        plain = "or does not encrypt"
        mesh.wait(lambda n=name, words=plain: words not in mesh.log(n), plain, 60.0)


@pytest.mark.parametrize("number", [2, 1])
def test_a_cut_cable_loses_no_token_and_the_host_is_used_again(
    mesh: Mesh, answers: list[str], pytestconfig: pytest.Config, number: int
) -> None:
    with SteadyLoad(mesh.url, answers, streams=4) as load:
        load.wait_whole(4)
        mesh.network.set_link(number, "down")
        try:
            mesh.wait(lambda: not mesh._missing(), "the edge notices", 60.0)
            load.wait_whole(4)  # by the groups that are left
            threading.Event().wait(CUT_S)
        finally:
            mesh.network.set_link(number, "up")
        took = mesh.wait_whole(90.0)
        load.wait_whole(4)
    load.check(least=12)
    assert load.counts["retried"] == 0  # no client has to know
    gap = f"longest gap of a stream {load.longest_gap_s:.1f} s"
    pytestconfig.stash[TIMES][f"host {number} cut off"] = f"back after {took:.1f} s, {gap}"


def test_answers_are_the_same_without_the_host_that_computed_prompts(mesh: Mesh) -> None:
    handed = ask(mesh.url, LONG, "three")
    host = mesh.host_of("scheduler-0")
    host.processes["scheduler-0"].terminate()
    host.processes["scheduler-0"].wait(30)
    assert ask(mesh.url, LONG, "four") == handed
