"""Drafts in the steps of a device: the CPU's tokens and bits without drafts, in fewer steps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from bench.determinism.engines import Kept, KeptEngine, KeptGpuEngine
from bench.determinism.groups import BUDGETS, Preemption, vary_budget
from bench.determinism.jobs import Job, make_jobs
from bench.determinism.outputs import Output
from bench.determinism.rig import MakeStep, Rig
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.wire.messages import Load, SubmitStep
from deepmesh.wire.packed import pack_ids
from services.executor.capacity import verified_tokens
from services.executor.gpu.costs import measure_device_costs
from services.executor.gpu.engine import GpuEngine
from services.executor.gpu.group import DeviceGroup
from services.executor.gpu.model import DeviceModel, load_device_model
from services.executor.interface import OnProgress
from services.executor.stream import StreamExecutor
from tests.services.test_speculation import DRAFTS, MODEL, ends, grammar_jobs, same

on_each = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], scope="module"
)
ROWS = 16
CUT = 130  # tokens of a prompt: two blocks, and a chunk behind them


class AnyShape(KeptGpuEngine):
    """With the CPU's bits on a GPU, too."""

    def _read_model(
        self,
        path: Path,
        order: Load,
        on_progress: OnProgress,
        group: DeviceGroup | None,
        redundant: int,
    ) -> DeviceModel:
        drafts = self._config.executor.draft_tokens > 0
        return load_device_model(path, order.numerics, self.device, fast=False, drafts=drafts)


def config_of(draft_tokens: int, **executor: object) -> Config:
    settings = {"draft_policy": "always", "mask_wait_ms": 10_000.0, **executor}
    own = ExecutorConfig(draft_tokens=draft_tokens, **settings)
    # pools and graphs are made for as many rows as the rig has
    scheduler = SchedulerConfig(max_rows=ROWS, max_model_len=512)
    return Config(mesh=MeshConfig(model=str(MODEL)), scheduler=scheduler, executor=own)


def device_engine(device: str, draft_tokens: int, *, late_masks: bool = False) -> AnyShape:
    config = config_of(draft_tokens)
    return AnyShape(config, late_masks=late_masks, on_host=device == "cpu")


def rig_of(engine: Kept, on_step: MakeStep = lambda step: step, **scheduler: object) -> Rig:
    settings = {"max_rows": ROWS, "step_tokens": 384, "chunk_tokens": 64, "max_model_len": 512}
    config = SchedulerConfig(**{**settings, "hang_s": 600.0, "deadline_s": 3600.0, **scheduler})
    return Rig([engine], config, model=str(MODEL), numerics="bf16", on_step=on_step)


def jobs_of(count: int, tokens: int, *, has_masks: bool = False) -> list[Job]:
    """Of all kinds, with prompts cut to two blocks: a host is slow."""
    jobs = make_jobs(MODEL, count, tokens, has_masks=has_masks)
    return [replace_prompt(job, CUT) if job.generate.prompt_len > CUT else job for job in jobs]


def replace_prompt(job: Job, length: int) -> Job:
    asked = job.generate
    cut = replace(asked, prompt_ids=asked.prompt_ids[: 4 * length], prompt_len=length)
    return Job(job.kind, cut)


Hook = Callable[[Rig], None]


def run(
    engine: Kept,
    jobs: list[Job],
    hook: Hook = lambda rig: None,
    on_step: MakeStep = lambda step: step,
    **scheduler: object,
) -> tuple[list[Output], list[int], list[int]]:
    """Outputs, and drafts verified and accepted by place."""
    rig = rig_of(engine, on_step, **scheduler)
    try:
        found = rig.run(list(enumerate(jobs)), ROWS, hook)
        stats = rig.core.stats()
        return [found[i] for i in range(len(jobs))], stats.verified_drafts, stats.accepted_drafts
    finally:
        rig.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[KeptEngine]:
    """The CPU without drafts."""
    engine = KeptEngine(config_of(0))
    yield engine
    engine.end()


@pytest.fixture(scope="module")
def drafting(device: str) -> Iterator[AnyShape]:
    engine = device_engine(device, DRAFTS)
    yield engine
    engine.end()


def pays(verified: list[int], accepted: list[int]) -> bool:
    return 0 < sum(accepted) < sum(verified)


