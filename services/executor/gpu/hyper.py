"""Hyper-connections of a device: what lies between two sublayers."""

from dataclasses import dataclass

from torch import Tensor

from kernels.engram.gate_portable import engram_portable
from kernels.mhc.mix import HyperMix
from kernels.mhc.seam_cuda import RANKS, STREAMS, SeamWeights, pack_seam, seam_mix
from kernels.mhc.streams_portable import (
    collapse_norm_portable,
    collapse_portable,
    expand_portable,
    hyper_mix_portable,
)
from kernels.quant.linear_cuda import PreparedRows
from kernels.quant.linear_portable import PortableLinear, transpose_linear
from kernels.step.rows_cuda import (
    MAX_JOINED,
    add_engram,
    embed_rows,
    expand_rows,
    join_rows,
    mean_rows,
)
from services.executor.gpu.aside import IN_LINE, Aside
from services.executor.gpu.linears import Device, stored
from services.executor.model_config import ModelConfig
from services.executor.models.dspark import first_stream
from services.executor.models.parameters import HyperWeights


@dataclass(frozen=True)
class Behind:
    """What the sublayer behind made, which has not joined the streams yet."""

    output: Tensor  # [num_tokens, hidden]
    mix: HyperMix


def has_seam(config: ModelConfig, device: Device) -> bool:
    """Whether Hopper's kernels of streams have code for the model."""
    return (
        device.is_hopper
        and config.hc_mult == STREAMS
        and config.hidden_size % (8 * RANKS) == 0
        and config.hidden_size <= MAX_JOINED
    )


class DeviceHyper:
    """Before a sublayer: the one behind joins, how this one mixes, and its input."""

    def __init__(self, config: ModelConfig, weights: HyperWeights, device: Device) -> None:
        self._config, self._device = config, device
        self._norm, self._base = device(weights.norm), device(weights.base)
        self._scale, values = device(weights.scale), device(stored(weights.fn).values())
        self._fn: SeamWeights | PortableLinear
        if has_seam(config, device):
            self._fn = pack_seam(values[0], self._scale, self._base, self._norm)
        else:
            self._fn = transpose_linear(values)

    def __call__(
        self,
        streams: Tensor,
        behind: Behind | None,
        carried: Tensor,
        aside: Aside = IN_LINE,
        room: PreparedRows | None = None,
    ) -> tuple[Tensor, HyperMix, Tensor]:
        """Streams (perhaps the ones given, replaced), mix and input of the sublayer ahead.

        The mix may be worked out `aside`. Where `has_seam`, `room` gets the input, too.
        """
        config = self._config
        if isinstance(self._fn, SeamWeights):
            eps = config.rms_norm_eps
            output, mix = (None, None) if behind is None else (behind.output, behind.mix)
            u = join_rows(streams, output, mix, carried, self._norm, eps, room)
            with aside.begin():
                mix = seam_mix(
                    streams,
                    self._fn,
                    num_iters=config.hc_sinkhorn_iters,
                    hc_eps=config.hc_eps,
                    norm_eps=eps,
                )
            return streams, mix, u
        dtype, bf16 = self._device.dtype, self._device.numerics.bf16
        streams = joined(streams, behind, self._config, self._device)
        wide = streams.float()
        mix = hyper_mix_portable(
            wide,
            self._fn,
            self._scale,
            self._base,
            num_iters=config.hc_sinkhorn_iters,
            hc_eps=config.hc_eps,
            norm_eps=config.rms_norm_eps,
        )
        u = collapse_norm_portable(wide, carried, self._norm, config.rms_norm_eps, bf16=bf16)
        return streams, mix, u.to(dtype)


class DeviceLast:
    """Behind the last sublayer: the input of the head."""

    def __init__(self, config: ModelConfig, norm: Tensor, device: Device) -> None:
        self._config, self._device, self._norm = config, device, device(norm)

    def __call__(self, streams: Tensor, behind: Behind, wanted: Tensor | None = None) -> Tensor:
        """[wanted tokens, hidden]; all of them if None. Replaces the streams given."""
        config, bf16, eps = self._config, self._device.numerics.bf16, self._config.rms_norm_eps
        output, mix = behind.output, behind.mix
        if wanted is not None:
            streams, output = streams[wanted], output[wanted]
            mix = HyperMix(*(part[wanted] for part in mix))
        if has_seam(config, self._device):
            return join_rows(streams, output, mix, mix.pre, self._norm, eps)
        streams = joined(streams, Behind(output, mix), config, self._device).float()
        normed = collapse_norm_portable(streams, mix.pre, self._norm, eps, bf16=bf16)
        return normed.to(self._device.dtype)


def joined(streams: Tensor, behind: Behind | None, config: ModelConfig, device: Device) -> Tensor:
    """The streams with what the sublayer behind made, perhaps in place."""
    if behind is None:
        return streams
    output, mix = behind.output, behind.mix
    if has_seam(config, device):
        expand_rows(streams, output, mix)
        return streams
    mixing = mix.post, mix.comb
    bf16 = device.numerics.bf16
    return expand_portable(streams.float(), output.float(), *mixing, bf16=bf16).to(device.dtype)


def begin(ids: Tensor, embed: Tensor, config: ModelConfig, device: Device) -> tuple[Tensor, Tensor]:
    """Streams of tokens, and the pre-mix before the first sublayer."""
    if has_seam(config, device):
        return embed_rows(ids.int(), embed)
    streams = embed[ids].unsqueeze(1).repeat(1, config.hc_mult, 1)
    return streams, first_stream(streams.float())


def means(streams: Tensor, out: Tensor, config: ModelConfig, device: Device) -> None:
    """The mean of the streams into `out` [num_tokens, hidden], a draft feature."""
    if has_seam(config, device):
        mean_rows(streams, out)
        return
    wide = streams.float()
    share = wide.new_full(wide.shape[:2], 1.0 / config.hc_mult)
    out.copy_(collapse_portable(wide, share, bf16=device.numerics.bf16))


def with_engram(
    streams: Tensor,
    both: Tensor,
    weights: tuple[Tensor, Tensor],
    config: ModelConfig,
    device: Device,
) -> Tensor:
    """The streams with each its gated share of Engram's value, perhaps in place."""
    eps = config.rms_norm_eps
    if has_seam(config, device):
        add_engram(streams, both, *weights, eps)
        return streams
    bf16 = device.numerics.bf16
    out = engram_portable(streams.float(), both.float(), *weights, eps, bf16=bf16)
    return out.to(device.dtype)
