"""A model whose numbers are no numbers for some inputs: that ends those requests, and no other."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from bench.determinism.jobs import Job, make_jobs
from bench.determinism.outputs import Output
from bench.determinism.rig import Rig
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.wire.messages import ErrorCode, Failed, Finished, SamplingParams
from deepmesh.wire.packed import pack_ids
from services.executor.runner import ModelEngine

MODEL = Path(__file__).parents[2] / "models" / "tiny"
SPOILED = 3000  # the embedding of this id is not finite
GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.8, top_p=0.9)


def spoiled_copy(folder: Path, value: float) -> Path:
    """The model that ships, with one embedding overwritten."""
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        shutil.copy(MODEL / name, folder / name)
    weights = load_file(MODEL / "model.safetensors")
    weights["embed.weight"][SPOILED] = value
    save_file(weights, folder / "model.safetensors")
    return folder


@contextmanager
def rig(model: Path) -> Iterator[Rig]:
    """One executor with few blocks: those of one request are soon those of another."""
    executor = ExecutorConfig(global_blocks=24, window_blocks=48)
    engine = ModelEngine(Config(mesh=MeshConfig(model=str(model)), executor=executor))
    config = SchedulerConfig(
        max_rows=16,
        step_tokens=384,
        chunk_tokens=256,
        max_model_len=512,
        prefix_cache=False,
        hang_s=600.0,
        deadline_s=3600.0,
    )
    made = Rig([engine], config, model=str(model), numerics="bf16")
    try:
        yield made
    finally:
        made.close()


def job(ids: list[int], index: int, tokens: int = 16) -> Job:
    base = make_jobs(MODEL, 1, tokens, has_masks=False)[0].generate
    # an output that held the spoiled id would end its request, too
    sampling = replace(WARM if index % 2 else GREEDY, bad_words=[pack_ids([SPOILED])])
    asked = replace(
        base,
        prompt_ids=pack_ids(ids),
        prompt_len=len(ids),
        sampling=sampling,
        seed=index,
        n_prompt_logprobs=2 if index % 3 == 0 else -1,
    )
    return Job(f"request {index}", asked)


def prompt(index: int) -> list[int]:
    draw = np.random.default_rng(index)
    length = (5, 40, 130, 300)[index % 4]
    return draw.integers(600, 2900, length).tolist()


def poisoned(index: int) -> list[int]:
    """The spoiled id first, last, or somewhere in a chunk."""
    ids = prompt(index)
    ids[(0, -1, len(ids) // 2)[index % 3]] = SPOILED
    return ids


def bits(output: Output) -> tuple[object, ...]:
    return bytes(output.ids), bytes(output.logprobs), bytes(output.top), output.prompt


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_requests_beside_and_after_it_keep_their_bits(tmp_path: Path, value: float) -> None:
    jobs = [job(prompt(index), index) for index in range(8)]
    bad = [job(poisoned(index), index) for index in range(8)]
    with rig(MODEL) as clean:
        wanted = clean.run(list(enumerate(jobs)), 1)
    mixed = [
        pair
        for i, (a, b) in enumerate(zip(bad, jobs, strict=True))
        for pair in ((100 + i, a), (i, b))
    ]
    with rig(spoiled_copy(tmp_path, value)) as one:
        found = one.run(mixed, 16)
        after = one.run(list(enumerate(jobs)), 4)
    for index in range(len(jobs)):
        end = found[100 + index].end
        assert isinstance(end, Failed), (index, found[100 + index])
        assert end.code is ErrorCode.ENGINE_ERROR
        assert "not finite" in end.detail
        assert found[100 + index].num_tokens == 0
        for run in (found, after):
            assert isinstance(run[index].end, Finished)
            assert bits(run[index]) == bits(wanted[index]), index
