"""A block: two sublayers between single-pass hyper-connections. Draft stages are blocks, too."""

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.comm.comm import Alone, Exchange
from kernels.mhc.mix import HyperMix, hyper_mix
from kernels.mhc.streams import collapse_norm, expand
from kernels.moe.experts import all_experts, expert_mlp, routed_experts
from kernels.moe.gate import route
from kernels.quant.linear import linear
from services.executor.model_config import ModelConfig
from services.executor.models.numerics import Numerics
from services.executor.models.outputs import Tap
from services.executor.models.parameters import HyperWeights, LayerWeights, MoeWeights


class Moe:
    """Routed experts, wherever they are, and the shared one."""

    def __init__(
        self,
        config: ModelConfig,
        weights: MoeWeights,
        top_k: int,
        numerics: Numerics,
        exchange: Exchange,
    ) -> None:
        self._config, self._weights, self._top_k, self._num = config, weights, top_k, numerics
        self._exchange = exchange

    def __call__(self, u: Tensor) -> Tensor:
        """u [num_tokens, hidden] -> the sublayer's output."""
        weights, config = self._weights, self._config
        expert_ids, shares = route(
            linear(u, weights.gate),
            weights.bias,
            self._top_k,
            scaling=config.routed_scaling_factor,
            temperature=config.gate_temp,
        )
        if isinstance(self._exchange, Alone):
            return all_experts(
                u,
                expert_ids,
                shares,
                weights.w13,
                weights.w2,
                weights.shared_w13,
                weights.shared_w2,
                limit=config.swiglu_limit,
                bf16=self._num.bf16,
            )
        shared = torch.empty_like(u)

        def compute_shared() -> None:  # while tokens travel
            w13, w2, limit = weights.shared_w13, weights.shared_w2, config.swiglu_limit
            shared.copy_(expert_mlp(u, w13, w2, limit=limit, bf16=self._num.bf16))

        routed = self._routed(u, expert_ids, shares, compute_shared)
        return self._num.act(routed.add_(shared))

    def serve(self) -> None:
        """Without tokens of our own: the experts held here work for the other ranks."""
        u = self._weights.bias.new_zeros(0, self._config.hidden_size)
        slots = u.new_zeros(0, self._top_k)
        self._routed(u, slots.long(), slots)

    def _routed(
        self,
        u: Tensor,
        expert_ids: Tensor,
        shares: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Tensor:
        weights, spread = self._weights, self._weights.spread
        slot_ids = spread.choose(expert_ids)
        here = self._exchange.dispatch(u, slot_ids, shares, spread.owners, meanwhile)
        spread.arrived(here.expert_ids)
        slots = routed_experts(
            here.x,
            here.expert_ids,
            here.weights,
            weights.w13,
            weights.w2,
            first_expert=spread.first_slot,
            limit=self._config.swiglu_limit,
            bf16=self._num.bf16,
        )
        return self._exchange.combine(slots)


class Block:
    """Attention and MoE with their hyper-connections, in the order of the specification."""

    def __init__(
        self,
        config: ModelConfig,
        weights: LayerWeights,
        top_k: int,
        numerics: Numerics,
        name: str,
        exchange: Exchange,
    ) -> None:
        self._config, self._weights, self._num, self._name = config, weights, numerics, name
        self._moe = Moe(config, weights.moe, top_k, numerics, exchange)

    def __call__(
        self,
        streams: Tensor,
        carried: Tensor,
        attention: Callable[[Tensor], Tensor],
        tap: Tap | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(streams, pre-mix carried in) -> (streams, pre-mix for the next block)."""
        weights = self._weights
        mix = self._mix(streams, weights.attn_hyper)
        out = attention(self.attention_input(streams, carried))
        self._show(tap, "attn", mix, out)
        streams = expand(streams, out, mix.post, mix.comb, bf16=self._num.bf16)
        carried = mix.pre
        mix = self._mix(streams, weights.ffn_hyper)
        out = self._moe(self._input(streams, carried, weights.ffn_hyper))
        self._show(tap, "ffn", mix, out)
        return expand(streams, out, mix.post, mix.comb, bf16=self._num.bf16), mix.pre

    def attention_input(self, streams: Tensor, carried: Tensor) -> Tensor:
        """What the attention of this block is given."""
        return self._input(streams, carried, self._weights.attn_hyper)

    def serve(self) -> None:
        """See `Moe`."""
        self._moe.serve()

    def _mix(self, streams: Tensor, weights: HyperWeights) -> HyperMix:
        return hyper_mix(
            streams,
            weights.fn,
            weights.scale,
            weights.base,
            num_iters=self._config.hc_sinkhorn_iters,
            hc_eps=self._config.hc_eps,
            norm_eps=self._config.rms_norm_eps,
        )

    def _input(self, streams: Tensor, carried: Tensor, weights: HyperWeights) -> Tensor:
        """Collapse by the PREVIOUS sublayer's pre-mix, then the sublayer's norm."""
        eps, bf16 = self._config.rms_norm_eps, self._num.bf16
        return collapse_norm(streams, carried, weights.norm, eps, bf16=bf16)

    def _show(self, tap: Tap | None, site: str, mix: HyperMix, out: Tensor) -> None:
        if tap is None:
            return
        tap(f"{self._name}.{site}_out", out)
        for part, value in zip(mix._fields, mix, strict=True):
            tap(f"{self._name}.hc_{site}_{part}", value)
