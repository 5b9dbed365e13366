"""Why a model does not fit on its GPUs, in numbers, and what would."""

from services.executor.memory_plan import MemoryPlan, plan_memory
from services.executor.model_config import BLOCK_TOKENS


def gib(num_bytes: int) -> str:
    """1.5 GiB; small sizes in MiB."""
    if abs(num_bytes) < 1 << 30:
        return f"{num_bytes / (1 << 20):.1f} MiB"
    return f"{num_bytes / (1 << 30):.1f} GiB"


def least_ranks(plan: MemoryPlan) -> int:
    """The smallest power of two of ranks that it fits on; 0: none does."""
    ranks = 1
    while ranks <= plan.config.n_routed_experts:
        if plan_memory(plan.config, plan.demand, plan.cards, ranks).fits:
            return ranks
        ranks *= 2
    return 0


def layers_that_fit(plan: MemoryPlan) -> int:
    """How many of its layers would fit on as many ranks."""
    layers = plan.config.num_hidden_layers
    of_layers = sum(
        size for part, size in plan.weights.items() if part not in ("embedding and head", "norms")
    )
    needed = plan.weight_bytes + plan.working_bytes + plan.fixed_pool_bytes
    needed += plan.kv.global_block * -(-plan.wanted_len // BLOCK_TOKENS)
    too_much = needed - plan.cards.card_bytes
    return max(0, layers - max(0, -(-too_much * layers // of_layers)))


def refusal(plan: MemoryPlan) -> str:
    """Why it cannot be loaded, in numbers, and what to do; empty: it can."""
    if plan.fits:
        return ""
    cards, lines = plan.cards, list[str]()
    if plan.host_bytes > cards.host_bytes:
        lines.append(
            f"the Engram tables take {gib(plan.host_bytes)} of host memory, {gib(cards.host_bytes)}"
            " are free: a host with more memory"
        )
    if plan.longest < plan.wanted_len:
        short = plan.weight_bytes + plan.working_bytes + plan.fixed_pool_bytes
        lines.append(
            f"a rank of {plan.ranks} needs {gib(plan.weight_bytes)} for weights,"
            f" {gib(plan.working_bytes)} to work in and {gib(plan.fixed_pool_bytes)} for windows:"
            f" {gib(short)} of the {gib(cards.card_bytes)} that are free, which leaves"
            f" {plan.context_tokens} tokens of context where {plan.wanted_len} are asked for;"
            f" {'; '.join(_ways_out(plan))}"
        )
    return "; ".join(lines)


def _ways_out(plan: MemoryPlan) -> list[str]:
    ways: list[str] = []
    if plan.longest >= BLOCK_TOKENS:
        ways.append(f"set scheduler.max_model_len to {plan.longest} or less")
    ranks, layers = least_ranks(plan), layers_that_fit(plan)
    if ranks:
        ways.append(f"{ranks} ranks hold it (executor.ranks)")
    if layers >= 2:
        ways.append(f"{layers} layers of it fit here (deepmesh model random --layers {layers})")
    if not ways:
        ways.append("fewer rows or tokens a step (scheduler.max_rows, step_tokens) need less")
    return ways
