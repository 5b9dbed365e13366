"""What `deepmesh doctor` says of GPUs: which there are, and whether the model fits on them."""

import os
from collections.abc import Iterator
from pathlib import Path

from deepmesh.checks import Check
from deepmesh.config import Config
from deepmesh.gpus import HOPPER, Gpu, NoGpus, found_gpus
from services.executor.memory_advice import gib, refusal
from services.executor.memory_plan import Cards, Demand, MemoryPlan, plan_memory
from services.executor.model_config import ModelConfigError, load_config


def check_gpus(config: Config, program: str = "nvidia-smi") -> Iterator[Check]:
    """Nothing to say where executors run on CPUs, elsewhere, or without weights."""
    executor = config.executor
    if executor.device != "cuda" or executor.kind != "model" or executor.address:
        return
    try:
        gpus = found_gpus(program)
    except NoGpus as error:
        step = "install the driver; in a container, `docker run --gpus all` or compose.gpu.yaml"
        yield Check("GPUs", "fail", str(error), f"{step}; or set executor.device = 'cpu'")
        return
    yield _check_cards(gpus)
    needed = executor.ranks * config.scheduler.count
    if needed > len(gpus):
        step = "fewer ranks or schedulers, or executors on other hosts"
        yield Check("executors", "warn", f"{needed} for {len(gpus)} GPUs of this host", step)
    yield _check_memory(config, min(gpu.total_bytes for gpu in gpus))


def _check_cards(gpus: list[Gpu]) -> Check:
    first = gpus[0]
    found = f"{len(gpus)} x {first.name}, {gib(first.total_bytes)}, driver {first.driver}"
    if all(gpu.compute_capability == HOPPER for gpu in gpus):
        return Check("GPUs", "ok", found)
    others = sorted({gpu.compute_capability for gpu in gpus} - {HOPPER})
    step = "kernels are compiled for compute capability 9.0 (H100, H200) only"
    return Check("GPUs", "fail", f"{found}; compute capability {', '.join(others)}", step)


def _check_memory(config: Config, card_bytes: int) -> Check:
    """Of whole cards: what a running mesh holds is its own."""
    try:
        model = load_config(Path(config.mesh.model))
        cards = Cards(card_bytes, host_memory())
        plan = plan_memory(model, Demand.of(config), cards, config.executor.ranks)
    except (ModelConfigError, ValueError) as error:
        return Check("GPU memory", "fail", str(error), "correct mesh.model or executor.ranks")
    if words := refusal(plan):
        return Check("GPU memory", "fail", words, "deepmesh model memory shows every part")
    return Check("GPU memory", "ok", summary(plan))


def summary(plan: MemoryPlan) -> str:
    """One line of a plan that fits."""
    return (
        f"a rank of {plan.ranks}: {gib(plan.weight_bytes)} weights,"
        f" {gib(plan.working_bytes)} to work in, {gib(plan.pool_bytes)} for KV:"
        f" {plan.context_tokens} tokens of context, {plan.longest} of one request;"
        f" {gib(plan.host_bytes)} of host memory for Engram"
    )


def host_memory() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
