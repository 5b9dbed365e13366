"""Tokenizers that are found by name: gateways link to all of them, each knows its own number."""

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deepmesh.addresses import NoIndex, own_index
from deepmesh.config import Config, TokenizerConfig
from deepmesh.health import problem_of, ready_path
from deepmesh.wire.names import Lookup
from services.gateway.discovery import Discovery
from services.gateway.tokenizers import Tokenizers


@dataclass
class FakeLookup:
    """A name server whose answers the test writes."""

    found: list[str] = field(default_factory=list)

    def ask(self) -> None:
        """The answer is there already."""

    def all(self) -> list[str]:
        return list(self.found)


@dataclass(eq=False)
class FakeDialer:
    address: str
    peer: object | None = None


@dataclass
class FakeInbox:
    read: list[FakeDialer] = field(default_factory=list)

    def add(self, dialer: FakeDialer) -> None:
        self.read.append(dialer)

    def remove(self, dialer: FakeDialer) -> None:
        self.read.remove(dialer)


def make() -> tuple[FakeLookup, FakeInbox, Tokenizers, Discovery]:
    lookup, inbox, tokenizers = FakeLookup(), FakeInbox(), Tokenizers([])
    found = Discovery(lookup, FakeDialer, tokenizers=tokenizers, inbox=inbox)  # type: ignore[arg-type]  # fakes
    return lookup, inbox, tokenizers, found


def test_each_address_behind_the_name_gets_one_link() -> None:
    lookup, inbox, tokenizers, discovery = make()
    discovery.look()
    assert tokenizers.num_links == 0
    lookup.found = ["tcp://10.0.0.2:7000", "tcp://10.0.0.3:7000"]
    discovery.look()
    discovery.look()
    assert [dialer.address for dialer in inbox.read] == lookup.found
    lookup.found = ["tcp://10.0.0.3:7000", "tcp://10.0.0.4:7000"]
    discovery.look()
    assert [dialer.address for dialer in inbox.read] == lookup.found
    assert tokenizers.num_links == 2


def test_a_tokenizer_that_left_the_name_keeps_its_link_until_that_is_down() -> None:
    lookup, inbox, tokenizers, discovery = make()
    lookup.found = ["tcp://10.0.0.2:7000"]
    discovery.look()
    (dialer,) = inbox.read
    dialer.peer, lookup.found = object(), ["tcp://10.0.0.9:7000"]
    discovery.look()
    assert dialer in inbox.read
    dialer.peer = None
    discovery.look()
    assert dialer not in inbox.read
    assert tokenizers.num_links == 1


def test_a_lookup_knows_all_addresses_of_a_name() -> None:
    import threading

    asked = threading.Event()

    def resolve(host: str) -> list[str]:
        asked.set()
        return ["10.0.0.2", "10.0.0.3"]

    lookup = Lookup("tcp://tokenizer:7000", resolve)
    assert lookup.all() == []
    lookup.ask()
    assert asked.wait(10)
    for thread in threading.enumerate():
        if thread.name == "look up tokenizer":
            thread.join(10)
    assert lookup.all() == ["tcp://10.0.0.2:7000", "tcp://10.0.0.3:7000"]


@pytest.mark.parametrize(
    ("address", "is_found"),
    [
        ("", False),
        ("tcp://tokenizer:7000", True),
        ("tcp://tokenizer-{index}:7000", False),
        ("tcp://10.0.0.2:7000", False),
        ("tcp://localhost:7000", False),
        ("ipc:///run/tokenizer.sock", False),
    ],
)
def test_a_name_without_a_number_is_one_to_look_behind(address: str, is_found: bool) -> None:
    assert Config(tokenizer=TokenizerConfig(address=address)).finds_tokenizers is is_found


def test_a_process_knows_its_number_by_the_name_that_leads_to_its_host() -> None:
    hosts = {"mesh-tokenizer-1": ["192.0.2.1"], "mesh-tokenizer-3": ["192.0.2.3", "127.0.0.1"]}
    assert own_index("mesh-tokenizer-{index}", 0, lambda host: hosts.get(host, [])) == 3
    assert own_index("12") == 12


def test_who_cannot_know_its_number_says_so() -> None:
    with pytest.raises(NoIndex, match="no name like mesh-"):
        own_index("mesh-{index}", 0, lambda host: ["192.0.2.1"])
    with pytest.raises(NoIndex, match="neither a number nor"):
        own_index("three")


def test_the_health_of_a_process_whose_number_nobody_knows(tmp_path: Path) -> None:
    from deepmesh.config import MeshConfig

    config = Config(mesh=MeshConfig(run_dir=str(tmp_path)))
    assert "not ready" in problem_of("tokenizer", config)
    ready_path(tmp_path, "tokenizer-3").touch()
    assert problem_of("tokenizer", config) == ""
