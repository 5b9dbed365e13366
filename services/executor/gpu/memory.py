"""Whether a model fits on this GPU, asked before it is loaded, and what its KV pools may take."""

import torch

from deepmesh.config import Config
from services.executor.memory_advice import refusal
from services.executor.memory_checks import host_memory
from services.executor.memory_plan import CONTEXT_BYTES, Cards, Demand, MemoryPlan, plan_memory
from services.executor.model_config import ModelConfig


def fitting_plan(config: Config, model: ModelConfig, ranks: int, device: str) -> MemoryPlan:
    """The plan of one rank on the memory that is free now.

    Raises:
        ValueError: it does not fit, with numbers and what to do.
    """
    free, _ = torch.cuda.mem_get_info(device)
    cards = Cards(free + CONTEXT_BYTES, host_memory())  # asking has started CUDA already
    plan = plan_memory(model, Demand.of(config), cards, ranks)
    if words := refusal(plan):
        raise ValueError(f"the model does not fit on this GPU: {words}")
    return plan


def pool_bytes(plan: MemoryPlan, device: str) -> int:
    """What the weights, now loaded, have left, less what steps need."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, free - (plan.working_bytes - CONTEXT_BYTES))
