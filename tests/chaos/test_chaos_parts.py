"""What the verdict of the chaos suite rests on: order, cutting, mistreating, the clock, judging."""

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from tests.chaos.answers import Answer
from tests.chaos.clock import WallClock
from tests.chaos.mischief import LATE_S, Direction, Mischief, Order
from tests.chaos.plan import KINDS, TARGETS, steps
from tests.chaos.zmtp import Splitter, Unit

ROOT = Path(__file__).resolve().parents[2]
GREETING = bytes(range(64))
HELLO = b"\x04\x05READY"  # a command
SMALL = b"\x01\x02ab\x00\x01c"  # two frames, one message
LARGE = b"\x02" + (300).to_bytes(8, "big") + bytes(300)


# ---------------------------------------------------------------- order of faults


def test_a_seed_gives_the_same_faults_again() -> None:
    first, again = (list(itertools.islice(steps(7), 100)) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(steps(8), 100))


def test_every_round_has_each_kind_once_and_each_target_as_often_as_the_others() -> None:
    rounds = 14
    found = list(itertools.islice(steps(3), rounds * len(KINDS)))
    for at in range(0, len(found), len(KINDS)):
        assert {step.kind for step in found[at : at + len(KINDS)]} == set(KINDS)
    for kind, targets in TARGETS.items():
        counts = Counter(step.target for step in found if step.kind == kind)
        assert set(counts) == set(targets)
        assert max(counts.values()) - min(counts.values()) <= 1


# ---------------------------------------------------------------- messages of a byte stream


@pytest.mark.parametrize("step", [1, 2, 7, 64, 10_000])
def test_a_stream_is_cut_into_its_messages_however_it_arrives(step: int) -> None:
    stream = GREETING + HELLO + SMALL + LARGE + SMALL
    splitter, found = Splitter(), list[Unit]()
    for at in range(0, len(stream), step):
        found += splitter.feed(stream[at : at + step])
    assert b"".join(unit.data for unit in found) == stream
    assert [unit.data for unit in found if unit.is_message] == [SMALL, LARGE, SMALL]


def messages(count: int) -> list[Unit]:
    return [Unit(b"\x00\x01%c" % n, is_message=True) for n in range(count)]


def sent(mischief: Mischief, units: list[Unit]) -> list[bytes]:
    way = Direction()
    out = (mischief.treat(unit, way, 0.0) for unit in units)
    joined = b"".join(sending.data for each in out for sending in each)
    return [joined[at : at + 3] for at in range(0, len(joined), 3)]


def test_orders_with_a_count_are_carried_out_so_often_and_then_no_more() -> None:
    units = messages(100)
    whole = [unit.data for unit in units]
    mischief = Mischief()
    mischief.order(Order("drop", count=3), 0.0)
    assert len(sent(mischief, units)) == 97
    mischief.order(Order("duplicate", count=5), 0.0)
    twice = sent(mischief, units)
    assert len(twice) == 105
    assert [next(group)[:3] for _, group in itertools.groupby(twice)] == whole
    mischief.order(Order("reorder", count=2), 0.0)
    other = sent(mischief, units)
    assert sorted(other) == whole
    assert sum(a > b for a, b in itertools.pairwise(other)) == 2
    assert sent(mischief, units) == whole


def test_the_handshake_and_commands_are_left_alone() -> None:
    mischief, way = Mischief(), Direction()
    mischief.order(Order("drop", count=10_000), 0.0)
    for _ in range(100):
        assert [s.data for s in mischief.treat(Unit(HELLO, is_message=False), way, 0.0)] == [HELLO]


def test_late_messages_keep_their_order() -> None:
    mischief, way = Mischief(), Direction()
    mischief.order(Order("delay", s=1.0, seed=5), 0.0)
    due = [
        now_s + mischief.treat(unit, way, now_s)[0].late_s
        for unit, now_s in zip(messages(200), (n / 100 for n in range(200)), strict=True)
    ]
    assert due == sorted(due)
    assert due[0] >= LATE_S[0]
    assert max(at - n / 100 for n, at in enumerate(due)) <= LATE_S[1]
    assert due[-1] == pytest.approx(1.99), "the order is over"


# ---------------------------------------------------------------- the proxy


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Path]:
    """Between front and back in a folder; orders at control."""
    argv = [sys.executable, "-m", "tests.chaos.proxy", f"{tmp_path}/control"]
    child = subprocess.Popen([*argv, f"{tmp_path}/front={tmp_path}/back"], cwd=ROOT)
    try:
        yield tmp_path
    finally:
        child.kill()
        child.wait()


