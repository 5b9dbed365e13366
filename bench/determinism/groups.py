"""The groups of the check: what is varied in each, while every request must stay the same."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from bench.determinism.engines import Kept, kept_engine
from bench.determinism.faults import FaultyEngine, seed_by_slot
from bench.determinism.jobs import Job
from bench.determinism.outputs import Output
from bench.determinism.rig import MakeStep, Rig
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.wire.messages import SubmitStep

Outputs = dict[int, Output]
DEPTHS: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
MAX_ROWS = 64
MAX_LEN = 512
MOST_LOSSES = 6
MAX_DRAFTS = 5
# Drafts that steps verify, one after the other; None: all there are; -1: nor are any made.
BUDGETS = (None, 3, 0, 11, -1, 1, 40)
# Experts change their ranks, layer by layer, all the time.
MOVES_OFTEN = {"experts_interval_s": 0.05, "experts_record_steps": 2, "experts_ridge_rows": 0}


@dataclass(frozen=True)
class Setting:
    """What the check runs on."""

    model: Path
    run_dir: Path
    jobs: Sequence[Job] = ()
    numerics: str = "bf16"
    fault: str = ""
    device: Literal["cpu", "cuda"] = "cpu"
    on_host: bool = False  # the engine of a GPU with kernels of any shape, and no GPU

    def config(self, *, threads: int = 1, ranks: int = 1, draft_tokens: int = 0) -> Config:
        """Of the executors."""
        return Config(
            mesh=MeshConfig(run_dir=str(self.run_dir), model=str(self.model), log_level="error"),
            scheduler=scheduler_config(),
            executor=ExecutorConfig(
                device=self.device,
                threads=threads,
                ranks=ranks,
                draft_tokens=draft_tokens,
                draft_policy="always",  # also where it does not pay
            ),
        )


def scheduler_config(depth: Literal[1, 2, 3] = 2, *, prefix_cache: bool = False) -> SchedulerConfig:
    """Small steps and chunks: prompts are cut, and share steps with decode rows."""
    return SchedulerConfig(
        depth=depth,
        max_rows=MAX_ROWS,
        step_tokens=384,
        chunk_tokens=256,
        max_model_len=MAX_LEN,
        prefix_cache=prefix_cache,
        hang_s=600.0,
        deadline_s=3600.0,  # however slow the machine is
    )


def _as_planned(step: SubmitStep) -> SubmitStep:
    return step


def vary_budget(step: SubmitStep) -> SubmitStep:
    """Another number of drafts in each step, the same on all ranks."""
    agreed, budget = step.descriptor, BUDGETS[step.group_step % len(BUDGETS)]
    if budget is None or not agreed.decode_rows:
        return step
    passes = agreed.n_draft_passes if budget >= 0 else 0
    rows = agreed.decode_rows
    capacity = min(rows + max(0, budget), rows * (1 + MAX_DRAFTS))
    return replace(
        step, descriptor=replace(agreed, n_draft_passes=passes, verify_capacity=capacity)
    )


class Groups:
    """Runs the jobs in each way. One engine serves all rigs but those that need their own."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._engines: list[Kept] = []
        self._engine = self._make_engine(setting.config())
        self._numbered = list(enumerate(setting.jobs))

    def close(self) -> None:
        """Give all engines back."""
        for engine in self._engines:
            engine.end()

    def all(self) -> dict[str, Callable[[], list[Outputs]]]:
        """By name, in the order in which they run. A group may run the jobs several times."""
        on_cpus = {
            "threads_2": self._two_threads,
            "ranks_2": lambda: self._on_ranks(2),
            "ranks_4": lambda: self._on_ranks(4),
            "eplb_move_ranks_2": lambda: self._with_moves(2),
            "eplb_move_ranks_4": lambda: self._with_moves(4),
            "speculation_ranks_2": self._speculation_on_two_ranks,
        }
        return {
            "alone": lambda: [self.alone()],
            "in_flight_8": lambda: [self._crowd(8)],
            "in_flight_64": lambda: [self._crowd(64)],
            "shuffled": self._shuffled,
            **{f"depth_{depth}": lambda d=depth: [self._run(16, depth=d)] for depth in DEPTHS},
            "cache_cold_and_warm": self._cold_and_warm,
            "preempted_at_every_position": self._preempted,
            "executor_restart": self._restarted,
            "masks_missed": self._late_masks,
            "speculation": self._speculation,
            "speculation_masks_missed": self._speculation_with_late_masks,
            **({} if self._setting.device == "cuda" else on_cpus),
        }

    def alone(self) -> Outputs:
        """One request at a time, on an engine that has nothing else to do."""
        return self._run(1)

    # ------------------------------------------------------------ groups

    def _crowd(self, in_flight: int) -> Outputs:
        """So many at once, the same jobs again and again where there are not as many."""
        count = len(self._numbered)
        copies = -(-in_flight // count)
        jobs = [(i + copy * count, job) for copy in range(copies) for i, job in self._numbered]
        return self._run(in_flight, jobs=jobs)

    def _shuffled(self) -> list[Outputs]:
        jobs = list(self._numbered)
        random.Random(5).shuffle(jobs)
        return [self._run(24, jobs=jobs)]

    def _cold_and_warm(self, engines: Sequence[Kept] | None = None) -> list[Outputs]:
        """The second time all prefixes are there, and what the first has generated."""
        with self._rig(scheduler_config(prefix_cache=True), engines) as rig:
            cold = rig.run(self._numbered, 16)
            warm = rig.run(self._numbered, 16)
            assert rig.core.stats().cached_prompt_tokens > 0, "nothing was served from the cache"
        return [cold, warm]

    def _preempted(self, engines: Sequence[Kept] | None = None) -> list[Outputs]:
        """Once with the prefix cache and once without; see `Preemption`."""
        runs: list[Outputs] = []
        for prefix_cache in (False, True):
            preempt = Preemption(self._setting.jobs)
            with self._rig(scheduler_config(1, prefix_cache=prefix_cache), engines) as rig:
                runs.append(rig.run(self._numbered, 32, preempt))
                assert rig.core.stats().preemptions > 0, "nobody was preempted"
            if not engines:  # drafts take requests past some positions
                preempt.check()
        return runs

    def _speculation(self) -> list[Outputs]:
        """Drafts verified with every token, or with as many as changes from step to step: alone,
        in crowds, at all depths, with hits and preemption."""
        engines = [self._make_engine(self._setting.config(draft_tokens=MAX_DRAFTS))]
        runs: list[Outputs] = []
        for depth, in_flight in zip(DEPTHS, (1, 16, 64), strict=True):
            on_step = vary_budget if depth == 2 else _as_planned
            with self._rig(scheduler_config(depth), engines, on_step) as rig:
                runs.append(rig.run(self._numbered, in_flight))
                _check_drafts(rig)
        return [*runs, *self._cold_and_warm(engines), *self._preempted(engines)]

    def _speculation_on_two_ranks(self) -> list[Outputs]:
        config = self._setting.config(ranks=2, draft_tokens=MAX_DRAFTS)
        engines = [self._make_engine(config) for _ in range(2)]
        with self._rig(scheduler_config(), engines, vary_budget) as rig:
            crowd = rig.run(self._numbered, 32)
            _check_drafts(rig)
        return [crowd, *self._cold_and_warm(engines), *self._preempted(engines)]

    def _speculation_with_late_masks(self) -> list[Outputs]:
        """Drafts under grammars whose masks come late: those behind drafts, and the first ones."""
        setting = self._setting
        config = setting.config(draft_tokens=MAX_DRAFTS)
        engine = kept_engine(config, late_masks=True, on_host=setting.on_host)
        self._engines.append(engine)
        with self._rig(scheduler_config(), [engine]) as rig:
            outputs = rig.run(self._numbered, 16)
            assert rig.core.stats().null_rows > 0, "no mask was late"
        return [outputs]

    def _restarted(self) -> list[Outputs]:
        """The executor dies in the middle, again and again, and takes all KV with it."""
        spare = iter([self._make_engine(self._setting.config())])  # loads its weights anew
        every = max(6, self._setting.jobs[0].generate.max_tokens // 3)
        losses = 0

        def lose(rig: Rig) -> None:
            nonlocal losses
            if rig.num_steps >= (losses + 1) * every and losses < MOST_LOSSES:
                losses += 1
                rig.lose_executor(0, next(spare, None))

        with self._rig(scheduler_config()) as rig:
            outputs = rig.run(self._numbered, 48, lose)
        assert losses, "the run ended before the executor was lost"
        return [outputs]

    def _late_masks(self) -> list[Outputs]:
        """Rows whose mask is late sample nothing; their last position is computed again."""
        setting = self._setting
        engine = kept_engine(setting.config(), late_masks=True, on_host=setting.on_host)
        self._engines.append(engine)
        with self._rig(scheduler_config(), [engine]) as rig:
            outputs = rig.run(self._numbered, 16)
            assert rig.core.stats().null_rows > 0, "no mask was late"
        return [outputs]

    def _two_threads(self) -> list[Outputs]:
        engine = self._make_engine(self._setting.config(threads=2))
        with self._rig(scheduler_config(), [engine]) as rig:
            return [rig.run(self._numbered, 16)]

    def _with_moves(self, ranks: int) -> list[Outputs]:
        """Experts change their ranks, layer by layer, while requests run."""
        config = self._setting.config(ranks=ranks)
        config = replace(
            config,
            scheduler=replace(config.scheduler, **MOVES_OFTEN),
            executor=replace(config.executor, redundant_experts=ranks),
        )
        engines = [self._make_engine(config) for _ in range(ranks)]
        with self._rig(config.scheduler, engines) as rig:
            outputs = rig.run(self._numbered, 32)
            experts = rig.core.stats().experts
            assert experts.moves > experts.placements > 0, "no expert was moved"
        return [outputs]

    def _on_ranks(self, ranks: int) -> list[Outputs]:
        """Experts spread over ranks, and requests, too."""
        config = self._setting.config(ranks=ranks)
        engines = [self._make_engine(config) for _ in range(ranks)]
        with self._rig(scheduler_config(), engines) as rig:
            return [rig.run(self._numbered, 32)]

    # ------------------------------------------------------------ inside

    def _run(
        self,
        in_flight: int,
        *,
        depth: Literal[1, 2, 3] = 2,
        jobs: list[tuple[int, Job]] | None = None,
    ) -> Outputs:
        with self._rig(scheduler_config(depth)) as rig:
            return rig.run(jobs or self._numbered, in_flight)

    @contextmanager
    def _rig(
        self,
        config: SchedulerConfig,
        engines: Sequence[Kept] | None = None,
        on_step: MakeStep = _as_planned,
    ) -> Iterator[Rig]:
        setting = self._setting
        rig = Rig(
            engines or [self._engine],
            config,
            model=str(setting.model),
            numerics=setting.numerics,
            on_step=seed_by_slot if setting.fault == "seed" else on_step,
        )
        try:
            yield rig
        finally:
            rig.close()

    def _make_engine(self, config: Config) -> Kept:
        fault, on_host = self._setting.fault, self._setting.on_host
        is_faulty = fault not in ("", "seed")
        engine = FaultyEngine(config, fault) if is_faulty else kept_engine(config, on_host=on_host)
        self._engines.append(engine)
        return engine


def _check_drafts(rig: Rig) -> None:
    verified, accepted = map(sum, rig.drafts)
    assert 0 < accepted < verified, f"{accepted} of {verified} drafts were right"


class Preemption:
    """Takes the blocks of requests away at chosen positions, when nothing of them is in flight."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        """The first request loses them behind each of its output tokens, the others behind one,
        each behind another; chunked prompts also between two chunks."""
        self._at: list[set[int]] = []
        for index, job in enumerate(jobs):
            last = job.generate.max_tokens - 1
            self._at.append(set(range(1, last + 1)) if index == 0 else {1 + index % last})
        self._wanted = {at for positions in self._at for at in positions}
        self._seen: set[int] = set()
        self._cut: set[int] = set()

    def __call__(self, rig: Rig) -> None:
        engine = rig.core.engine
        if engine is None:
            return
        table = engine.residency.table
        for request in list(rig.core.registry.live.values()):
            slot = request.slot
            if slot < 0 or table.inflight_rows[slot]:
                continue
            index = rig.index_of(request.generate.rid)
            output = int(table.confirmed[slot]) - request.prompt_len
            if output in self._at[index]:
                self._at[index].discard(output)
                self._seen.add(output)
            elif not output and table.confirmed_kv[slot] > 0 and index not in self._cut:
                self._cut.add(index)
            else:
                continue
            engine.watermark.preempt(request)

    def check(self) -> None:
        """Every position had its turn."""
        missed = sorted(self._wanted - self._seen)
        assert not missed, f"nobody was preempted behind output tokens {missed}"
        assert self._cut, "nobody was preempted within a prompt"
