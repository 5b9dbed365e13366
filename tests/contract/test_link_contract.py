"""How links begin, stay and end, of any service that others dial."""

import os
import time

import pytest

from tests.contract.raw import Dealer, Wire, make, make_whole, packed
from tests.contract.targets import Target

Listener = tuple[str, Target]


def hello(**fields: object) -> list[object]:
    given: dict[str, object] = {
        "service": "tester",
        "name": "tester-0",
        "incarnation": os.urandom(8),
    }
    return make_whole("Hello", **given | fields)


def alive(wire: Wire, link: Dealer) -> bool:
    """Whether a new heartbeat comes, and nothing is refused."""
    known = len(link.beats)
    wire.until(lambda: len(link.beats) > known + 1 or link.has("Refused"), "heartbeats")
    return not link.has("Refused")


def test_hello_is_answered_by_welcome_and_heartbeats(wire: Wire, listener: Listener) -> None:
    service, target = listener
    link = Dealer(wire, target.address)
    link.send(hello())
    welcome = link.expect("Welcome")
    assert welcome.service == service
    assert welcome.name
    assert len(welcome.incarnation) == 8
    assert welcome.protocol[0] == 1
    link.is_up = True
    assert alive(wire, link)
    assert abs(link.beats[-1].now_ns - time.time_ns()) < 60e9


@pytest.mark.parametrize("where", ["header", "Hello"])
def test_another_major_version_is_refused_by_name(
    wire: Wire, listener: Listener, where: str
) -> None:
    link = Dealer(wire, listener[1].address)
    if where == "header":
        frames = [packed([2, 0, 0]), packed(hello(protocol=[2, 0]))]
        link.socket.send_multipart(frames)
    else:
        link.send(hello(protocol=[2, 0]))
    refused = link.expect("Refused")
    assert "2" in refused.reason
    assert "1" in refused.reason
    assert not link.has("Welcome")


def test_another_minor_version_and_unknown_fields_are_served(
    wire: Wire, listener: Listener
) -> None:
    """One minor version apart: one service after the other is upgraded."""
    link = Dealer(wire, listener[1].address)
    link.send([*hello(protocol=[1, 1]), "a field of tomorrow", {"more": 1}])
    link.expect("Welcome")
    link.is_up = True
    link.send([*make_whole("Heartbeat", now_ns=1), "a field of tomorrow"])
    assert alive(wire, link)


def test_what_is_more_than_a_minor_version_apart_is_refused_by_name(
    wire: Wire, listener: Listener
) -> None:
    link = Dealer(wire, listener[1].address)
    link.send(hello(protocol=[1, 9]))
    refused = link.expect("Refused")
    assert "1.9" in refused.reason
    assert "1.0" in refused.reason
    assert not link.has("Welcome")


def test_data_before_hello_is_refused(wire: Wire, listener: Listener) -> None:
    link = Dealer(wire, listener[1].address)
    link.send(make("Abort", rid=b"r" * 16))
    link.expect("Refused")
    assert not link.has("Welcome")


def test_garbage_is_dropped_and_the_link_stays(wire: Wire, listener: Listener) -> None:
    link = wire.dial(listener[1].address, "tester", "tester-1")
    for junk in (["Nonsense", 1], ["Abort", 5], ["Generate"], {"a": 1}, 7, [], [None], "text"):
        link.send(junk)  # type: ignore[arg-type]
    link.socket.send_multipart([packed([1, link.seq_out, 0]), b"\xc1\xff\x00"])
    link.seq_out += 1
    link.socket.send(b"one frame")
    link.socket.send_multipart([b"\xc1", b"\xc1"])
    link.socket.send_multipart([packed(["x", None]), packed(["Heartbeat"])])
    assert alive(wire, link)


def test_repeated_numbers_are_dropped(wire: Wire, listener: Listener) -> None:
    link = wire.dial(listener[1].address, "tester", "tester-2")
    link.send(make("Heartbeat"))
    link.send(make("Heartbeat"), seq=0)
    link.send(make("Heartbeat"), seq=1)
    assert alive(wire, link)


def test_a_gap_ends_the_link(wire: Wire, listener: Listener) -> None:
    link = wire.dial(listener[1].address, "tester", "tester-3")
    link.send(make("Heartbeat"), seq=link.seq_out + 1)
    wire.pump(0.2)
    link.send(make("Heartbeat"), seq=link.seq_out + 2)
    link.expect("Refused")


def test_a_new_link_of_a_name_replaces_the_old_one(wire: Wire, listener: Listener) -> None:
    old = wire.dial(listener[1].address, "tester", "tester-4")
    new = wire.dial(listener[1].address, "tester", "tester-4")
    assert alive(wire, new)
    old.expect("Refused")  # its next heartbeat comes from a stranger
