"""What a checkpoint folder holds and needs: sizes from config.json alone. No torch."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from services.executor.checkpoint import CheckpointError, check_tensors, read_headers
from services.executor.kv_sizes import KvSizes, exact_halo, kv_sizes
from services.executor.model_config import ModelConfig, load_config
from services.executor.tensor_specs import TensorSpec, rank_experts, tensor_specs

# Part of the model by the first of these that a tensor's name contains.
PARTS = (
    ("mtp.", "draft stages"),
    (".engram.embed.", "engram tables"),
    (".engram.", "engram"),
    (".experts.", "routed experts"),
    (".shared_experts.", "shared experts"),
    (".gate.", "routers"),
    (".attn.", "attention"),
    ("hc_", "hyper-connections"),
    ("norm.", "norms"),
    ("embed.", "embedding and head"),
    ("head.", "embedding and head"),
)
HOST_PARTS = ("engram tables",)  # stay in host memory, mapped from their files


@dataclass(frozen=True)
class PartSize:
    """One part of the model, as stored."""

    name: str
    num_tensors: int
    num_parameters: int
    num_bytes: int


@dataclass(frozen=True)
class RankSize:
    """Weights that one rank holds, as stored."""

    rank: int
    num_experts: int  # routed experts of a layer
    device_bytes: int
    host_bytes: int  # Engram tables; ranks of one host share them


@dataclass(frozen=True)
class ModelSummary:
    """All that `deepmesh model inspect` prints."""

    path: str
    config: ModelConfig
    parts: tuple[PartSize, ...]
    ranks: tuple[RankSize, ...]
    kv: KvSizes
    halo_tokens: int  # recomputed for exact window rows where none were kept: W + (L-1)(W-1)
    has_weights: bool
    problems: str  # what is wrong with the weights; empty: all tensors are as they must be

    @property
    def num_parameters(self) -> int:
        """Of all parts."""
        return sum(part.num_parameters for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Of all tensors, as stored."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_tensors(self) -> int:
        """Of the text model and its draft stages."""
        return sum(part.num_tensors for part in self.parts)


def describe(path: Path | str, ranks: int = 1) -> ModelSummary:
    """Sizes of the model in `path` (a folder, or a config.json), over `ranks` ranks.

    Weights may be absent; if they are there, their headers are checked.

    Raises:
        ModelConfigError: config.json is missing or wrong.
        ValueError: `ranks` is not positive.
    """
    if ranks < 1:
        raise ValueError(f"ranks: {ranks} is not positive")
    source = Path(path)
    config = load_config(source)
    specs = tensor_specs(config)
    has_weights, problems = _check_weights(source, specs)
    return ModelSummary(
        path=str(source),
        config=config,
        parts=_parts(specs),
        ranks=tuple(_rank(config, specs, rank, ranks) for rank in range(ranks)),
        kv=kv_sizes(config),
        halo_tokens=exact_halo(config),
        has_weights=has_weights,
        problems=problems,
    )


def _check_weights(source: Path, specs: list[TensorSpec]) -> tuple[bool, str]:
    if not source.is_dir() or not any(source.glob("*.safetensors*")):
        return False, ""
    try:
        check_tensors(specs, read_headers(source))
    except CheckpointError as error:
        return True, str(error)
    return True, ""


def part_of(spec: TensorSpec) -> str:
    """The part of the model that a tensor belongs to."""
    return next(part for mark, part in PARTS if mark in spec.name)


def _parts(specs: list[TensorSpec]) -> tuple[PartSize, ...]:
    tensors: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for spec in specs:
        part = part_of(spec)
        tensors[part] += 1
        parameters[part] += spec.num_parameters
        sizes[part] += spec.num_bytes
    return tuple(
        PartSize(part, tensors[part], parameters[part], size) for part, size in sizes.most_common()
    )


def _rank(config: ModelConfig, specs: list[TensorSpec], rank: int, ranks: int) -> RankSize:
    """Everything but the layers' routed experts is on every rank (attention is data-parallel)."""
    own = rank_experts(config.n_routed_experts, rank, ranks)
    device = host = 0
    for spec in specs:
        is_spread = spec.expert is not None and not spec.name.startswith("mtp.")
        if is_spread and spec.expert not in own:
            continue
        if part_of(spec) in HOST_PARTS:
            host += spec.num_bytes
        else:
            device += spec.num_bytes
    return RankSize(rank, len(own), device, host)
