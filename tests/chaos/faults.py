"""What can happen to a mesh: each kind does it, and undoes what does not pass by itself."""

import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import psutil

from tests.chaos.crowds import overload, slow_clients
from tests.chaos.load import Load
from tests.chaos.mesh import HEARTBEAT_S, SILENCE_S, ChaosMesh, signal_to
from tests.chaos.mischief import LATE_S, Order
from tests.chaos.requests import NUM_LONG

CUT_S, DELAY_S, PAUSE_S = SILENCE_S + 1.0, 2.0, 1.0
FOUND_S = 25.0  # until a supervisor, or an executor, has replaced what hangs
NO_LIMIT = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
JUMPS_S = (3600.0, 3 * 86_400.0)  # at least an hour
LIMITS_S = {  # from the fault until all is as before, on a machine with nothing else to do
    "kill": 5.0,
    "hang": 15.0,
    "cut": 2 * HEARTBEAT_S + 5.0,
}


class Scene(NamedTuple):
    """What a fault is done to, and with."""

    mesh: ChaosMesh
    load: Load
    target: str  # of plan.TARGETS
    draw: random.Random


def kill(scene: Scene) -> str:
    """`kill -9`."""
    name, process = _victim(scene)
    signal_to(process, signal.SIGKILL)
    _wait_replaced(scene, name, process.pid)
    return name


def hang(scene: Scene) -> str:
    """SIGSTOP for good: who watches it has to find out."""
    name, process = _victim(scene)
    signal_to(process, signal.SIGSTOP)
    _wait_replaced(scene, name, process.pid)
    return name


def pause(scene: Scene) -> str:
    """SIGSTOP, and SIGCONT a second later."""
    name, process = _victim(scene)
    signal_to(process, signal.SIGSTOP)
    _rest(PAUSE_S)
    signal_to(process, signal.SIGCONT)
    return name


def drop(scene: Scene) -> str:
    """Messages are lost."""
    return _mistreat(scene, "drop", scene.draw.randint(1, 3))


def duplicate(scene: Scene) -> str:
    """… arrive twice."""
    return _mistreat(scene, "duplicate", scene.draw.randint(1, 20))


def reorder(scene: Scene) -> str:
    """… arrive behind the next one."""
    return _mistreat(scene, "reorder", scene.draw.randint(1, 3))


def delay(scene: Scene) -> str:
    """… arrive late for a while, in their order."""
    line, words = _line(scene)
    scene.mesh.mistreat(Order("delay", line, s=DELAY_S, seed=scene.draw.getrandbits(32)))
    _rest(DELAY_S + LATE_S[1])
    return f"{words} for {DELAY_S:g} s"


def cut(scene: Scene) -> str:
    """A link is dead for longer than it may be silent; its connections outlive that, or do not."""
    line, words = _line(scene)
    kind = scene.draw.choice(("hold", "break"))
    scene.mesh.mistreat(Order(kind, line, s=CUT_S))
    _rest(CUT_S)
    return f"{words} for {CUT_S:g} s, {kind}"


def disk_full(scene: Scene) -> str:
    """No room on the kvstore's disk, or next to none, for a second."""
    left = scene.draw.choice((0, scene.draw.randrange(1 << 18)))
    if (disk := scene.mesh.disk) is not None:
        disk.fill(left)
        _rest(PAUSE_S)
        disk.empty()
        return f"{left >> 10} KiB left"
    with _limited(scene, "kvstore-0", resource.RLIMIT_FSIZE, left):
        _rest(PAUSE_S)
    return f"files of {left >> 10} KiB at most"


def redis_down(scene: Scene) -> str:
    """Redis is killed and comes back empty, or hangs."""
    if scene.target == "killed":
        scene.mesh.redis.kill()
        _rest(PAUSE_S)
        scene.mesh.redis.start()
    else:
        process = psutil.Process(scene.mesh.redis.pid)
        signal_to(process, signal.SIGSTOP)
        _rest(PAUSE_S)
        signal_to(process, signal.SIGCONT)
    return scene.target


