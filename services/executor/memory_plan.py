"""What a model takes of its GPUs and their host, worked out before anything is loaded. No torch."""

import functools
from collections import Counter
from dataclasses import dataclass, replace

from deepmesh.config import Config
from services.executor.capacity import MAX_DEPTH, planned_slots, verified_tokens
from services.executor.inspect import HOST_PARTS, part_of
from services.executor.kv_sizes import KvSizes, kv_sizes
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.tensor_specs import TensorSpec, rank_experts, tensor_specs

CONTEXT_BYTES = 1 << 30  # CUDA's own, modules, and what the allocator cannot use
BUCKET_BYTES = 8 << 20  # a captured graph of one batch bucket
NUM_BUCKETS = 13
EXPANDED_BYTES = 2  # of a weight of the largest linear, written out for the products of a prefill
FP8_CHUNK = 4224 / 4096  # bytes a weight in chunks of 64 x 64 with their scales
SEAM_BLOCKS, SEAM_CHUNK = 16, 256  # as kernels/mhc/seam_cuda.py cuts a projection
TILE = 64  # of which the kernels made for Hopper want whole ones
PROMPT_SCORES = 1 << 26  # index scores of prompts that lie in memory at once
BUCKET_ROWS = 3.5  # rows of all batch buckets together, by those of the largest
SAMPLED_ROW, SAMPLED_ID = 8192, 0.3  # bytes of a row of the sampler, and of each id of it
TABLE_ID = 8.25  # bytes an id of what a request may ask of the sampler
ANGLE_TABLES = 2  # of decode and of prefill: cosines and sines, for both kinds of rows


@dataclass(frozen=True)
class Cards:
    """Free memory of one GPU, and of the host that holds the tables of all its ranks."""

    card_bytes: int
    host_bytes: int


@dataclass(frozen=True)
class Demand:
    """What the scheduler may ask of a rank."""

    max_rows: int
    step_tokens: int
    num_slots: int
    max_model_len: int = 0  # 0: what fits
    draft_len: int = 0  # drafts of a row

    @staticmethod
    def of(config: Config) -> "Demand":
        """As mesh.toml says."""
        rows = config.scheduler.max_rows
        tokens, length = config.scheduler.step_tokens, config.scheduler.max_model_len
        drafts = config.executor.draft_tokens
        return Demand(rows, tokens, planned_slots(config), length, drafts)


