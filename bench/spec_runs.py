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
    Fate,
    OracleSpeculation,
    RecordingSpeculation,
)
from bench.spec_roofline import Roofline
from bench.spec_window import Counts, Window
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
ZERO = "0"  # a fixed length: another engine without drafts
LENGTHS = (1, 2, 3, 4, 5)
# Steps of a run that are counted at most: so many of all its rows together, but never fewer.
WINDOW_ROW_STEPS, WINDOW_STEPS = 768, 12
WIDEST = 1 + max(LENGTHS)  # tokens that a step brings a request, at most
# Behind an output so near to its end drafts are cut, by a step earlier where one is in flight.
END_TOKENS = 2 * WIDEST
LEAST_TOKENS = 1 + WINDOW_STEPS * WIDEST + END_TOKENS  # that hold all counted steps of a row
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
    """One run of one policy, counted while all its requests decode; see `Window`."""

    counts: Counts
    outputs: dict[int, list[int]]  # of the whole run

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.counts.tokens / self.counts.seconds

    @property
    def verified(self) -> int:
        """Drafts."""
        return sum(self.counts.verified)

    @property
    def verifying(self) -> int:
        """Steps of rows, each of which brought a token and its drafts."""
        return self.counts.tokens - sum(self.counts.accepted)


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
        self._speculation = Speculation if acceptance is None else OracleSpeculation
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
        self._outputs = self._whole(NONE, jobs)
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

    def run(self, policy: str, jobs: Sequence[Job]) -> Run:
        """All jobs at once, until enough was counted.

        Raises:
            EmptyWindow: too little was.
        """
        rig, most_steps = self._rig(policy), max(WINDOW_STEPS, WINDOW_ROW_STEPS // len(jobs))
        longest = min(job.generate.max_tokens for job in jobs) - END_TOKENS
        window = Window(self._clock, longest=longest, most_steps=most_steps)
        rig.run(list(enumerate(jobs)), len(jobs), window.look)
        rig.settle()
        return Run(window.found(), _ids(rig))

    def record(self, jobs: Sequence[Job]) -> Acceptance:
        """What becomes of the model's own drafts."""
        self._speculation = RecordingSpeculation
        self._whole(str(max(LENGTHS)), jobs)
        found = self._engines[str(max(LENGTHS))].drafts_made
        assert isinstance(found, RecordingSpeculation)
        return found.recording.acceptance(self._checkpoint.name, len(jobs))

    def _whole(self, policy: str, jobs: Sequence[Job]) -> dict[int, list[int]]:
        """All outputs to their ends."""
        rig = self._rig(policy)
        rig.run(list(enumerate(jobs)), len(jobs))
        rig.settle()
        return _ids(rig)

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
                prefill_share=1.0,  # all prompts in one step: nothing is counted before the last
                hang_s=600.0,
                deadline_s=3600.0,
            )
            folder = str(self._checkpoint.folder)
            mesh = MeshConfig(model=folder, log_level="error")
            config = Config(mesh=mesh, scheduler=scheduler, executor=executor)
            engine = self._make_engine(config, policy)
            self._rigs[policy] = Rig([engine], scheduler, model=folder, numerics="bf16")
        return self._rigs[policy]


def _ids(rig: Rig) -> dict[int, list[int]]:
    return {index: unpack_ids(bytes(out.ids)).tolist() for index, out in rig.outputs.items()}


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
