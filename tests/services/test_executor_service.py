"""The executor's process and loop, over a real link to a fake scheduler."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from deepmesh import telemetry
from deepmesh.config import (
    Config,
    ExecutorConfig,
    LinksConfig,
    MeshConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from deepmesh.run_dir import dump_toml
from deepmesh.wire.messages import (
    Capacity,
    Descriptor,
    Drain,
    GpuDone,
    GroupFlag,
    Load,
    Pool,
    Shutdown,
    StepKind,
    StepStatus,
    SubmitStep,
)
from services.executor.__main__ import HUNG_STATUS
from services.executor.device_clock import TimedClock
from services.executor.fake import FakeEngine, Oracle
from services.executor.interface import LiveRows, OnProgress, Sampled
from services.executor.service import ExecutorService, StepGate, Verdict
from services.executor.slots import SlotTable
from services.executor.stream import StreamExecutor
from tests.contract.executor_host import Host
from tests.contract.remote_executor import RemoteExecutor
from tests.tiny import VOCAB_SIZE

ROOT = Path(__file__).parents[2]
PROMPT = list(range(600, 640))


def make_config(run_dir: Path, **executor: object) -> Config:
    return Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(ROOT / "models/tiny")),
        links=LinksConfig(heartbeat_s=0.2, timeout_s=20.0),
        scheduler=SchedulerConfig(max_rows=8, max_model_len=512),
        executor=ExecutorConfig(kind="fake", global_blocks=64, window_blocks=64, **executor),
        telemetry=TelemetryConfig(enabled=False),
    )


def order(config: Config, epoch: int = 1) -> Load:
    return Load(epoch, rank=0, ranks=1, model=config.mesh.model, numerics="fp32")


class CountingEngine(FakeEngine):
    """Counts how often weights are really asked for."""

    loads = 0

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        self.loads += 1
        return super().load(order, on_progress)


class Running:
    """A service on a thread of its own."""

    def __init__(self, config: Config, engine: FakeEngine) -> None:
        def make(on_result: Callable[[], None], on_progress: OnProgress) -> StreamExecutor:
            self.executor = StreamExecutor(engine, on_result=on_result, on_progress=on_progress)
            return self.executor

        tracer = telemetry.setup("executor", "executor-0-0", config)
        self.service = ExecutorService(config, make, index=0, rank=0, tracer=tracer)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.service.run()
        except ValueError as error:
            self.error = error

    def join(self) -> None:
        self.thread.join(20.0)
        assert not self.thread.is_alive()


@contextmanager
def running(config: Config, engine: FakeEngine | None = None) -> Iterator[Running]:
    run = Running(config, engine or FakeEngine(config))
    try:
        yield run
    finally:
        run.service.stop()
        run.join()


def generate(host: Host, count: int = 6) -> list[int]:
    request = host.admit(PROMPT, count, seed=5)
    host.run(request)
    return request.output


def test_a_request_runs_over_the_link_and_follows_the_oracle(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config), RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        assert [(p.done, p.total) for p in remote.progress] == [(1, 1)]
        assert generate(host) == Oracle(VOCAB_SIZE).generate(PROMPT, 6, seed=5)


def test_results_do_not_wait_for_the_next_poll(tmp_path: Path) -> None:
    """The loop sleeps for a second when idle: twenty steps in turn would take ten or more."""
    config = make_config(tmp_path, fake_step_ms=2.0)
    with running(config), RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        request = host.admit(PROMPT, 20)
        host.run(request, depth=1)
        first, last = host.results[0].times, host.results[-1].times
        assert (last.end_ns - first.begin_ns) / 1e9 < 5.0


def test_a_lost_scheduler_is_waited_for_and_the_executor_lives_on(tmp_path: Path) -> None:
    config = make_config(tmp_path, fake_step_ms=20.0)
    engine = CountingEngine(config)
    with running(config, engine) as run:
        with RemoteExecutor(config) as remote:
            host = Host(remote, remote.load(order(config)))
            request = host.admit(PROMPT, 30)
            for _ in range(10):
                host.submit(host.row(request))
            host.take()
        with RemoteExecutor(config) as remote:
            host = Host(remote, remote.load(order(config, epoch=2)), epoch=2)
            assert generate(host) == Oracle(VOCAB_SIZE).generate(PROMPT, 6, seed=5)
            assert {r.engine_epoch for r in host.results} == {2}
        assert run.thread.is_alive()


def test_a_missing_step_ends_the_link_and_a_new_session_works(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config) as run, RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        request = host.admit(PROMPT, 8)
        host.submit(host.row(request))
        host.take()
        host.step_id += 1  # a step that never arrives
        host.submit(host.row(request))
        remote.wait_connected(times=2)
        assert run.service.counters["gaps"] == 1
        host = Host(remote, remote.load(order(config, epoch=2)), epoch=2)
        assert generate(host) == Oracle(VOCAB_SIZE).generate(PROMPT, 6, seed=5)


def test_repeated_and_foreign_steps_are_dropped_and_counted(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config) as run, RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        request = host.admit(PROMPT, 4)
        host.submit(host.row(request))
        host.take()
        host.submit(epoch=77)
        host.in_flight.clear()
        host.step_id -= 2
        host.submit()  # the number of the first step again
        host.in_flight.clear()
        host.run(request)
        assert request.output == Oracle(VOCAB_SIZE).generate(PROMPT, 4)
        assert run.service.counters["dropped_steps"] == 2
        assert run.executor.counters["failed_steps"] == 0


def test_drain_ends_after_the_last_result(tmp_path: Path) -> None:
    config = make_config(tmp_path, fake_step_ms=5.0)
    with running(config) as run, RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        request = host.admit(PROMPT, 8)
        for _ in range(3):
            host.submit(host.row(request))
        remote.send(Drain())
        for _ in range(3):
            host.take()
        run.join()


def test_a_drain_ends_at_its_deadline_if_the_device_is_too_slow(tmp_path: Path) -> None:
    config = make_config(tmp_path, fake_step_ms=30_000.0)
    with running(config) as run, RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        host.submit(host.row(host.admit(PROMPT, 8)))
        remote.send(Drain(deadline_s=0.1))
        run.join()


def test_tokens_and_the_end_of_the_step_are_told_apart_over_the_link(tmp_path: Path) -> None:
    config = make_config(tmp_path, fake_step_ms=1.0, fake_tail_ms=20.0)
    with running(config), RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        step_id = host.submit(host.row(host.admit(PROMPT, 8)))
        assert host.take().gpu_done < step_id
        done = remote.poll(20)
        assert isinstance(done, GpuDone)
        assert done.gpu_done == step_id


def test_shutdown_ends_at_once(tmp_path: Path) -> None:
    config = make_config(tmp_path, fake_step_ms=30_000.0)
    with running(config) as run, RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        host.submit(host.row(host.admit(PROMPT, 8)))
        remote.send(Shutdown())
        run.join()


def test_a_model_that_is_not_there_ends_the_service_with_its_path(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config) as run, RemoteExecutor(config) as remote:
        remote.wait_connected()
        remote.send(Load(1, rank=0, ranks=1, model=str(tmp_path / "nowhere"), numerics="fp32"))
        run.join()
        assert "/nowhere" in str(run.error)


def step(epoch: int, step_id: int, flags: int = 0) -> SubmitStep:
    return SubmitStep(epoch, step_id, 0, 0, Descriptor(StepKind.DECODE, 0, 0, flags=flags), b"")


def test_the_gate_passes_steps_in_order_once() -> None:
    gate = StepGate(3)
    ids = [(3, 10), (3, 11), (3, 11), (3, 9), (2, 12), (3, 13), (3, 12)]
    assert [gate.check(step(*each)) for each in ids] == [
        Verdict.RUN,
        Verdict.RUN,
        Verdict.DROP,
        Verdict.DROP,
        Verdict.DROP,
        Verdict.GAP,
        Verdict.RUN,
    ]


def test_the_gate_passes_nothing_behind_the_last_step_of_an_epoch() -> None:
    gate = StepGate(3)
    paused, drained = step(3, 10, GroupFlag.PAUSE), step(3, 12, GroupFlag.DRAIN)
    given = [paused, step(3, 11), drained, step(3, 13)]
    assert [gate.check(each) for each in given] == [Verdict.RUN] * 3 + [Verdict.GAP]


# ---------------------------------------------------------------- as a process


@contextmanager
def process(config: Config, path: Path) -> Iterator["subprocess.Popen[str]"]:
    path.write_text(dump_toml(config))
    child = subprocess.Popen(
        [sys.executable, "-m", "services.executor", "--config", str(path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def test_sigterm_ends_the_process_cleanly(tmp_path: Path) -> None:
    config = make_config(tmp_path, fake_step_ms=5.0)
    with process(config, tmp_path / "mesh.toml") as child, RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        assert generate(host) == Oracle(VOCAB_SIZE).generate(PROMPT, 6, seed=5)
        child.send_signal(signal.SIGTERM)
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 0
        assert "Traceback" not in errors


def test_a_process_whose_device_hangs_ends_after_shutdown_and_says_where(tmp_path: Path) -> None:
    config = make_config(tmp_path, fake_hang_step=2)
    with process(config, tmp_path / "mesh.toml") as child, RemoteExecutor(config) as remote:
        host = Host(remote, remote.load(order(config)))
        request = host.admit(PROMPT, 8)
        host.submit(host.row(request))
        assert host.take().status == StepStatus.OK
        host.submit(host.row(request))
        assert remote.poll(0.5) is None
        remote.send(Shutdown())
        _, errors = child.communicate(timeout=60)
        assert child.returncode == HUNG_STATUS
        assert "device_clock.py" in errors


def test_a_device_that_is_not_there_is_named(tmp_path: Path) -> None:
    config = Config(mesh=MeshConfig(run_dir=str(tmp_path)), executor=ExecutorConfig(device="cuda"))
    with process(config, tmp_path / "mesh.toml") as child:
        _, errors = child.communicate(timeout=60)
        assert child.returncode == 2
        assert "executor.device: no CUDA device is here" in errors


def test_the_fake_needs_no_torch() -> None:
    code = """
