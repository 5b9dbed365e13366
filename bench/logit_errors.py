"""How far logits of a device's forwards are from what they should be."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from services.executor.batch import BatchRow, StepBatch
from services.executor.gpu.model import DeviceModel, load_device_model
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.weights import load_model

FIXTURE = Path(__file__).parents[1] / "tests" / "model" / "tiny-v41"


def fixture_error(device: str) -> float:
    """Relative error of the fixture's logits in fp32, against the independent implementation."""
    stored = load_file(FIXTURE / "expected.safetensors")
    wanted = stored["fp32.logits"].flatten(0, -2)
    found = logits_of(load_device_model(FIXTURE, "fp32", device), stored["input_ids"][0].tolist())
    return relative(found, wanted)


def bf16_errors(
    model: Path, device: str, prompts: Sequence[list[int]], *, on_cpu: bool = True
) -> tuple[float, float]:
    """Relative errors of bf16 logits on the device and on the CPU, against the CPU's in fp32.

    Args:
        on_cpu: run the CPU's kernels; else those of a device that have its bits for any shape.
    """

    def load(numerics: str) -> DeviceModel | DeepseekV41:
        if on_cpu:
            return load_model(model, numerics)
        return load_device_model(model, numerics, device, fast=False)

    exact, rounded = load("fp32"), load("bf16")
    ours = rounded if device == "cpu" else load_device_model(model, "bf16", device)
    truth, theirs, on_device = (
        torch.cat([logits_of(one, ids) for ids in prompts]) for one in (exact, rounded, ours)
    )
    return relative(on_device, truth), relative(theirs, truth)


def logits_of(model: DeviceModel | DeepseekV41, ids: list[int]) -> Tensor:
    """Of every position of a prompt, in one step."""
    blocks = range(-(-len(ids) // BLOCK_TOKENS))
    device = str(model.device.name) if isinstance(model, DeviceModel) else "cpu"
    cache = KvCache(model.config, len(blocks), len(blocks), 1, device=device)
    row = BatchRow(ids, 0, blocks, blocks, 0, num_logits=len(ids))
    return model.forward(StepBatch.build([row], model.config.context_ids), cache).logits.cpu()


def relative(found: Tensor, wanted: Tensor) -> float:
    """Norm of the difference by the norm of what is wanted; NaN stays NaN."""
    return float((found - wanted).norm() / wanted.norm())
