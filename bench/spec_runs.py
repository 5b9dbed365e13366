"""Runs of `bench spec`: the scheduler's core, and an executor for each policy, weights shared."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from bench.checkpoints import Checkpoint
from bench.determinism.jobs import Job
from bench.determinism.rig import Rig
from bench.spec_acceptance import (
    Acceptance,
    CountingSpeculation,
    Fate,
    OracleSpeculation,
    RecordingSpeculation,
)
from bench.spec_roofline import Roofline
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.wire.messages import Generate, Load, SamplingParams
from deepmesh.wire.packed import pack_ids, unpack_ids
from models.tiny.training import structured, tasks
from models.tiny.training.render import Conversation
from services.executor.interface import Engine, OnProgress
from services.executor.model_config import ModelConfig
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.runner import Model, ModelEngine
from services.executor.speculation import Speculation

NONE, ADAPTIVE = "none", "adaptive"
LENGTHS = (1, 2, 3, 4, 5)
PROMPT_TOKENS = 8  # what a prompt costs is not asked here
EOS = 1
LONGEST_PROMPT, ANSWER_TOKENS = 400, 100  # at most
DEALT = 1 << 20  # seeds of a deal
EACH_TASK = 24  # prompts
TASKS: dict[str, Callable[[Random], Conversation]] = {
    "copy": tasks.copy_short,
    "long copy": tasks.copy_long,
    "add": lambda random: tasks.add(random, held_out=True),
    "tool": structured.call_tool,
    "json": structured.write_json,
    "think": tasks.think,
}


class SharedEngine(ModelEngine):
    """An engine whose weights others have, too; its KV is its own."""

    def __init__(
        self, config: Config, models: dict[Path, Model], speculation: type[Speculation]
    ) -> None:
        super().__init__(config)
        self._models = models
        self.speculation = speculation

    @property
    def drafts_made(self) -> Speculation | None:
        """The drafts of the latest engine epoch."""
        return self._speculation

    def _load_model(self, path: Path, order: Load, on_progress: OnProgress) -> Model:
        if path not in self._models:
            self._models[path] = super()._load_model(path, order, on_progress)
        return self._models[path]


@dataclass(frozen=True)
class Run:
    """One run of one policy, counted while all its requests decode."""

    tokens: int
    seconds: float
    verified: int  # drafts, of the whole run
    accepted: list[int]  # by place
    brought: int  # tokens of the whole run
    outputs: dict[int, list[int]]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds

    @property
    def verifying(self) -> int:
        """Steps of rows of the whole run, each of which brought a token and its drafts."""
        return max(1, self.brought - sum(self.accepted))


class Window:
    """From the moment at which every request has a token to that at which the first one ends."""

    def __init__(self, clock: Callable[[], float], *, ends_run: bool) -> None:
        self._clock, self.ends_run = clock, ends_run
        self.tokens, self.seconds = 0, 0.0
        self._began = self._at = 0.0
        self._before, self._is_over = 0, False

    def look(self, rig: Rig) -> None:
        """After results; see `Rig.run`."""
        if self._is_over:
            return
        outputs, now = rig.outputs.values(), self._clock()
        if not self._began:
            if all(output.num_tokens for output in outputs):
                self._began, self._before = now, sum(output.num_tokens for output in outputs)
        elif any(output.end is not None for output in outputs):
            self._is_over = True
            self.seconds = now - self._began
            self.tokens = sum(output.num_tokens for output in outputs) - self._before
            if self.ends_run:
                rig.abort()


class Policies:
    """The engines of all policies over one model."""

    blocks = (0, 0)  # of the global and the window pool; 0: as many as usual

    def __init__(
        self,
        checkpoint: Checkpoint,
        acceptance: Acceptance | None,
        rows: int,
        tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            acceptance: of drafts that are made up; None: the checkpoint's own count.
            rows: of a run, at most.
            tokens: of a request's output, at most.
            clock: seconds.
        """
        self._clock = clock
        self._checkpoint, self._rows, self._acceptance = checkpoint, rows, acceptance
        self._max_len = LONGEST_PROMPT + tokens if acceptance is None else PROMPT_TOKENS + tokens
        self._speculation = CountingSpeculation if acceptance is None else OracleSpeculation
        self._models: dict[Path, Model] = {}
        self._rigs: dict[str, Rig] = {}
        self._engines: dict[str, SharedEngine] = {}
        self._outputs: dict[int, list[int]] = {}

    @property
    def roofline(self) -> Roofline:
        """Of what all of them run."""
        model = self._models[self._checkpoint.folder]
        assert isinstance(model, DeepseekV41)
        return Roofline(model.config, model.weights)

    def close(self) -> None:
        """End the executors."""
        for rig in self._rigs.values():
            rig.close()
        self._end_engines()

    def learn(self, jobs: Sequence[Job]) -> dict[int, list[int]]:
        """The outputs without drafts, of which the drafts to come are made."""
        self._outputs = self.run(NONE, jobs, is_whole=True).outputs
        self.deal(0)
        return self._outputs

    def deal(self, number: int) -> None:
        """Other made-up drafts from now on: chance must not be the same in every run."""
        if self._acceptance is not None:
            vocab_size = self._checkpoint.config.vocab_size
            OracleSpeculation.truth = {
                seed: Fate.of(self._acceptance, seed + number * DEALT, ids, vocab_size)
                for seed, ids in self._outputs.items()
            }

    def run(self, policy: str, jobs: Sequence[Job], *, is_whole: bool = False) -> Run:
        """All jobs at once, until the first one ends, or all do."""
        rig = self._rig(policy)
        before, window = rig.core.stats(), Window(self._clock, ends_run=not is_whole)
        known = self._num_verified(policy)
        rig.run(list(enumerate(jobs)), len(jobs), window.look)
        stats = rig.core.stats()
        outputs = {i: unpack_ids(bytes(out.ids)).tolist() for i, out in rig.outputs.items()}
        return Run(
            tokens=window.tokens,
            seconds=window.seconds,
            verified=self._num_verified(policy) - known,
            accepted=_minus(stats.accepted_drafts, before.accepted_drafts),
            brought=sum(map(len, outputs.values())),
            outputs=outputs,
        )

    def record(self, jobs: Sequence[Job]) -> Acceptance:
        """What becomes of the model's own drafts."""
        self._speculation = RecordingSpeculation
        self.run(str(max(LENGTHS)), jobs, is_whole=True)
        found = self._engines[str(max(LENGTHS))].drafts_made
        assert isinstance(found, RecordingSpeculation)
        return found.recording.acceptance(self._checkpoint.name, len(jobs))

    def _num_verified(self, policy: str) -> int:
        """Drafts so far, whatever was planned."""
        found = self._engines[policy].drafts_made
        return found.verified if isinstance(found, CountingSpeculation) else 0

    def _make_engine(self, config: Config, policy: str) -> Engine:
        engine = SharedEngine(config, self._models, self._speculation)
        self._engines[policy] = engine
        return engine

    def _end_engines(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def _rig(self, policy: str) -> Rig:
        if policy not in self._rigs:
            length = {NONE: 0, ADAPTIVE: max(LENGTHS)}.get(policy)
            executor = ExecutorConfig(
                global_blocks=self.blocks[0],
                window_blocks=self.blocks[1],
                draft_tokens=int(policy) if length is None else length,
                draft_policy="adaptive" if policy == ADAPTIVE else "always",
                masks=False,
            )
            scheduler = SchedulerConfig(
                max_rows=self._rows,
                step_tokens=max(512, 8 * self._rows),
                max_model_len=self._max_len,
                prefix_cache=False,
                hang_s=600.0,
                deadline_s=3600.0,
            )
            folder = str(self._checkpoint.folder)
            mesh = MeshConfig(model=folder, log_level="error")
            config = Config(mesh=mesh, scheduler=scheduler, executor=executor)
            engine = self._make_engine(config, policy)
            self._rigs[policy] = Rig([engine], scheduler, model=folder, numerics="bf16")
        return self._rigs[policy]


def _minus(after: Sequence[int], before: Sequence[int]) -> list[int]:
    padded = [*before, *[0] * (len(after) - len(before))]
    return [a - b for a, b in zip(after, padded, strict=True)]


def random_jobs(config: ModelConfig, batch: int, tokens: int, temperature: float) -> list[Job]:
    """`batch` requests of random prompts; what ends them is their length."""
    draw = np.random.default_rng(7)
    sampling = SamplingParams(temperature=temperature)
    first = min(600, config.vocab_size // 2)
    return [
        _job(
            draw.integers(first, config.vocab_size, PROMPT_TOKENS).tolist(), index, tokens, sampling
        )
        for index in range(batch)
    ]


def held_out_jobs(folder: Path) -> list[Job]:
    """Prompts of the tasks that the tiny model is trained on, none of which it has seen."""
    greedy, stop_ids = SamplingParams(temperature=0.0), pack_ids([EOS])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    jobs: list[Job] = []
    for name, draw in TASKS.items():
        random = Random(f"bench spec {name}")
        for _ in range(EACH_TASK):
            first = draw(random).pieces()[0]  # up to where the assistant begins
            ids = tokenizer.encode(first.text, add_special_tokens=False).ids
            if len(ids) <= LONGEST_PROMPT:
                jobs.append(_job(ids, len(jobs), ANSWER_TOKENS, greedy, stop_ids))
    return jobs


def _job(
    ids: list[int], seed: int, tokens: int, sampling: SamplingParams, stop_ids: bytes = b""
) -> Job:
    return Job(
        "",
        Generate(
            rid=b"",
            attempt=0,
            reply_to="tokenizer-0",
            prompt_ids=pack_ids(ids),
            prompt_len=len(ids),
            sampling=sampling,
            seed=seed,
            max_tokens=tokens,
            stop_ids=stop_ids,
        ),
    )
