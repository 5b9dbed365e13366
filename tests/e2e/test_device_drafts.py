"""A mesh whose executor runs the steps of a device, with drafts: the CPU's answers without them."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.e2e.conftest import CONFIG, RunningMesh, running
from tests.e2e.test_drafts import COPY, FORM, same

Json = dict[str, Any]
pytestmark = pytest.mark.timeout(300)
SMALL = CONFIG.replace("[scheduler]", "[scheduler]\nmax_model_len = 192\nmax_rows = 8")
DRAFTS = SMALL + '[executor]\ndraft_tokens = 5\ndraft_policy = "always"\ndevice = "{device}"\n'
# kernels made for Hopper have other bits than the CPU's: what they draft is compared elsewhere
ENGINE = ("system_fingerprint",)  # names the kind of arithmetic
ASKED: list[Json] = [
    {**COPY, "temperature": 0, "max_completion_tokens": 24, "logprobs": True, "top_logprobs": 2},
    {**COPY, "temperature": 0.9, "seed": 5, "max_completion_tokens": 16},
    {**COPY, "temperature": 0, "max_completion_tokens": 24, "response_format": FORM},
    {"prompt": "1 2 3 4 5 6 7 8 9", "temperature": 0, "max_tokens": 12, "stop": ["4 1"]},
]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    yield from running(SMALL, tmp_path_factory.mktemp("o"))


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    yield from running(DRAFTS.format(device="host"), tmp_path_factory.mktemp("d"))


@pytest.mark.long
def test_answers_of_a_device_that_drafts_are_those_of_the_cpu(
    plain: RunningMesh, drafting: RunningMesh
) -> None:
    same(plain, drafting, ASKED, but=ENGINE)
    same(plain, drafting, ASKED[:2], but=ENGINE)  # prefixes are in the cache by now


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here")
def test_a_gpu_answers_the_same_with_drafts_and_without(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    meshes = [
        running(text, tmp_path_factory.mktemp(name))
        for name, text in (
            ("p", SMALL + '[executor]\ndevice = "cuda"\n'),
            ("q", DRAFTS.format(device="cuda")),
        )
    ]
    try:
        same(next(meshes[0]), next(meshes[1]), ASKED)
    finally:
        for mesh in meshes:
            next(mesh, None)