import sys
from deepmesh.config import Config, ExecutorConfig, load_config
from deepmesh.wire.messages import Load
from services.executor.__main__ import make_engine
engine = make_engine(Config(executor=ExecutorConfig(kind="fake")))
engine.load(Load(1, 0, 1, load_config(None).mesh.model), lambda *_: None)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


# ---------------------------------------------------------------- epochs


def test_a_repeated_epoch_number_begins_with_empty_slots_too(tmp_path: Path) -> None:
    executor = StreamExecutor(FakeEngine(make_config(tmp_path)))
    try:
        host = Host(executor, executor.load(order(make_config(tmp_path))))
        host.run(host.admit(PROMPT, 4))
        host.submit(host.row(host.admit(PROMPT, 8)))
        host.take()
        assert executor.num_requests > 0
        executor.reset(host.epoch)
        assert executor.num_requests == 0
        late = Host(executor, host.capacity, epoch=host.epoch)
        again = late.admit(PROMPT, 8)
        late.run(again)
    finally:
        executor.close()
    assert again.output == Oracle(VOCAB_SIZE).generate(PROMPT, 8, seed=0, stop_ids=[])


# ---------------------------------------------------------------- tokens before the next step


class HostClock(TimedClock):
    """Steps are computed by the stream's thread, as on a CPU."""

    is_host = True


