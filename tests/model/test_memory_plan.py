"""What fits on which GPUs, before anything is loaded."""

import gc
import re
from pathlib import Path
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import Tensor

from deepmesh.config import Config
from deepmesh.wire.messages import Load
from services.executor.capacity import plan_capacity
from services.executor.gpu.linears import Device
from services.executor.gpu.model import DeviceModel
from services.executor.gpu.random_model import RandomReader
from services.executor.kv_sizes import kv_sizes
from services.executor.memory_advice import layers_that_fit, least_ranks, refusal
from services.executor.memory_plan import Cards, Demand, MemoryPlan, kept_bytes, plan_memory
from services.executor.model_config import ModelConfig, load_config, parse_config
from services.executor.models.numerics import Numerics
from services.executor.presets import preset_config
from services.executor.tensor_specs import tensor_specs
from tests.kernels.small_forwards import small_config

GB = 10**9
H200 = Cards(141 * GB, 256 * GB)
BUSY = Demand(max_rows=256, step_tokens=8192, num_slots=384)
TINY = Path(__file__).parents[2] / "models/tiny"
OURS = ("services.", "kernels.")


def flash(layers: int | None = None) -> ModelConfig:
    raw = preset_config("v41-flash", layers=layers)
    raw["text_config"]["engram_compressed_vocab_size"] = 1
    return parse_config(raw)


def plan(layers: int | None, ranks: int, demand: Demand = BUSY, cards: Cards = H200) -> MemoryPlan:
    return plan_memory(flash(layers), demand, cards, ranks)


@pytest.mark.parametrize(("ranks", "fits"), [(1, False), (2, False), (4, True), (8, True)])
def test_the_whole_model_needs_four_cards(ranks: int, fits: bool) -> None:
    found = plan(None, ranks)
    assert found.fits == fits
    assert bool(refusal(found)) != fits
    assert least_ranks(found) == 4
    experts = sum(spec.num_bytes for spec in tensor_specs(flash()) if ".experts." in spec.name)
    of_layers = experts - sum(
        spec.num_bytes
        for spec in tensor_specs(flash())
        if ".experts." in spec.name and spec.name.startswith("mtp.")
    )
    assert found.weights["routed experts"] == pytest.approx(of_layers / ranks, rel=1e-6)


def test_a_refusal_has_numbers_and_what_to_do() -> None:
    words = refusal(plan(None, 1))
    assert re.search(r"a rank of 1 needs 2[78]\d\.\d GiB for weights", words)
    assert "131.3 GiB that are free" in words
    assert "4 ranks hold it" in words
    fitting = layers_that_fit(plan(None, 1))
    assert f"deepmesh model random --layers {fitting}" in words
    assert plan(fitting, 1).fits
    assert not plan(fitting + 2, 1).fits


def test_tables_of_engram_lie_on_the_host_once() -> None:
    small = Cards(141 * GB, 128 * GB)
    found = plan(None, 8, cards=small)
    assert found.host_bytes == plan(None, 1).host_bytes > 200 * GB
    assert not found.fits
    assert "the Engram tables take 188.8 GiB of host memory, 119.2 GiB are free" in refusal(found)
    assert found.longest == found.config.max_model_len  # the card itself is no problem


def test_a_context_that_is_too_long_is_refused_with_one_that_fits() -> None:
    alone = Demand(1, 2048, 4, max_model_len=1 << 20)
    tight = Cards(round(plan(8, 1, alone).weight_bytes + 10 * GB), 256 * GB)
    found = plan(8, 1, alone, tight)
    while found.fits:
        tight = Cards(tight.card_bytes - GB // 4, tight.host_bytes)
        found = plan(8, 1, alone, tight)
    words = refusal(found)
    assert "1048576 are asked for" in words
    assert f"set scheduler.max_model_len to {found.longest} or less" in words
    assert plan(8, 1, Demand(1, 2048, 4, max_model_len=found.longest), tight).fits


def test_what_is_left_is_context() -> None:
    found = plan(8, 1)
    assert found.pool_bytes == found.cards.card_bytes - found.weight_bytes - found.working_bytes
    blocks = (found.pool_bytes - found.fixed_pool_bytes) // kv_sizes(found.config).global_block
    assert found.context_tokens == blocks * 64 > 50_000_000
    assert found.longest == found.config.max_model_len == 1 << 20


def test_more_ranks_leave_more_context() -> None:
    tokens = [plan(16, ranks).context_tokens for ranks in (1, 2, 4, 8)]
    assert tokens == sorted(set(tokens))


def test_the_tiny_model_fits_everywhere() -> None:
    found = plan_memory(load_config(TINY), Demand.of(Config()), Cards(2 * GB, GB))
    assert found.fits
    assert found.weight_bytes < 50e6
    assert found.longest == 8192


def test_experts_cannot_be_shared_by_more_ranks_than_there_are() -> None:
    with pytest.raises(ValueError, match="ranks: 17 cannot share 16 experts"):
        plan_memory(load_config(TINY), BUSY, H200, 17)


def test_pools_of_a_gpu_take_what_is_left_as_far_as_it_is_of_use() -> None:
    """With a prefix kept for every slot at most; a smaller device has fewer blocks than usual."""
    config, model = Config(), load_config(TINY)
    order, sizes = Load(1, 0, 1, str(TINY), "bf16"), kv_sizes(model).per_block

    def blocks(memory_bytes: int, *, fills: bool) -> int:
        found = plan_capacity(
            config, model, order, bytes_per_block=sizes, memory_bytes=memory_bytes, fills=fills
        )
        return found.num_global_blocks

    usual = blocks(0, fills=False)
    assert blocks(100 * GB, fills=False) == usual
    most = blocks(100 * GB, fills=True)
    assert most == 2 * (config.scheduler.max_rows * 3 // 2) * 8192 // 64
    assert usual < blocks(100_000_000, fills=True) < most
    assert blocks(40_000_000, fills=True) < usual


def held_tensors(thing: object, seen: set[int], found: dict[int, int]) -> None:
    """Bytes of all memory that an object of ours refers to, by address."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        memory = thing.untyped_storage()
        found[memory.data_ptr()] = max(found.get(memory.data_ptr(), 0), memory.nbytes())
    elif isinstance(thing, list | tuple):
        for part in thing:
            held_tensors(part, seen, found)
    elif isinstance(thing, dict | WeakKeyDictionary):
        for part in list(thing.values()):
            held_tensors(part, seen, found)
    elif type(thing).__module__.startswith(("services.", "kernels.")) and hasattr(
        thing, "__dict__"
    ):
        held_tensors(vars(thing), seen, found)


def test_the_plan_counts_what_a_gpu_really_keeps() -> None:
    """The kernels' layouts of narrow weights are made on the host; nothing runs."""
    raw = small_config()
    raw["text_config"]["engram_compressed_vocab_size"] = raw["text_config"]["vocab_size"]
    config, device = parse_config(raw), torch.device("cpu")
    weights = RandomReader(config, device, 0).model(Path())
    model = DeviceModel(config, weights, "bf16", Device(device, Numerics.named("bf16"), True))
    assert model.prefill is not None
    del weights
    gc.collect()
    found: dict[int, int] = {}
    held_tensors(model, set(), found)
    specs = tensor_specs(config)
    on_host = sum(spec.num_bytes for spec in specs if ".engram.embed." in spec.name)
    planned = sum(kept_bytes(config, spec) for spec in specs if ".engram.embed." not in spec.name)
    held = sum(found.values()) - on_host
    assert held <= planned < 1.1 * held
