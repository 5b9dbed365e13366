"""Drafts in the executor's step: the same tokens in fewer steps, whatever the drafts are worth."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from bench.determinism.engines import KeptEngine
from bench.determinism.jobs import Job, make_jobs
from bench.determinism.outputs import Output
from bench.determinism.rig import Rig
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.grammars import make_grammar
from deepmesh.wire.messages import Failed, SamplingParams
from deepmesh.wire.packed import pack_ids
from services.executor.interface import LiveRows
from services.executor.speculation import PAIR, best_drafts, cut_pairs, scratch_blocks
from tests.services.tokenizer_harness import TOKENIZER

MODEL = Path(__file__).parents[2] / "models" / "tiny"
DRAFTS = 5
THINK_END = TOKENIZER.token_to_id("</think>") or 0
SCHEMA = (
    '{"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}, '
    '"days": {"type": "integer"}}, "required": ["city", "days"], "additionalProperties": false}'
)
STOP = pack_ids([1])


def engine_of(draft_tokens: int, **executor: object) -> KeptEngine:
    settings = {"draft_policy": "always", "mask_wait_ms": 10_000.0, **executor}
    config = ExecutorConfig(draft_tokens=draft_tokens, **settings)
    return KeptEngine(Config(mesh=MeshConfig(model=str(MODEL)), executor=config))


@pytest.fixture(scope="module")
def plain() -> Iterator[KeptEngine]:
    engine = engine_of(0)
    yield engine
    engine.end()


@pytest.fixture(scope="module")
def drafting() -> Iterator[KeptEngine]:
    engine = engine_of(DRAFTS)
    yield engine
    engine.end()


@pytest.fixture
def rig(drafting: KeptEngine) -> Iterator[Rig]:
    made = rig_of(drafting)
    yield made
    made.close()


def rig_of(engine: KeptEngine, **scheduler: object) -> Rig:
    settings = {"max_rows": 32, "step_tokens": 384, "chunk_tokens": 256, "max_model_len": 512}
    config = SchedulerConfig(**{**settings, "hang_s": 600.0, "deadline_s": 3600.0, **scheduler})
    return Rig([engine], config, model=str(MODEL), numerics="bf16")


def outputs_of(rig: Rig, jobs: list[Job]) -> list[Output]:
    found = rig.run(list(enumerate(jobs)), 64)
    return [found[index] for index in range(len(jobs))]


def same(ours: list[Output], wanted: list[Output]) -> bool:
    return [(o.ids, o.logprobs, o.top) for o in ours] == [
        (o.ids, o.logprobs, o.top) for o in wanted
    ]


def test_tokens_and_bits_are_those_without_drafts(plain: KeptEngine, rig: Rig) -> None:
    jobs = make_jobs(MODEL, 24, 20, has_masks=True)
    without = rig_of(plain)
    try:
        wanted = outputs_of(without, jobs)
        steps = without.num_steps
    finally:
        without.close()
    assert same(outputs_of(rig, jobs), wanted)
    stats = rig.core.stats()
    assert 0 < sum(stats.accepted_drafts) < sum(stats.verified_drafts)
    assert rig.num_steps < steps


def test_stops_and_limits_within_accepted_drafts(plain: KeptEngine, rig: Rig) -> None:
    """Every length of output, and every token of it as a stop id."""
    base = make_jobs(MODEL, 2, 12, has_masks=False)
    jobs = [Job("", replace(base[0].generate, max_tokens=count)) for count in range(1, 13)]
    without = rig_of(plain)
    try:
        wanted = outputs_of(without, jobs)
        longest = np.frombuffer(wanted[-1].ids, "<i4").tolist()
        stopped = [
            Job("", replace(base[0].generate, stop_ids=pack_ids([token]))) for token in longest
        ]
        wanted_stopped = outputs_of(without, stopped)
    finally:
        without.close()
    assert same(outputs_of(rig, jobs), wanted)
    assert same(outputs_of(rig, stopped), wanted_stopped)


def grammar_jobs() -> list[Job]:
    """Forms that end within a run, at its end, and with the last token that fits."""
    base = [job.generate for job in make_jobs(MODEL, 24, 40, has_masks=False)]
    forms = [
        make_grammar("regex", "(ab)+c"),
        make_grammar("regex", "[0-9]{3}"),
        make_grammar("regex", "The answer is [0-9]+\\."),
        make_grammar("json_schema", SCHEMA),
        make_grammar("regex", r"(Yes|No), (it is|they are)( not)?\."),
        make_grammar("regex", "[a-z]+", pack_ids([THINK_END])),
    ]
    jobs: list[Job] = []
    for form in forms:
        for index in (0, 1, 4, 5, 6):
            lengths = (40, 3, 4, 5, 6, 7) if index == 0 else (40,)
            jobs += [
                Job("", replace(base[index], grammar=form, stop_ids=STOP, max_tokens=length))
                for length in lengths
            ]
    return jobs


def ends(outputs: list[Output]) -> list[object]:
    return [getattr(o.end, "reason", None) for o in outputs]


def test_grammars_hold_in_accepted_runs(plain: KeptEngine, rig: Rig) -> None:
    """Tokens, bits and reasons to end, beside rows without a grammar."""
    jobs = [*grammar_jobs(), *make_jobs(MODEL, 8, 20, has_masks=True)]
    without = rig_of(plain)
    try:
        wanted = outputs_of(without, jobs)
    finally:
        without.close()
    ours = outputs_of(rig, jobs)
    assert same(ours, wanted)
    assert ends(ours) == ends(wanted)
    assert None not in ends(ours), [o.end for o in ours if isinstance(o.end, Failed)]


def test_rows_under_grammars_accept_drafts(rig: Rig) -> None:
    outputs_of(rig, grammar_jobs())
    stats = rig.core.stats()
    assert 0 < sum(stats.accepted_drafts) < sum(stats.verified_drafts)


def test_rejection_keeps_greedy_answers_and_changes_sampled_ones(plain: KeptEngine) -> None:
    """And what is drawn keeps to stops, limits, masks and bans."""
    engine = engine_of(DRAFTS, draft_acceptance="rejection")
    jobs = [*make_jobs(MODEL, 8, 16, has_masks=True), *grammar_jobs()[::6]]
    without, rig = rig_of(plain), rig_of(engine)
    try:
        wanted, ours = outputs_of(without, jobs), outputs_of(rig, jobs)
        stats = rig.core.stats()
    finally:
        without.close()
        rig.close()
        engine.end()
    greedy = [job.generate.sampling.temperature == 0 for job in jobs]
    assert same(
        [o for o, is_greedy in zip(ours, greedy, strict=True) if is_greedy],
        [o for o, is_greedy in zip(wanted, greedy, strict=True) if is_greedy],
    )
    assert any(a.ids != b.ids for a, b in zip(ours, wanted, strict=True))
    assert None not in ends(ours)
    assert 0 < sum(stats.accepted_drafts) < sum(stats.verified_drafts)


def test_answers_of_the_model_that_ships_need_half_the_steps(rig: Rig) -> None:
    """Tokens a verify step, greedy: at least 2."""
    base = make_jobs(MODEL, 36, 24, has_masks=False)
    jobs = [
        Job("", replace(job.generate, sampling=SamplingParams(temperature=0.0), stop_ids=STOP))
        for job in base
        if job.kind == "greedy, tools"
    ]
    outputs = outputs_of(rig, jobs)
    tokens = sum(len(output.ids) // 4 - 1 for output in outputs)  # the first comes with the prompt
    accepted = sum(rig.core.stats().accepted_drafts)
    assert tokens / (tokens - accepted) >= 2.0


survivals = st.lists(st.floats(0, 1, width=32), min_size=0, max_size=5)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(survivals, st.integers(0, 5), st.integers(1, 1 << 40)), max_size=12),
    st.integers(0, 60),
)
def test_the_likeliest_drafts_are_a_prefix_of_each_row(
    rows: list[tuple[list[float], int, int]], spare: int
) -> None:
    if not rows:
        return
    survival = np.zeros((len(rows), DRAFTS), np.float32)
    for row, (values, _, _) in zip(survival, rows, strict=True):
        row[: len(values)] = sorted(values, reverse=True)
    most = np.array([min(len(values), limit) for values, limit, _ in rows])
    widths = best_drafts(survival, most, spare, np.array([rid for *_, rid in rows], np.uint64))
    assert (widths <= most).all()
    assert widths.sum() == min(spare, most.sum())
    taken = [survival[i, p] for i in range(len(rows)) for p in range(widths[i])]
    left = [survival[i, p] for i in range(len(rows)) for p in range(widths[i], most[i])]
    assert not taken or not left or min(taken) >= max(left)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 1 + DRAFTS), st.booleans()), min_size=1)
)
def test_rows_are_cut_into_pairs_that_leave_their_state_in_places_of_their_own(
    rows: list[tuple[int, int, bool]],
) -> None:
    starts, counts, drafted = (np.array(column) for column in zip(*rows, strict=True))
    live = LiveRows(
        rows=np.arange(len(rows)),
        slots=np.arange(len(rows)),
        starts=starts,
        counts=counts,
        samples=np.ones(len(rows), bool),
        drafted=drafted,
        masked=np.zeros(len(rows), bool),
    )
    parts, owners, place = cut_pairs(live)
    for i, (start, count, is_drafted) in enumerate(rows):
        of = np.flatnonzero(owners == i)
        covered = [p for j in of for p in range(parts.starts[j], parts.starts[j] + parts.counts[j])]
        assert covered == list(range(start, start + count))
        assert place[of].tolist() == list(range(len(of)))
        if not is_drafted:
            assert len(of) == 1
            continue
        assert len(of) - 1 <= scratch_blocks(DRAFTS)
        assert all(parts.starts[j] % PAIR == 0 and parts.counts[j] <= PAIR for j in of[1:])