def clock_jump(scene: Scene) -> str:
    """The wall clock of all processes is set, hours to days ahead or back; and stays so."""
    clock, by_s = scene.mesh.clock, scene.draw.uniform(*JUMPS_S)
    clock.jump(clock.offset_s + (by_s if scene.target == "ahead" else -by_s))
    answer = scene.load.run(scene.load.ask_right(NUM_LONG), 120.0)
    off_s = answer.created_s - clock.now_s()
    assert abs(off_s) < 60.0, f"the mesh's clock is {off_s:.0f} s off: it did not jump"
    return f"{scene.target} by {by_s / 3600:.1f} h"


def memory_limit(scene: Scene) -> str:
    """A process gets no more memory for a second; what it does about it is its own affair."""
    name, process = _victim(scene)
    with suppress(psutil.Error):
        now = process.memory_info().vms
        with _limited(scene, name, resource.RLIMIT_AS, now):
            _rest(PAUSE_S)
    return name


def many_slow(scene: Scene) -> str:
    """See `crowds`."""
    return scene.load.run(slow_clients(scene.load, scene.mesh.num_open), 240.0)


def too_many(scene: Scene) -> str:
    """See `crowds`."""
    return scene.load.run(overload(scene.load), 300.0)


FAULTS: dict[str, Callable[[Scene], str]] = {
    "kill": kill,
    "hang": hang,
    "pause": pause,
    "drop": drop,
    "duplicate": duplicate,
    "delay": delay,
    "reorder": reorder,
    "cut": cut,
    "disk full": disk_full,
    "redis down": redis_down,
    "clock jump": clock_jump,
    "memory limit": memory_limit,
    "slow clients": many_slow,
    "overload": too_many,
}


def _victim(scene: Scene) -> tuple[str, psutil.Process]:
    name = scene.mesh.name(scene.target, scene.draw)
    if scene.target == "gateway":
        scene.load.gateway_fault()
    return name, scene.mesh.process(name, scene.target)


def _wait_replaced(scene: Scene, name: str, pid: int) -> None:
    """Until another process has taken its place."""

    def is_replaced() -> bool:
        found = dict(scene.mesh.processes())
        now = found.get(f"{name}-masks" if scene.target == "masks" else name)
        return now is not None and now.pid != pid

    scene.mesh.wait(is_replaced, f"another {name} than {pid}", FOUND_S)


def _line(scene: Scene) -> tuple[int, str]:
    """The number of a line to the target, or -1 for all."""
    found = [n for n, (name, _) in enumerate(scene.mesh.lines) if name == scene.target]
    if not found:
        return -1, "all links"
    line = scene.draw.choice(found)
    return line, f"links to {'-'.join(map(str, scene.mesh.lines[line]))}"


def _mistreat(scene: Scene, kind: str, count: int) -> str:
    line, words = _line(scene)
    order = Order(kind, line, count=count, seed=scene.draw.getrandbits(32))  # type: ignore[arg-type]
    left = scene.mesh.mistreat(order).left
    deadline_s = time.monotonic() + 30.0
    while left:
        assert time.monotonic() < deadline_s, f"no messages at {words} to {kind}"
        _rest(0.02)
        left = scene.mesh.mistreat(Order("ask")).left
    return f"{count} at {words}"


@contextmanager
def _limited(scene: Scene, name: str, what: int, limit: int) -> Iterator[None]:
    """A soft limit of a process while inside; one that has ended meanwhile has none any more."""
    pid = scene.mesh.mesh.pids[name]
    with suppress(ProcessLookupError):
        resource.prlimit(pid, what, (limit, NO_LIMIT[1]))
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            resource.prlimit(pid, what, NO_LIMIT)


def _rest(s: float) -> None:
    """The fault lasts."""
    threading.Event().wait(s)