class WatchingEngine(FakeEngine):
    """Notes how many results had been taken when each step began; the first one waits."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.clock = HostClock(0.0)
        self.num_taken: Callable[[], int] = lambda: 0
        self.seen: list[int] = []
        self.all_submitted = threading.Event()

    def compute(self, live: LiveRows, slots: SlotTable, step: SubmitStep) -> Sampled:
        assert self.all_submitted.wait(20)
        self.seen.append(self.num_taken())
        return super().compute(live, slots, step)


def test_tokens_leave_before_the_next_step_takes_the_core(tmp_path: Path) -> None:
    engine = WatchingEngine(make_config(tmp_path))
    executor = StreamExecutor(engine, hand_over_s=20.0)
    try:
        host = Host(executor, executor.load(order(make_config(tmp_path))))
        engine.num_taken = lambda: len(host.results)
        request = host.admit(PROMPT, 6)
        for _ in range(6):
            host.submit(host.row(request))
        engine.all_submitted.set()
        for _ in range(6):
            host.take()
    finally:
        executor.close()
    assert engine.seen == list(range(6))


def test_a_step_does_not_wait_for_long_for_tokens_that_nobody_takes(tmp_path: Path) -> None:
    engine = WatchingEngine(make_config(tmp_path))
    executor = StreamExecutor(engine, hand_over_s=0.001)
    try:
        host = Host(executor, executor.load(order(make_config(tmp_path))))
        request = host.admit(PROMPT, 3)
        steps = [host.submit(host.row(request)) for _ in range(3)]
        engine.all_submitted.set()
        deadline = time.monotonic() + 60
        while len(engine.seen) < len(steps):
            assert time.monotonic() < deadline
    finally:
        executor.close()
    assert executor.poll(0) is not None


# ---------------------------------------------------------------- the fake's own checks


def test_the_fake_finds_out_who_wrote_into_a_foreign_block(tmp_path: Path) -> None:
    executor = StreamExecutor(FakeEngine(make_config(tmp_path)))
    try:
        host = Host(executor, executor.load(order(make_config(tmp_path))))
        first = host.admit(PROMPT, 8)
        host.submit(host.row(first))
        second = host.admit(PROMPT[::-1], 8, tables={Pool.GLOBAL: list(first.tables[Pool.GLOBAL])})
        host.submit(host.row(second))
        host.submit(host.row(first))
        results = [host.take() for _ in range(3)]
    finally:
        executor.close()
    assert [r.status for r in results] == [StepStatus.OK, StepStatus.OK, StepStatus.ERROR]
    assert "row 0: the window row of position 0 is not its own" in results[2].error


def test_the_fake_can_be_asked_to_stop(tmp_path: Path) -> None:
    executor = StreamExecutor(FakeEngine(make_config(tmp_path), stop_one_in=5))
    try:
        host = Host(executor, executor.load(order(make_config(tmp_path))))
        requests = [host.admit(PROMPT, 60, seed=s, stop_ids=[1]) for s in range(6)]
        late = host.admit(PROMPT, 60, stop_ids=[1], min_len=len(PROMPT) + 30)
        host.run(*requests, late)
    finally:
        executor.close()
    for seed, request in enumerate(requests):
        expected = Oracle(VOCAB_SIZE, stop_one_in=5).generate(PROMPT, 60, seed=seed, stop_ids=[1])
        assert request.output == expected
    assert {r.output[-1] for r in requests} == {1}
    assert len(late.output) > 30
    assert 1 not in late.output[:30]
