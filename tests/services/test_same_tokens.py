"""The real model under the real scheduler: what else runs never shows in a request's tokens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from bench.determinism import check
from bench.determinism.check import QUICK, run
from bench.determinism.faults import FAULTS
from bench.determinism.jobs import Job, make_jobs
from bench.determinism.outputs import Output
from bench.determinism.rig import Rig
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.wire.messages import Finished, FinishReason, SamplingParams
from deepmesh.wire.packed import pack_ids, unpack_ids
from services.executor.fake import FakeEngine
from services.executor.interface import Engine
from services.executor.runner import ModelEngine

MODEL = Path(__file__).parents[2] / "models" / "tiny"
GREEDY = SamplingParams(temperature=0.0)
Ask = Callable[..., list[Output]]


@pytest.fixture(scope="module")
def engine() -> ModelEngine:
    return ModelEngine(Config(mesh=MeshConfig(model=str(MODEL)), executor=ExecutorConfig()))


@contextmanager
def rig(engine: Engine, **scheduler: object) -> Iterator[Rig]:
    settings = {"max_rows": 64, "step_tokens": 384, "chunk_tokens": 256, "max_model_len": 512}
    config = SchedulerConfig(**{**settings, "hang_s": 600.0, "deadline_s": 3600.0, **scheduler})
    made = Rig([engine], config, model=str(MODEL), numerics="bf16")
    try:
        yield made
    finally:
        made.close()


def job(prompt: list[int], tokens: int, sampling: SamplingParams = GREEDY, **fields: object) -> Job:
    base = make_jobs(MODEL, 1, tokens, has_masks=False)[0].generate
    return Job(
        "test",
        replace(
            base,
            prompt_ids=pack_ids(prompt),
            prompt_len=len(prompt),
            sampling=sampling,
            **{"seed": 5, **fields},
        ),
    )


def ask(rig: Rig, *jobs: Job, in_flight: int = 64) -> list[Output]:
    found = rig.run(list(enumerate(jobs)), in_flight)
    return [found[index] for index in range(len(jobs))]


def long_prompt(length: int = 300) -> list[int]:
    return np.random.default_rng(0).integers(600, 4000, length).tolist()


def test_the_same_prompt_four_times_cold_then_cached(engine: ModelEngine) -> None:
    with rig(engine) as one:
        outputs = [ask(one, job(long_prompt(), 24))[0] for _ in range(4)]
        assert one.core.stats().cached_prompt_tokens >= 3 * 256
    cold = outputs[0]
    for output in outputs[1:]:
        assert (output.ids, output.logprobs, output.top) == (cold.ids, cold.logprobs, cold.top)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, top_p=0.9)])
def test_one_prompt_at_1_8_and_64_in_flight(engine: ModelEngine, sampling: SamplingParams) -> None:
    asked = job(long_prompt(150), 12, sampling)
    with rig(engine, prefix_cache=False) as one:
        alone = ask(one, asked)[0]
        for many in (8, 64):
            for output in ask(one, *[asked] * many):
                assert output.ids == alone.ids
                assert (output.logprobs, output.top) == (alone.logprobs, alone.top)


def test_temperature_0_and_1e_6_agree(engine: ModelEngine) -> None:
    with rig(engine) as one:
        cold, tiny = ask(
            one,
            job(long_prompt(40), 32),
            job(long_prompt(40), 32, SamplingParams(temperature=1e-6, top_p=0.3)),
        )
    assert (cold.ids, cold.logprobs) == (tiny.ids, tiny.logprobs)


def test_twenty_logprobs_with_a_narrow_nucleus_are_finite(engine: ModelEngine) -> None:
    sampling = SamplingParams(temperature=1.0, top_p=0.3)
    with rig(engine) as one:
        output = ask(one, job(long_prompt(40), 16, sampling, n_logprobs=20))[0]
    pairs = np.frombuffer(bytes(output.top), "<f4").reshape(16, 2, 20)
    assert np.isfinite(pairs[:, 1]).all()
    assert np.isfinite(np.frombuffer(bytes(output.logprobs), "<f4")).all()


def test_logprobs_of_a_prompt_are_those_of_the_output_it_repeats(engine: ModelEngine) -> None:
    """Echo with logprobs and top_k 1: the prompt is what greedy decoding gave before, and its
    log-probabilities have the same bits, cached prefix or not, in chunks or not."""
    first = long_prompt(200)
    with rig(engine) as one:
        before = ask(one, job(first, 60))[0]
        prompt = [*first, *unpack_ids(bytes(before.ids)).tolist()]
        echo = ask(
            one,
            job(prompt, 2, SamplingParams(temperature=1.0, top_k=1), n_prompt_logprobs=5),
            job(prompt, 2, n_prompt_logprobs=0),
            job(prompt, 2),
        )
    logprobs, top_ids, top_logprobs, ranks = echo[0].prompt
    assert len(logprobs) == 4 * (len(prompt) - 1)
    assert logprobs[-4 * 60 :] == bytes(before.logprobs)
    assert np.isfinite(np.frombuffer(top_logprobs, "<f4")).all()
    best = unpack_ids(top_ids).reshape(-1, 5)[-60:, 0]
    assert best.tolist() == prompt[-60:]  # each was the best one
    assert unpack_ids(ranks)[-60:].tolist() == [1] * 60
    assert echo[1].prompt == (logprobs, b"", b"", ranks)
    assert echo[2].prompt == (b"", b"", b"", b"")
    assert {bytes(output.ids) for output in echo} == {bytes(echo[0].ids)}


def test_the_fake_engine_brings_logprobs_of_a_prompt_too() -> None:
    fake = FakeEngine(Config(executor=ExecutorConfig(kind="fake")))
    with rig(fake) as one:
        output = ask(one, job(long_prompt(300), 2, n_prompt_logprobs=3))[0]
    logprobs, top_ids, top_logprobs, ranks = output.prompt
    assert [*map(len, (logprobs, top_ids, top_logprobs, ranks))] == [
        4 * 299,
        *[12 * 299] * 2,
        4 * 299,
    ]
    assert unpack_ids(top_ids).reshape(299, 3)[:, 0].tolist() == long_prompt(300)[1:]


def test_penalties_go_on_after_a_restart_as_if_nothing_had_happened(engine: ModelEngine) -> None:
    sampling = SamplingParams(temperature=0.7, frequency_penalty=0.8, repetition_penalty=1.3)
    asked = job(long_prompt(150), 40, sampling)
    with rig(engine) as one:
        wanted = ask(one, asked)[0]

        left = [7, 23]

        def lose(running: Rig) -> None:
            if left and running.outputs[0].num_tokens >= left[0]:
                left.pop(0)
                running.lose_executor(0)

        found = one.run([(0, asked)], 1, lose)[0]
    assert not left
    assert (found.ids, found.logprobs, found.top) == (wanted.ids, wanted.logprobs, wanted.top)


def test_stop_ids_wait_for_min_tokens_and_then_end_the_request(engine: ModelEngine) -> None:
    with rig(engine) as one:
        free = unpack_ids(bytes(ask(one, job(long_prompt(40), 20))[0].ids)).tolist()
        stops = {"stop_ids": pack_ids([free[3]])}
        early, late = ask(
            one,
            job(long_prompt(40), 20, **stops),
            job(long_prompt(40), 20, min_tokens=12, **stops),
        )
    at = free.index(free[3])
    assert unpack_ids(bytes(early.ids)).tolist() == free[: at + 1]
    assert isinstance(early.end, Finished)
    assert early.end.reason == FinishReason.STOP
    assert late.num_tokens >= 12
    assert free[3] not in unpack_ids(bytes(late.ids)).tolist()[:12]


@pytest.mark.timeout(400)  # half a minute on a machine that has nothing else to do
@pytest.mark.timeout(400)
def test_the_reduced_check_finds_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(model=MODEL, device="cpu", size=QUICK, with_mesh=False)
    cases = {case["group"]: case for case in found["cases"]}
    assert found["ok"], cases
    check.show(found)
    assert found["config"]["left_out"] == {}  # a GPU's engine leaves out what it cannot do yet
    assert "left out" not in capsys.readouterr().err
    assert {"in_flight_64", "preempted_at_every_position", "threads_2", "speculation"} <= {*cases}
    assert {"ranks_2", "ranks_4", "eplb_move_ranks_4", "speculation_ranks_2"} <= {*cases}
    for case in cases.values():
        assert case["comparisons"] >= QUICK[0]
        assert case["tokens"] == case["comparisons"] * QUICK[1]


def test_a_fault_on_a_device_that_cannot_have_it_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check.main(["--device", "cuda", "--break", "order", "--json"]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert "use --device cpu" in err


@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_catches_a_planted_fault(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run(model=MODEL, device="cpu", size=(12, 8), fault=fault)
    assert found["caught"]
    assert found["ok"]
    assert any(case["caught"] for case in found["cases"])
    check.show(found)
    assert f"planted fault {fault}: caught" in capsys.readouterr().err