@dataclass(frozen=True)
class MemoryPlan:
    """One rank's memory; all ranks take as much as the first, within an expert of each layer."""

    config: ModelConfig
    demand: Demand
    cards: Cards
    ranks: int
    weights: dict[str, int]  # bytes on the GPU as it keeps them, by part of the model
    working: dict[str, int]  # bytes of the GPU for everything but weights and KV
    host_bytes: int  # Engram tables, once a host
    kv: KvSizes

    @property
    def weight_bytes(self) -> int:
        """Of all parts."""
        return sum(self.weights.values())

    @property
    def working_bytes(self) -> int:
        """Of all that comes and goes with steps."""
        return sum(self.working.values())

    @property
    def pool_bytes(self) -> int:
        """What is left for KV pools; negative if nothing is."""
        return self.cards.card_bytes - self.weight_bytes - self.working_bytes

    @property
    def fixed_pool_bytes(self) -> int:
        """Of the window and state pools, which hardly grow with the context."""
        return fixed_pool_bytes(self.config, self.demand)

    @property
    def context_tokens(self) -> int:
        """Tokens of context that all requests of a rank can have together."""
        left = self.pool_bytes - self.fixed_pool_bytes
        return max(0, left // self.kv.global_block) * BLOCK_TOKENS

    @property
    def longest(self) -> int:
        """Tokens of the longest single request."""
        return min(self.context_tokens, self.config.max_model_len)

    @property
    def wanted_len(self) -> int:
        """Tokens that a request must be able to have: a block, unless the mesh says more."""
        asked = min(self.demand.max_model_len, self.config.max_model_len)
        return max(asked, BLOCK_TOKENS)

    @property
    def fits(self) -> bool:
        """Whether it can be loaded and serve a request of the wanted length."""
        return self.longest >= self.wanted_len and self.host_bytes <= self.cards.host_bytes


def plan_memory(config: ModelConfig, demand: Demand, cards: Cards, ranks: int = 1) -> MemoryPlan:
    """The plan of the rank that holds most.

    Raises:
        ValueError: more ranks than experts.
    """
    if not 1 <= ranks <= config.n_routed_experts:
        raise ValueError(f"ranks: {ranks} cannot share {config.n_routed_experts} experts a layer")
    shared, expert_bytes, host = _sizes(config, demand.draft_len > 0)
    own = rank_experts(config.n_routed_experts, ranks - 1, ranks)  # the last has one more, if any
    weights = Counter({"routed experts": expert_bytes * len(own), **shared})
    working = working_bytes(config, demand, demand.max_model_len or config.max_model_len)
    plan = MemoryPlan(
        config, demand, cards, ranks, dict(weights.most_common()), working, host, kv_sizes(config)
    )
    if not demand.max_model_len and plan.longest < config.max_model_len:
        # a shorter context needs less room for index scores, too
        working = working_bytes(config, demand, max(plan.longest, BLOCK_TOKENS))
        plan = replace(plan, working=working)
    return plan


@functools.cache
def _sizes(config: ModelConfig, drafts: bool) -> tuple[dict[str, int], int, int]:
    """What every rank keeps, by part; one routed expert of every layer; tables on the host.

    `drafts`: it drafts.
    """
    shared: Counter[str] = Counter()
    one_expert = host = 0
    for spec in tensor_specs(config):
        if spec.expert is not None and not spec.name.startswith("mtp."):
            one_expert += kept_bytes(config, spec) if spec.expert == 0 else 0
        elif spec.name.startswith("mtp.") and not drafts and not _feeds(spec.name):
            continue  # what does not draft only takes rows of the main model
        elif part_of(spec) in HOST_PARTS:
            host += spec.num_bytes
        else:
            shared[part_of(spec)] += kept_bytes(config, spec)
    return dict(shared), one_expert, host


def kept_bytes(config: ModelConfig, spec: TensorSpec) -> int:
    """What a GPU keeps of a stored tensor, in the forms that its kernels read.

    Decode and prefill share what they can; each has its own copy of the embedding, the routers and
    the projections of the hyper-connections.
    """
    if not made_for_hopper(config):
        return 4 * spec.num_parameters
    if spec.dtype == "F8_E8M0":
        return spec.num_bytes if spec.expert is not None else 0  # others lie among the codes
    if spec.dtype == "I8":
        return spec.num_bytes
    if spec.dtype == "F8_E4M3":
        return round(spec.num_parameters * FP8_CHUNK)
    if len(spec.shape) < 2:
        return 4 * spec.num_parameters
    rows, columns = spec.shape
    if spec.dtype == "F32":  # of hyper-connections; the wide form is in three bfloat16 parts
        return _seam_bytes(config) + 2 * _whole(3 * rows) * columns
    if spec.name == "embed.weight":
        return 2 * 2 * spec.num_parameters
    if spec.name.endswith("ffn.gate.weight"):
        return 2 * (rows + _whole(rows)) * columns
    return 2 * _whole(rows) * columns


def _seam_bytes(config: ModelConfig) -> int:
    """A projection of hyper-connections, float32, cut for the blocks of a cluster."""
    outputs = (2 + config.hc_mult) * config.hc_mult
    width = config.hc_mult * config.hidden_size // SEAM_BLOCKS
    return 4 * SEAM_BLOCKS * outputs * -(-width // SEAM_CHUNK) * SEAM_CHUNK


def _whole(rows: int) -> int:
    """Whole tiles of outputs."""
    return -(-rows // TILE) * TILE


def made_for_hopper(config: ModelConfig) -> bool:
    """Whether the kernels made for Hopper have code for the linears; else weights are float32."""
    widths = (config.hidden_size, config.moe_intermediate_size, config.q_lora_rank)
    return all(width % TILE == 0 for width in widths)


def working_bytes(config: ModelConfig, demand: Demand, max_len: int) -> dict[str, int]:
    """Memory of steps, by what needs it, for contexts of up to `max_len` tokens."""
    heads = config.num_attention_heads * config.head_dim
    streams = 4 * 3 * config.hc_mult * config.hidden_size
    attention = 2 * 3 * heads + 4 * config.o_groups * config.o_lora_rank
    slots = config.num_experts_per_tok * (config.hidden_size + 3 * config.moe_intermediate_size)
    largest = max(
        heads * config.q_lora_rank,
        config.hidden_size * config.o_groups * config.o_lora_rank,
        2 * config.hidden_size * config.moe_intermediate_size,
    )
    ratios = [config.compress_ratios[layer] for layer in config.kv_source_layer_ids]
    keys = -(-max_len // min(ratios)) if max_len > config.index_topk else 0
    drafts = min(demand.draft_len, config.dspark_block_size)
    tokens = verified_tokens(demand.max_rows, drafts)  # of a decode step
    drafted = (drafts + 2) * demand.max_rows if drafts else 0  # rows of logits of a draft pass
    scores = max(tokens * keys, min(demand.step_tokens * keys, PROMPT_SCORES))
    blocks = -(-max_len // BLOCK_TOKENS)
    return {
        "CUDA": CONTEXT_BYTES,
        "graphs": NUM_BUCKETS * BUCKET_BYTES,
        "activations": demand.step_tokens * (streams + attention + 4 * slots),
        "expanded weights": EXPANDED_BYTES * largest,
        "index scores": 4 * scores,
        "logits": (round(4 * BUCKET_ROWS * tokens) + 4 * drafted) * config.vocab_size,
        "sampling": round((tokens + drafted) * (SAMPLED_ROW + SAMPLED_ID * config.vocab_size))
        + round(demand.num_slots * TABLE_ID * config.vocab_size),
        "block tables": round(4 * BUCKET_ROWS * tokens + 8 * demand.num_slots) * blocks,
        "angles": ANGLE_TABLES * 4 * 4 * config.qk_rope_head_dim // 2 * max_len,
    }


def fixed_pool_bytes(config: ModelConfig, demand: Demand) -> int:
    """Window and state pools of so many rows, with a point to resume from for each."""
    sizes, drafts = kv_sizes(config), min(demand.draft_len, config.dspark_block_size)
    reach = MAX_DEPTH * (1 + drafts)
    span = -(-(config.sliding_window + reach) // BLOCK_TOKENS) + 1
    in_flight = MAX_DEPTH * demand.step_tokens // BLOCK_TOKENS
    windows = demand.max_rows * (span + 1) + in_flight
    states = demand.num_slots * (1 + -(-drafts // 2))  # an open pair, and those behind drafts
    return windows * sizes.window_block + states * sizes.state_block


def _feeds(name: str) -> bool:
    """Of a draft stage: what makes its window rows out of the main model's features."""
    return any(part in name for part in ("main_proj.", "main_norm.", "kv_norm.", ".attn.wkv."))
