"""The experts of a layer as operations of a step program: a main layer's, or a draft stage's."""

import torch
from torch import Tensor

from kernels.step.recorder import Recorder
from kernels.step.room import Room
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import MoeWeights


def record_moe(
    record: Recorder,
    room: Room,
    config: ModelConfig,
    weights: MoeWeights,
    top_k: int,
    u: Tensor,
    y: Tensor,
    expert_ids: Tensor | None = None,
) -> None:
    """Router, routed experts and the shared one, all on this rank: u [tokens, hidden] to y.

    Args:
        expert_ids: [tokens, top_k], int64: room for the router's choice, for who wants to see it.
    """
    scores = room("scores", weights.gate.out_features)
    if expert_ids is None:
        expert_ids = room("expert_ids", top_k, dtype=torch.int64)
    shares = room("shares", top_k)
    record.linear(u, weights.gate, scores, bf16=False)
    record.route(
        scores,
        weights.bias,
        scaling=config.routed_scaling_factor,
        temperature=config.gate_temp,
        expert_ids=expert_ids,
        shares=shares,
    )
    record.all_experts(
        u,
        expert_ids,
        shares,
        weights.w13,
        weights.w2,
        weights.shared_w13,
        weights.shared_w2,
        limit=config.swiglu_limit,
        slots=room("slots", top_k, config.hidden_size),
        shared=room("shared", config.hidden_size),
        out=y,
    )
