"""Names of hosts: looked up beside the loop, followed when they lead elsewhere."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

import pytest

from deepmesh.wire.names import ASK_S, Lookup, resolve


class Resolver:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.answers: queue.SimpleQueue[list[str] | OSError] = queue.SimpleQueue()
        self.asked = threading.Semaphore(0)

    def __call__(self, host: str) -> list[str]:
        self.asked.release()
        answer = self.answers.get(timeout=20)
        if isinstance(answer, OSError):
            raise answer
        return answer


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline


def test_only_names_of_other_hosts_are_looked_up() -> None:
    for address in (
        "ipc:///run/x.sock",
        "tcp://127.0.0.1:7000",
        "tcp://localhost:7000",
        "tcp://10.0.0.1:7000",
        "tcp://[::1]:7000",
    ):
        assert Lookup.of(address) is None
    assert Lookup.of("tcp://scheduler-0:7000") is not None


def test_asking_never_waits_and_the_answer_comes_later() -> None:
    resolver = Resolver()
    lookup = Lookup("tcp://there:7000", resolver)
    lookup.ask()
    assert resolver.asked.acquire(timeout=60)
    assert lookup.numeric("") == ""
    resolver.answers.put(["10.0.0.7", "10.0.0.8"])
    wait_for(lambda: lookup.numeric("") == "tcp://10.0.0.7:7000")
    assert lookup.numeric("tcp://10.0.0.8:7000") == "tcp://10.0.0.8:7000"  # still one of them
    assert lookup.numeric("tcp://10.0.0.9:7000") == "tcp://10.0.0.7:7000"


def test_a_question_that_hangs_holds_up_no_other() -> None:
    resolver = Resolver()
    lookup = Lookup("tcp://there:7000", resolver)
    lookup.ask()
    lookup.ask()  # too soon
    lookup._next_ask -= ASK_S
    lookup.ask()
    assert resolver.asked.acquire(timeout=60)
    assert resolver.asked.acquire(timeout=60)
    assert not resolver.asked.acquire(blocking=False)
    resolver.answers.put(["10.0.0.7"])  # of either; the other still hangs
    wait_for(lambda: lookup.numeric("") == "tcp://10.0.0.7:7000")
    resolver.answers.put(["10.0.0.7"])


def test_a_name_that_is_gone_keeps_its_last_address_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolver = Resolver()
    lookup = Lookup("tcp://there:7000", resolver)
    with caplog.at_level(logging.WARNING):
        for answer in (["10.0.0.7"], OSError(-2, "unknown"), OSError(-2, "unknown")):
            resolver.answers.put(answer)
            lookup._next_ask = 0.0
            before = threading.active_count()
            lookup.ask()
            assert resolver.asked.acquire(timeout=60)
            wait_for(lambda before=before: threading.active_count() <= before)
    assert lookup.numeric("") == "tcp://10.0.0.7:7000"
    assert [record.getMessage() for record in caplog.records] == ["there: unknown"]


def test_the_real_resolver_knows_this_machine() -> None:
    assert resolve("localhost") == ["127.0.0.1"]
    with pytest.raises(socket.gaierror):
        resolve("no-such-host.invalid")
