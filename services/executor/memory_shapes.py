"""Memory plans of a checkpoint or of a preset, for several numbers of GPUs."""

from collections.abc import Sequence
from pathlib import Path

from deepmesh.config import Config
from services.executor.memory_checks import host_memory
from services.executor.memory_plan import Cards, Demand, MemoryPlan, plan_memory
from services.executor.model_config import ModelConfig, load_config, parse_config
from services.executor.presets import preset_config


def plans(
    mesh: Config,
    *,
    path: Path,
    preset: str,
    layers: int | None,
    ranks: Sequence[int],
    card_bytes: int,
    host_bytes: int | None = None,
) -> list[MemoryPlan]:
    """One for each number of ranks; `host_bytes` None: of this machine.

    Raises:
        ValueError: no such model, preset, slice or division.
    """
    model = load_config(path) if not preset else preset_model(preset, layers)
    cards = Cards(card_bytes, host_memory() if host_bytes is None else host_bytes)
    possible = [count for count in ranks if count <= model.n_routed_experts] or list(ranks[:1])
    return [plan_memory(model, Demand.of(mesh), cards, count) for count in possible]


def preset_model(name: str, layers: int | None = None) -> ModelConfig:
    """Shapes of a preset; its vocabulary is not needed for them."""
    raw = preset_config(name, layers=layers)
    raw["text_config"]["engram_compressed_vocab_size"] = 1
    return parse_config(raw)