@on_each
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_and_bits_are_those_of_the_cpu_without_drafts(
    plain: KeptEngine, drafting: AnyShape, depth: int
) -> None:
    """Greedy and sampled, with penalties, biases, bans, log-probabilities and grammars."""
    jobs = jobs_of(16, 14, has_masks=True)
    wanted, *_ = run(plain, jobs)
    ours, verified, accepted = run(drafting, jobs, depth=depth)
    assert same(ours, wanted)
    assert ends(ours) == ends(wanted)
    assert pays(verified, accepted)


@on_each
def test_stops_and_limits_within_accepted_drafts(plain: KeptEngine, drafting: AnyShape) -> None:
    """Every length of output, and every token of it as a stop id, also as one of many."""
    base = make_jobs(MODEL, 2, 12, has_masks=False)[0].generate
    jobs = [Job("", replace(base, max_tokens=count)) for count in range(1, 13)]
    wanted, *_ = run(plain, jobs)
    longest = np.frombuffer(wanted[-1].ids, "<i4").tolist()
    others = [i for i in range(700, 800) if i not in longest]
    stops = [[token] for token in longest] + [[*others, token] for token in longest[:6]]
    jobs += [Job("", replace(base, stop_ids=pack_ids(ids))) for ids in stops]
    wanted, *_ = run(plain, jobs)
    ours, *_ = run(drafting, jobs)
    assert same(ours, wanted)
    assert ends(ours) == ends(wanted)


@on_each
def test_grammars_hold_in_accepted_runs(plain: KeptEngine, drafting: AnyShape) -> None:
    jobs = [*grammar_jobs()[::3], *jobs_of(8, 12, has_masks=True)]
    wanted, *_ = run(plain, jobs)
    ours, verified, accepted = run(drafting, jobs)
    assert same(ours, wanted)
    assert ends(ours) == ends(wanted)
    assert pays(verified, accepted)


@on_each
def test_rows_under_grammars_accept_drafts(drafting: AnyShape) -> None:
    _, verified, accepted = run(drafting, grammar_jobs()[::4])
    assert pays(verified, accepted)


@on_each
def test_masks_that_are_late_cost_drafts_and_no_token(plain: KeptEngine, device: str) -> None:
    jobs = jobs_of(8, 8, has_masks=True)
    wanted, *_ = run(plain, jobs)
    engine = device_engine(device, DRAFTS, late_masks=True)
    try:
        ours, *_ = run(engine, jobs)
    finally:
        engine.end()
    assert same(ours, wanted)


@on_each
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preempted_requests_go_on_with_cold_drafts(
    plain: KeptEngine, drafting: AnyShape, prefix_cache: bool
) -> None:
    jobs = jobs_of(8, 10, has_masks=True)
    wanted, *_ = run(plain, jobs)
    preempt = Preemption(jobs)
    ours, verified, accepted = run(drafting, jobs, preempt, depth=1, prefix_cache=prefix_cache)
    assert same(ours, wanted)
    assert pays(verified, accepted)


@on_each
def test_prefixes_from_the_cache_have_drafts_behind_them(
    plain: KeptEngine, drafting: AnyShape
) -> None:
    jobs = jobs_of(8, 10)
    wanted, *_ = run(plain, jobs)
    rig = rig_of(drafting, prefix_cache=True)
    try:
        runs = [rig.run(list(enumerate(jobs)), ROWS) for _ in range(2)]
        stats = rig.core.stats()
    finally:
        rig.close()
    assert stats.cached_prompt_tokens > 0
    assert all(same([found[i] for i in range(len(jobs))], wanted) for found in runs)
    assert pays(stats.verified_drafts, stats.accepted_drafts)


@on_each
def test_an_executor_that_is_lost_takes_its_drafts_along(
    plain: KeptEngine, drafting: AnyShape
) -> None:
    jobs = jobs_of(8, 14)
    wanted, *_ = run(plain, jobs)
    losses = 0

    def lose(rig: Rig) -> None:
        nonlocal losses
        if rig.num_steps >= 4 * (losses + 1) and losses < 2:
            losses += 1
            rig.lose_executor(0)

    ours, verified, accepted = run(drafting, jobs, lose)
    assert losses == 2
    assert same(ours, wanted)
    assert pays(verified, accepted)


def capped(spare: int) -> MakeStep:
    """Of all steps' drafts so many are verified."""

    def cap(step: SubmitStep) -> SubmitStep:
        agreed = step.descriptor
        rows = step.rows and agreed.decode_rows
        capacity = rows + spare if rows else 0
        return replace(step, descriptor=replace(agreed, verify_capacity=capacity))

    return cap


