"""The benchmarks of a GPU, run on a host in its place: what they count, not how long it takes."""

import argparse
from pathlib import Path
from types import ModuleType

import pytest
import torch

from bench import answers
from bench.accounting import weight_bytes
from bench.gpu import decode, prefill
from bench.gpu.model_slice import ModelSlice, mean_touched
from bench.gpu.options import wants_gpu
from bench.gpu.peer_runs import PeerRuns
from bench.gpu.peers.job import Job
from bench.gpu.peers.mxfp4 import values
from bench.gpu.popularity import wanted_shares
from bench.gpu.routes_seen import routes_seen
from bench.gpu.routing import routings, touched
from services.executor.tensor_specs import tensor_specs

torch.set_num_threads(1)


def arguments(**values: object) -> argparse.Namespace:
    given = {"device": "cpu", "preset": "v41-nano", "layers": 4, "zipf": [0.0, 2.0], "ranks": 1}
    return argparse.Namespace(**given | values)


def test_decode_counts_the_experts_that_its_routers_chose() -> None:
    found = decode.run(arguments(batch=[1, 8], context=[150]))
    cases = found["cases"]
    assert isinstance(cases, list)
    by_case = {(case["batch"], case["zipf"]): case for case in cases if isinstance(case, dict)}
    assert set(by_case) == {(1, 0.0), (8, 0.0), (1, 2.0), (8, 2.0)}
    assert by_case[1, 0.0]["experts_touched"] == 2.0
    even, skewed = (by_case[8, zipf]["experts_touched"] for zipf in (0.0, 2.0))
    assert isinstance(even, float)
    assert isinstance(skewed, float)
    assert 2 < skewed < even <= 8
    assert found["ok"]


def test_a_step_of_every_expert_reads_every_weight_once() -> None:
    part = ModelSlice("v41-nano", 4, rows=32, context=100, tokens=0, device="cpu")
    step = part.touched(part.program(32, graph=False))
    assert 7 < mean_touched([step]) <= 8
    assert len(set(step.positions)) == 1
    tables = [spec for spec in tensor_specs(part.config) if ".embed." in spec.name]
    stored = sum(spec.num_bytes for spec in tensor_specs(part.config))
    least = stored - sum(spec.num_bytes for spec in tables)
    assert least * 0.85 < weight_bytes(part.config, step) < stored


def test_prefill_counts_its_products() -> None:
    asked = arguments(tokens=[70])
    asked.zipf = [0.0]
    found = prefill.run(asked)
    cases = found["cases"]
    assert isinstance(cases, list)
    for case in cases:
        assert isinstance(case, dict)
        assert case["tokens"] == 70
        assert case["finite"]
        assert case["share_of_peak"] is None  # there is no rate of a GPU here
        assert isinstance(case["flops"], int)
        assert case["flops"] > 2 * 70 * 100_000


@pytest.mark.parametrize(
    ("bench", "sizes"), [(decode, {"batch": [4]}), (prefill, {"tokens": [64]})]
)
def test_one_device_and_a_group_of_processes(
    bench: ModuleType, sizes: dict[str, list[int]]
) -> None:
    asked = arguments(context=[70], limit=200.0, **sizes | {"layers": 2, "ranks": 2})
    found = bench.run(asked)
    assert found["ok"], found["config"]
    cases = found["cases"]
    assert len(cases) == 4
    assert {(case["ranks"], case["rank"]) for case in cases} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    (both,) = found["config"]["ratios"]
    assert both["ratio"] > 0
    if "batch" in sizes:
        alone, held = ([c["experts_touched"] for c in cases if c["ranks"] == n] for n in (1, 2))
        assert all(share < alone[0] for share in held)
        assert sum(held) >= alone[0] / 2


def test_routings_are_alike_in_every_process_and_skewed_as_asked() -> None:
    again = [routings(64, 384, 6, zipf=zipf) for zipf in (0.0, 0.0, 1.0)]
    assert all(torch.equal(a, b) for a, b in zip(again[0], again[1], strict=True))
    assert 238 < touched(again[0]) < 250  # 384 (1 - (1 - 6/384)^64) = 243.8
    assert touched(again[2]) < 0.75 * touched(again[0])
    for ids in again[2]:
        assert (ids.diff(dim=1) > 0).all()


def test_mxfp4_values_are_those_of_the_format() -> None:
    codes = torch.arange(16, dtype=torch.uint8).view(1, 16).repeat(1, 1) * 17  # both nibbles alike
    scales = torch.tensor([[128]], dtype=torch.uint8)
    found = values(codes, scales)[0]
    assert found[:8].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[-2:].tolist() == [-12, -12]


def test_a_peer_that_does_not_load_is_reported_by_name() -> None:
    runs = PeerRuns(["humming"], 60.0)
    assert runs.ask(Job("experts", [1])) == []
    state = runs.state["humming"]
    assert isinstance(state, dict)
    assert "No module named 'humming'" in str(state["error"])
    assert not runs.all_ran


def test_the_commands_take_a_device() -> None:
    assert wants_gpu(["--json", "--device", "cuda", "--batch", "1"])
    assert not wants_gpu(["--json"])
    assert not wants_gpu(["--device", "cpu", "--rows", "3"])


def test_held_out_tasks_are_answered_as_the_record_of_the_checkpoint_says(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "answers.json"
    asked = argparse.Namespace(device="cpu", model=answers.TINY, documents=1, cpu_answers=kept)
    found = answers.run(asked)
    cases = found["cases"]
    assert isinstance(cases, list)
    by_task = {case["task"]: case for case in cases if isinstance(case, dict)}
    assert set(by_task) == {*answers.DRAWS, "all"}
    share = by_task["all"]["right"]
    assert isinstance(share, float)
    assert share > 0.8
    assert found["ok"]
    assert answers.read(kept, answers.questions(answers.TINY, 1)).count(True) == round(
        share * int(by_task["all"]["answers"])
    )


def test_questions_are_the_same_every_time() -> None:
    first, again = (answers.questions(answers.TINY, 2) for _ in range(2))
    assert first == again
    assert {one.task for one in first} == set(answers.DRAWS)
    assert max(len(one.prompt) + len(one.answer) for one in first) <= answers.MAX_LEN


def test_routers_send_tokens_where_the_law_says() -> None:
    part = ModelSlice("v41-nano", 2, rows=32, context=70, tokens=0, device="cpu")
    config = part.config
    shares = wanted_shares(config.n_routed_experts, config.num_experts_per_tok, 1.0)
    assert float(shares.sum()) == pytest.approx(config.num_experts_per_tok, rel=1e-3)
    assert (shares.diff() <= 0).all()
    assert float(shares.max()) <= 1
    part.make_popular(1.0)
    program = part.program(32, graph=False)
    count = torch.zeros(config.n_routed_experts)
    for _ in range(6):
        fresh = torch.randint(20, config.vocab_size, (32,))
        program.step.ids.copy_(fresh.int())
        with routes_seen() as seen:
            program.run()
        count += torch.bincount(seen[0].flatten(), minlength=len(count))
    found = (count / count.sum()).sort(descending=True).values
    assert float((found - shares / shares.sum()).abs().max()) < 0.06