def order(folder: Path, **fields: object) -> None:
    deadline_s = time.monotonic() + 20
    while not (folder / "control").exists():
        assert time.monotonic() < deadline_s
    with socket.socket(socket.AF_UNIX) as control:
        control.settimeout(10)
        control.connect(str(folder / "control"))
        control.sendall(json.dumps(fields).encode() + b"\n")
        assert control.makefile("rb").readline()


def test_the_proxy_forwards_holds_and_breaks_connections(proxy: Path) -> None:
    order(proxy, kind="ask")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.ROUTER) as back, context.socket(zmq.DEALER) as front:
        for one in (back, front):
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.RCVTIMEO, 10_000)
        front.setsockopt(zmq.IMMEDIATE, 1)
        gone = front.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        back.bind(f"ipc://{proxy}/back")
        front.connect(f"ipc://{proxy}/front")
        large = os.urandom(1 << 20)
        front.send_multipart([b"1", large])
        who, *frames = back.recv_multipart()
        assert frames == [b"1", large]

        began_s = time.monotonic()
        order(proxy, kind="hold", s=1.0)
        back.send_multipart([who, b"2"])
        assert front.recv() == b"2"
        assert time.monotonic() - began_s > 0.8
        assert not gone.poll(0)

        order(proxy, kind="break", s=0.2)
        assert gone.poll(10_000)
        front.disable_monitor()
        gone.close()


# ---------------------------------------------------------------- the clock

CLOCKS = """
import json, queue, sys, threading, time
began = time.monotonic()
threading.Event().wait(0.05)
try:
    queue.Queue().get(timeout=0.05)
except queue.Empty:
    pass
print(json.dumps([time.time(), time.time_ns() / 1e9, began, time.monotonic()]))
"""


@pytest.mark.parametrize("offset_s", [0.0, 86_400.0, -86_400.5])
def test_only_the_wall_clock_of_a_process_jumps(tmp_path: Path, offset_s: float) -> None:
    clock = WallClock(tmp_path)
    clock.jump(offset_s)
    assert clock.offset_s == offset_s
    before_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", CLOCKS],
        env={**os.environ, **clock.environment},
        capture_output=True,
        timeout=60,
        check=True,
    )
    after_s = time.monotonic()
    wall_s, wall_ns_s, began_s, ended_s = json.loads(done.stdout)
    assert abs(wall_s - clock.now_s()) < 60
    assert abs(wall_ns_s - clock.now_s()) < 60
    assert before_s < began_s < ended_s < after_s
    assert ended_s - began_s >= 0.1, "waits last as long as ever"


# ---------------------------------------------------------------- the disk

FILLS_UP = """
import errno, sys
from pathlib import Path
from tests.chaos.small_disk import SmallDisk, enter_namespace
if not enter_namespace():
    sys.exit("not allowed")
folder = Path(sys.argv[1])
disk = SmallDisk(folder, 1 << 20)
disk.fill(8192)
try:
    (folder / "x").write_bytes(bytes(20_000))
except OSError as error:
    assert error.errno == errno.ENOSPC, error
else:
    sys.exit("there was room")
assert (folder / "x").stat().st_size == 8192
disk.empty()
(folder / "x").write_bytes(bytes(20_000))
"""


def test_a_small_disk_is_really_full_and_nobody_else_sees_it(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", FILLS_UP, str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip()) in ((0, ""), (1, "not allowed"))
    assert not list(tmp_path.iterdir()), "it is mounted for others, too"
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


# ---------------------------------------------------------------- judging


def answer(texts: str, *, created: int = 5, ends: int = 1) -> Answer:
    made = Answer(0)
    for text in texts:
        event = {"id": "x", "created": created, "choices": [{"text": text, "logprob": -0.25}]}
        made.take(b"data: " + json.dumps(event).encode())
    for _ in range(ends):
        made.take(b"data: [DONE]")
    return made


def test_answers_are_judged_by_every_event_and_the_end() -> None:
    right = answer("abc")
    assert not answer("abc", created=9).difference(right, whole=True)
    assert not answer("ab", ends=0).difference(right, whole=False)
    for wrong in (answer("abd"), answer("ab"), answer("abcc"), answer("abc", ends=2)):
        assert wrong.difference(right, whole=True)
    assert answer("b", ends=0).difference(right, whole=False), "a token was lost at the start"
    two = answer("ab", ends=0)
    two.events += answer("abc", created=6, ends=0).events[2:]
    assert two.difference(right, whole=False), "the time of creation changed in mid-stream"


def test_every_draw_comes_from_the_seed() -> None:
    """Nothing that a fault draws depends on what the one before it drew."""
    seeds = [step.seed for step in itertools.islice(steps(1), 50)]
    assert len(set(seeds)) == 50
    assert random.Random(seeds[0]).random() == random.Random(seeds[0]).random()
