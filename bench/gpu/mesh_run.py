"""A whole mesh on a GPU under HTTP clients: what it is made of, and which of its steps count."""

import json
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.rig import metrics
from bench.rig.clients import lengths
from bench.rig.executor import Notes
from bench.rig.meter import Load, Meter
from bench.rig.recorder import Recording
from bench.rig.run import STOP_S, RunError, commands_of, read_recording, serve_clients
from deepmesh.config import (
    Config,
    ExecutorConfig,
    GatewayConfig,
    LinksConfig,
    MeshConfig,
    SchedulerConfig,
    SupervisorConfig,
)
from deepmesh.processes import Command
from deepmesh.run_dir import tail
from deepmesh.supervisor import Mesh, MeshError
from deepmesh.wire.messages import StepResult, SubmitStep
from services.executor.presets import preset_config
from services.executor.random_model import SHIPPED_TOKENIZER
from services.executor.sized_tokenizer import sized_tokenizer

START_S = 240.0  # gigabytes of weights are made, and graphs captured
LOG_LINES = 12


@dataclass(frozen=True)
class Plan:
    """One run."""

    model: Path  # folder of a checkpoint, or of `write_slice`
    makes_weights: bool
    rows: int
    depth: Literal[1, 2, 3]
    chats: Sequence[str]  # phases: tokens of a chat, "1000" (one chat a stream) or "40:119"
    seconds: float  # of a phase whose chats follow each other
    max_len: int
    device: Literal["cuda", "host"] = "cuda"
    ranks: int = 1  # of the group; phases are those of rank 0

    @property
    def rank_rows(self) -> int:
        """Of a step of one rank."""
        return self.rows // self.ranks


@dataclass(frozen=True)
class Phase:
    """Steps of a phase that count."""

    chats: str
    window: metrics.Window
    steps: Sequence[SubmitStep]
    num_prompt_rows: NDArray[np.int64]  # of each step
    launch_begin: NDArray[np.int64]  # wall clock, ns
    launch_end: NDArray[np.int64]


@dataclass(frozen=True)
class MeshRun:
    """What came of it."""

    phases: Sequence[Phase]
    waits: Sequence[str]
    load: Load
    start_s: float


def write_slice(folder: Path, preset: str, layers: int, stages: int = 0) -> None:
    """The checkpoint of a slice without its weights, which an executor is told to make.

    `stages`: of drafts.
    """
    raw = preset_config(preset, layers=layers, stages=stages)
    text = raw["text_config"]
    text["engram_compressed_vocab_size"] = text["vocab_size"]  # as `random_device_model` has it
    folder.mkdir(parents=True)
    tokenizer = sized_tokenizer(SHIPPED_TOKENIZER, text["vocab_size"])
    (folder / "tokenizer.json").write_text(tokenizer, "utf-8")
    (folder / "config.json").write_text(json.dumps(raw))
    none = b"{}"  # a file of weights with no tensor in it: a folder without one is refused
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(none)) + none)


def run_mesh(plan: Plan) -> MeshRun:
    """Start, serve the chats of each phase, stop.

    Raises:
        RunError: a chat failed, or too few steps were full of rows.
        MeshError: it did not start.
    """
    with tempfile.TemporaryDirectory(prefix="dm-") as name:
        folder = Path(name)
        config, out = _config(plan, folder / "run"), folder / "recording"
        noted = [folder / f"notes-{rank}" for rank in range(plan.ranks)]
        commands = _commands(plan, config, out, noted)
        began = time.monotonic()
        starts: list[int] = []
        try:
            with Mesh(config, commands=list(commands.values())) as mesh:
                start_s, cpu_ms = time.monotonic() - began, 0.0
                meter = Meter(mesh.pids)
                for chats in plan.chats:
                    starts.append(time.time_ns())
                    follows = lengths(chats)[0] != lengths(chats)[1]
                    seconds = plan.seconds if follows else 0.1
                    cpu_ms += serve_clients(
                        mesh.url, plan.rows, seconds, tokens=chats, last_s=START_S
                    )
                meter.stop(clients=cpu_ms)
        except (MeshError, RunError) as error:
            raise RunError(f"{error}; {_logs(folder / 'run')}") from error
        recording = read_recording(out)
        notes = [msgspec.json.decode(file.read_bytes(), type=Notes) for file in noted]
        phases = [
            phase_of(recording, notes[0], chats, (start, end), plan.rank_rows)
            for chats, start, end in zip(plan.chats, starts, [*starts[1:], 1 << 62], strict=True)
        ]
        waits = [words for each in notes for words in each.waits]
        return MeshRun(phases, waits, meter.load(len(recording.results)), start_s)


def phase_of(
    recording: Recording, notes: Notes, chats: str, within: tuple[int, int], rows: int
) -> Phase:
    """Of the steps that were queued `within` (wall clock, ns), those that count: without prompts
    if each stream has one chat, the longest run of steps that are full and decode alone; else all
    from the first full one to the last.

    Raises:
        RunError: there are none.
    """
    by_step = {result.step_id: result for result in recording.results}
    least, most = lengths(chats)
    submits = [s for s in recording.submits if _queued(by_step.get(s.step_id), within)]
    if least == most:
        first, end = metrics.steady_steps(submits, rows)
    else:
        first, end = metrics.full_steps(submits, rows)
    if end - first < 2:
        raise RunError(f"chats of {chats} tokens: no steps were full of rows")
    steps = [step for step in submits if first <= step.group_step < end]
    launches = {launch.step_id: launch for launch in notes.launches}
    found = [launches[step.step_id] for step in steps]
    return Phase(
        chats,
        metrics.window(submits, recording.results, first, end, tail_ns=0),
        steps,
        np.array([metrics.num_prompt_rows(step) for step in steps]),
        np.array([launch.begin_ns for launch in found]),
        np.array([launch.end_ns for launch in found]),
    )


def _queued(result: StepResult | None, within: tuple[int, int]) -> bool:
    return result is not None and within[0] <= result.times.enqueued_ns < within[1]


def _config(plan: Plan, run_dir: Path) -> Config:
    return Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(plan.model), served_model="tiny"),
        links=LinksConfig(timeout_s=20.0),
        gateway=GatewayConfig(port=0),
        scheduler=SchedulerConfig(
            depth=plan.depth, max_rows=plan.rank_rows, step_tokens=4096, max_model_len=plan.max_len
        ),
        executor=ExecutorConfig(device=plan.device, ranks=plan.ranks, masks=False),
        supervisor=SupervisorConfig(start_timeout_s=START_S, stop_timeout_s=STOP_S),
    )


def _commands(plan: Plan, config: Config, out: Path, noted: list[Path]) -> dict[str, Command]:
    path = Path(config.mesh.run_dir) / "mesh.toml"
    commands = commands_of(config, path, out, work_ms=0.0)
    for rank, file in enumerate(noted):
        argv = [sys.executable, "-m", "bench.rig.executor", "--config", str(path)]
        argv += ["--index", "0", "--rank", str(rank), "--out", str(file)]
        argv += ["--make-weights"] if plan.makes_weights else []
        name = f"executor-0-{rank}"
        commands[name] = replace(commands[name], argv=argv)
    return commands


def _logs(run_dir: Path) -> str:
    """What the processes said last."""
    said: list[str] = []
    for log in sorted(run_dir.glob("logs/*.log")):
        with suppress(OSError):
            said.append(f"{log.stem}: {' | '.join(tail(log, LOG_LINES))}")
    return "; ".join(said)
