"""One run of one case: the processes are started, measured, stopped, and asked for a replay."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from bench.rig import metrics
from bench.rig.cases import ROOT, Case
from bench.rig.clients import Tally
from bench.rig.meter import Load, Meter
from bench.rig.recorder import Recording
from bench.rig.replay import replay
from bench.rig.sink import Sink
from deepmesh.config import Config
from deepmesh.processes import Child, Command, mesh_commands
from deepmesh.run_dir import dump_toml, tail
from deepmesh.supervisor import Mesh

STOP_S = 20.0
POLL_S = 0.02
WARM_S = 1.0  # of the HTTP clients, until all streams are under way


class RunError(RuntimeError):
    """A run brought no figures; the text says why."""


@dataclass
class Run:
    """What came of one run."""

    window: metrics.Window
    ideal: metrics.Window | None  # of the replay, if one was made
    same_tokens: bool  # in the replay
    load: Load


def run(case: Case, steps: int, *, with_replay: bool) -> Run:
    """Start, measure `steps` group steps, stop.

    Raises:
        RunError, SinkError, ReplayError: it did not come that far.
    """
    with tempfile.TemporaryDirectory(prefix="dm-") as folder:
        config = case.config(Path(folder) / "run")
        Path(config.mesh.run_dir, "logs").mkdir(parents=True)
        measure = _run_mesh if case.whole_mesh else _run_pair
        return measure(config, case, steps, with_replay=with_replay)


def _run_pair(config: Config, case: Case, steps: int, *, with_replay: bool) -> Run:
    """Scheduler and executor, and this process as their tokenizer."""
    run_dir = Path(config.mesh.run_dir)
    path, out = run_dir / "mesh.toml", run_dir / "recording"
    path.write_text(dump_toml(config))
    commands = commands_of(config, path, out, work_ms=case.work * case.step_ms)
    with _started(config, commands["executor-0-0"]) as executor:
        with _started(config, commands["scheduler-0"]) as scheduler:
            sink = Sink(config, case)
            try:
                first = sink.settle()
                pids = {"scheduler": scheduler.pid, "executor": executor.pid, "sink": os.getpid()}
                meter = Meter(pids)
                sink.run_until(first + steps)
                meter.stop()
                _stop(scheduler, sink)
            finally:
                sink.close()
        bounds, load = (first, first + steps), meter.load(steps)
        return _evaluate(config, case, read_recording(out), bounds, with_replay, load)


def _run_mesh(config: Config, case: Case, steps: int, *, with_replay: bool) -> Run:
    """Everything, and HTTP clients in a process of their own."""
    run_dir = Path(config.mesh.run_dir)
    out = run_dir.parent / "recording"
    commands = commands_of(config, run_dir / "mesh.toml", out, work_ms=case.work * case.step_ms)
    with Mesh(config, commands=list(commands.values())) as mesh:
        meter = Meter(mesh.pids)
        cpu_ms = serve_clients(mesh.url, case.rows, WARM_S + steps * case.step_ms / 1000)
        meter.stop(clients=cpu_ms)
    recording = read_recording(out)
    load = meter.load(len(recording.results))
    bounds = metrics.full_steps(recording.submits, case.rows)
    if bounds[1] - bounds[0] < steps // 2:
        raise RunError(f"only the group steps {bounds} were full of rows")
    if not with_replay:
        return _evaluate(config, case, recording, bounds, with_replay, load)
    (run_dir / "mesh.toml").write_text(dump_toml(config))
    with _started(config, commands["executor-0-0"]):
        return _evaluate(config, case, recording, bounds, with_replay, load)


def serve_clients(
    url: str, streams: int, seconds: float, *, tokens: str = "", last_s: float = STOP_S
) -> float:
    """Run the clients to their end; the CPU time that they took, ms.

    Args:
        tokens: of each chat, see `bench.rig.clients`.
        last_s: what the chats that run at the end may take.
    Raises:
        RunError: a chat failed.
    """
    argv = [sys.executable, "-m", "bench.rig.clients", "--url", url, "--streams", str(streams)]
    argv += ["--seconds", str(seconds), *(["--tokens", tokens] if tokens else [])]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=seconds + last_s)
    if done.returncode:
        raise RunError(f"clients: {done.stdout or done.stderr}")
    return msgspec.json.decode(done.stdout, type=Tally).cpu_ms


def _evaluate(
    config: Config,
    case: Case,
    recording: Recording,
    bounds: tuple[int, int],
    with_replay: bool,
    load: Load,
) -> Run:
    tail_ns = round(case.tail_ms * 1e6)
    submits = metrics.repeatable(recording.submits, bounds[1])
    measured = metrics.window(submits, recording.results, *bounds, tail_ns=tail_ns)
    if not with_replay:
        return Run(measured, None, True, load)
    results = replay(config, submits)
    ideal = metrics.window(submits, results, *bounds, tail_ns=tail_ns)
    tokens = {result.step_id: result.tokens for result in recording.results}
    same = all(result.tokens == tokens[result.step_id] for result in results)
    return Run(measured, ideal, same, load)


# ------------------------------------------------------------ processes


def commands_of(config: Config, path: Path, out: Path, *, work_ms: float) -> dict[str, Command]:
    """Those of the mesh, with the scheduler's core recorded.

    Args:
        path: of the mesh.toml.
        out: where the `Recording` goes.
        work_ms: CPU time that the scheduler's loop burns before each step.
    """
    commands = {command.name: command for command in mesh_commands(config, path)}
    argv = [sys.executable, "-m", "bench.rig.recorder", "--config", str(path), "--out", str(out)]
    argv += ["--work-ms", str(work_ms)]
    commands["scheduler-0"] = replace(commands["scheduler-0"], argv=argv)
    return commands


@contextmanager
def _started(config: Config, command: Command) -> Iterator[Child]:
    log = Path(config.mesh.run_dir) / "logs" / f"{command.name}.log"
    child = Child(command, log, backoff_s=0.0)
    child.start(time.monotonic())
    try:
        yield child
        if child.poll(time.monotonic()) is not None and child.last_status:
            raise RunError(f"{command.name} ended: {_last_lines(log)}")
    except Exception as error:
        raise RunError(f"{error}; {command.name} says: {_last_lines(log)}") from error
    finally:
        child.kill()


def _stop(child: Child, sink: Sink) -> None:
    """Ask again and again: from the second time on it does not wait for the requests, but for the
    sink, to which it says that they are over.
    """
    deadline = time.monotonic() + STOP_S
    while child.poll(time.monotonic()) is None:
        if time.monotonic() > deadline:
            raise RunError(f"{child.command.name} does not stop")
        child.send(signal.SIGTERM)
        sink.let_go(POLL_S)


def _last_lines(log: Path) -> str:
    return " | ".join(tail(log, 4))


def read_recording(out: Path) -> Recording:
    """What the scheduler of `commands_of` wrote when it ended."""
    return msgspec.msgpack.decode(out.read_bytes(), type=Recording)
