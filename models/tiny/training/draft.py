"""The DSpark stages: a block of draft tokens from the main model's features."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.tiny.training import layers
from models.tiny.training.layers import NEVER, compiled_on_gpu, rms_norm, rotate
from models.tiny.training.model import Forward, Mode, Rows, Weights
from models.tiny.training.quantise import fp8_runs


@dataclass(frozen=True)
class Anchors:
    """Positions [batch, anchors] of the tokens after which a block is drafted."""

    positions: Tensor

    def targets(self, block_size: int) -> Tensor:
        """Return the positions [batch * anchors, block] whose next tokens are drafted."""
        offsets = torch.arange(block_size, device=self.positions.device)
        return (self.positions[..., None] + offsets).flatten(0, 1)


@compiled_on_gpu
def main_rows(features: Tensor, proj: Tensor, norm: Tensor, eps: float, rounds: bool) -> Tensor:
    """Return what all stages read of the main model."""
    rows = rms_norm((fp8_runs(features) if rounds else features) @ proj.t(), norm, eps)
    return fp8_runs(rows) if rounds else rows


@compiled_on_gpu
def window_rows(
    rows: Tensor, wkv: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float, rounds: bool
) -> Tensor:
    """Return a stage's key-and-value rows of the main positions."""
    projected = rotate(rms_norm(rows @ wkv.t(), norm, eps), cos, sin)
    return fp8_runs(projected) if rounds else projected


@compiled_on_gpu
def attend_block(
    query: Tensor, block: Tensor, window: Tensor, seen: Tensor, sink: Tensor
) -> Tensor:
    """Attend from a block to its window and to all of itself."""
    keys = torch.cat((window, block), 1)
    heads, width = query.shape[-2:]
    scores = ((query * width**-0.5).flatten(1, 2) @ keys.mT).unflatten(1, (-1, heads)).float()
    seen = torch.cat((seen, torch.ones_like(seen[:, : block.shape[1]])), 1)
    scores = scores.masked_fill(~seen[:, None, None], NEVER)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink[:, None]).detach()
    scores = torch.exp(scores - top)
    share = scores / (scores.sum(-1, keepdim=True) + torch.exp(sink[:, None] - top))
    return (share.to(query.dtype).flatten(1, 2) @ keys).unflatten(1, (-1, heads))


class DraftForward:
    """The draft stages' forward at many anchors at once."""

    def __init__(self, main: Forward) -> None:
        self.main = main
        self.config: dict[str, Any] = main.config
        self.block_size: int = self.config["dspark_block_size"]
        self.last = f"mtp.{self.config['num_nextn_predict_layers'] - 1}."

    def __call__(
        self, weights: Weights, rows: Rows, features: Tensor, anchors: Anchors, mode: Mode
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return states [batch * anchors, block, hidden] before the norm, and expert loads."""
        c, eps, rounds = self.config, self.config["rms_norm_eps"], mode.rounds_activations
        num_tokens = rows.ids.shape[1]
        proj, norm = weights["mtp.0.main_proj.weight"], weights["mtp.0.main_norm.weight"]
        read = main_rows(features, proj, norm, eps, rounds)
        cos, sin = self.main.tables(num_tokens + self.block_size, False)
        places = anchors.targets(self.block_size)
        back = torch.arange(c["sliding_window"], device=places.device) - c["sliding_window"]
        before = anchors.positions[..., None] + back
        starts = rows.starts.gather(1, anchors.positions.clamp(max=num_tokens - 1))
        seen = (before >= starts[..., None]).flatten(0, 1)
        ids = torch.full_like(places, c["dspark_noise_token_id"])
        ids[:, 0] = rows.ids.gather(1, anchors.positions).flatten()
        streams = layers.embed(ids, weights["embed.weight"], c["hc_mult"], mode.dtype)
        pre = self.main.first_pre(ids.shape)
        loads: dict[str, Tensor] = {}
        for stage in range(c["num_nextn_predict_layers"]):
            prefix = f"mtp.{stage}."
            projections = self.main.attention_weights(weights, prefix)
            wkv, kv_norm = projections[3:]
            window = window_rows(
                read, wkv, kv_norm, cos[:num_tokens], sin[:num_tokens], eps, rounds
            )
            window = _gather(window, before.clamp_min(0))
            u, own_pre, post, comb = self.main.mix(weights, prefix, "attn", streams, pre)
            query, block, _ = layers.project(
                u, *projections, cos[places], sin[places], c["num_attention_heads"], eps, rounds
            )
            output = attend_block(query, block, window, seen, weights[prefix + "attn.attn_sink"])
            wo_a, wo_b = weights[prefix + "attn.wo_a.weight"], weights[prefix + "attn.wo_b.weight"]
            y = layers.project_out(
                output, cos[places], sin[places], wo_a, wo_b, c["o_groups"], rounds
            )
            streams = layers.expand(streams, y, post, comb)
            u, pre, post, comb = self.main.mix(weights, prefix, "ffn", streams, own_pre)
            y, loads[prefix] = self.main.feed(
                weights, prefix, u, c["dspark_num_experts_per_tok"], mode
            )
            streams = layers.expand(streams, y, post, comb)
        return (pre[..., None] * streams.float()).sum(-2), loads

    def base_logits(self, weights: Weights, states: Tensor, mode: Mode) -> Tensor:
        """Return the main head's logits of the block's states."""
        normed = rms_norm(states, weights[self.last + "norm.weight"], self.config["rms_norm_eps"])
        return (normed.to(mode.dtype) @ weights["head.weight"].t()).float()

    def markov(self, weights: Weights, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the token before adds to the logits, and its embedding."""
        memory = F.embedding(previous, weights[self.last + "markov_head.embed.weight"])
        head = weights[self.last + "markov_head.head.weight"]
        return (memory.to(head.dtype) @ head.t()).float(), memory.float()

    def confidence(self, weights: Weights, states: Tensor, memory: Tensor) -> Tensor:
        """Return the logit of a draft token's acceptance."""
        proj = weights[self.last + "confidence_head.proj.weight"][0].float()
        return torch.cat((states, memory), -1) @ proj

    def greedy(self, weights: Weights, base: Tensor, anchor_ids: Tensor) -> Tensor:
        """Return the likeliest draft block after each anchor token."""
        previous, drafted = anchor_ids, []
        for index in range(self.block_size):
            previous = (base[:, index] + self.markov(weights, previous)[0]).argmax(-1)
            drafted.append(previous)
        return torch.stack(drafted, -1)


def _gather(window: Tensor, places: Tensor) -> Tensor:
    batch, num_anchors, span = places.shape
    index = places.flatten(1)[..., None].expand(-1, -1, window.shape[-1])
    return window.gather(1, index).view(batch * num_anchors, span, -1)