@on_each
@pytest.mark.parametrize("spare", [0, 3, 11])
def test_a_budget_goes_to_the_drafts_that_the_cpu_gives_it_to(device: str, spare: int) -> None:
    """The same drafts, confidences and calibration, one step after the other."""
    engines = KeptEngine(config_of(DRAFTS)), device_engine(device, DRAFTS)
    jobs = jobs_of(8, 16)
    on_step = capped(spare)
    wanted, ours = (run(engine, jobs, on_step=on_step, depth=1) for engine in engines)
    for engine in engines:
        engine.end()
    assert same(ours[0], wanted[0])
    assert ours[1:] == wanted[1:]
    assert (sum(ours[1]) == 0) == (spare == 0)


@on_each
def test_budgets_that_change_from_step_to_step_change_no_token(
    plain: KeptEngine, drafting: AnyShape
) -> None:
    """Nor do steps that make no drafts, between others that verify some."""
    jobs = jobs_of(8, 16)
    wanted, *_ = run(plain, jobs)
    seen: set[tuple[int, int]] = set()

    def vary(step: SubmitStep) -> SubmitStep:
        varied = vary_budget(step)
        seen.add((varied.descriptor.verify_capacity, varied.descriptor.n_draft_passes))
        return varied

    ours, verified, accepted = run(drafting, jobs, on_step=vary)
    assert same(ours, wanted)
    assert pays(verified, accepted)
    assert len(seen) >= len(BUDGETS)


def test_what_drafts_cost_is_measured_as_steps_are_launched() -> None:
    """Every tier of verified tokens, and draft passes apart from the steps that they end."""
    config = config_of(DRAFTS)
    engine = GpuEngine(config, device="cpu")
    executor = StreamExecutor(engine)
    try:
        capacity = executor.load(Load(1, 0, 1, str(MODEL), "bf16"))
        costs = measure_device_costs(engine.launch, capacity, max_rows=ROWS, with_drafts=True)
        plain = measure_device_costs(engine.launch, capacity, max_rows=ROWS)
    finally:
        assert executor.close()
    tokens, times = zip(*costs.verify, strict=True)
    assert tokens[:4] == (1, 2, 3, 4)
    assert tokens[-1] == verified_tokens(ROWS, DRAFTS) == ROWS * (1 + DRAFTS)
    assert list(times) == sorted(times)
    assert times[0] > 0
    assert costs.draft_base_ns + costs.draft_row_ns > 0
    assert plain.verify == []


@pytest.mark.gpu
def test_nothing_waits_for_the_device_while_drafts_are_made_and_verified() -> None:
    engine = KeptGpuEngine(config_of(DRAFTS))
    jobs = make_jobs(MODEL, 8, 20, has_masks=False)
    try:
        run(engine, jobs)
        rig = rig_of(engine)
        rig.run(list(enumerate(jobs[:1])), ROWS)  # loads, which waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            rig.run(list(enumerate(jobs)), ROWS)
            assert pays(rig.core.stats().verified_drafts, rig.core.stats().accepted_drafts)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            rig.close()
    finally:
        engine.end()


@pytest.mark.gpu
def test_kernels_for_hopper_give_the_same_text_with_drafts() -> None:
    jobs = make_jobs(MODEL, 24, 20, has_masks=True)
    engine = KeptGpuEngine(config_of(0))
    wanted, *_ = run(engine, jobs)
    engine.end()
    engine = KeptGpuEngine(config_of(DRAFTS))
    try:
        for depth in (1, 2, 3):
            ours, verified, accepted = run(engine, jobs, depth=depth)
            assert same(ours, wanted)
            assert pays(verified, accepted)
    finally:
        engine.end()


def test_a_group_of_devices_refuses_drafts_by_the_name_of_the_key() -> None:
    engine = GpuEngine(config_of(2), device="cpu")
    engine._group = object.__new__(DeviceGroup)
    assert engine._no_drafts() == "a group of devices cannot draft"
    engine._group = None


def test_rejection_is_refused_by_the_name_of_the_key() -> None:
    engine = GpuEngine(config_of(2, draft_acceptance="rejection"), device="cpu")
    try:
        with pytest.raises(ValueError, match=r'draft_tokens: draft_acceptance "rejection" needs'):
            engine.load(Load(1, 0, 1, str(MODEL), "bf16"), lambda stage, done, total: None)
    finally:
        engine.close()
