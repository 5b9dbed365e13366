"""Random values of any tensor of the released layout, piece by piece, in its stored type. No torch.

A value is a normal deviate, one of 65,536 evenly likely ones, looked up by 16 random bits in a
table of the stored type: a real layer of 7 GB takes seconds and no memory. Standard deviations
keep activations near 1, as a trained model's are.
"""

import functools
import zlib
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from services.executor.tensor_specs import TensorSpec

PIECE_BYTES = 16 << 20
FP8_CODE_STD = 100.0  # of the codes behind the scales: 4.3 deviations fit into e4m3's 448
FP4_CODE_STD = 2.0  # what absmax scaling of 32 normal deviates gives, about
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E8M0_BIAS = 127
_SUFFIX_GAINS = {  # times 1 / sqrt(inputs)
    "attn.wo_a.weight": 2.0,
    "ffn.gate.weight": 2.0,
    "markov_head.embed.weight": 2.0,
    "markov_head.head.weight": 2.0,
    "head.weight": 2.0,
}
_EXPERT_GAIN = 1.5  # SwiGLU makes its output smaller
_PLAIN_STDS = {"hc_attn_base": 0.3, "hc_ffn_base": 0.3, "attn_sink": 0.5, "bias": 0.1}
_BESIDE_ONE = ("norm.weight", "q_weight", "k_weight", "_scale")  # 1 + 0.1 z

Bytes = NDArray[np.uint8]


def random_pieces(spec: TensorSpec, seed: int) -> Iterator[Bytes]:
    """The tensor's bytes in order; a function of its name, shape and `seed` alone."""
    generator = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    table = value_table(spec)
    left, most = spec.num_bytes // table.itemsize, PIECE_BYTES // table.itemsize
    while left:
        count = min(left, most)
        draws = generator.integers(0, 1 << 64, -(-count // 4), dtype=np.uint64)
        yield table[draws.view(np.uint16)[:count]].view(np.uint8)
        left -= count


def value_table(spec: TensorSpec) -> NDArray[np.generic]:
    """What each 16 random bits become."""
    match spec.dtype:
        case "I8":
            return _fp4_pairs()
        case "F8_E4M3":
            return _fp8_codes()
        case "F8_E8M0":
            return _scales(spec)
    mean, std = _moments(spec)
    values = (mean + std * _normal()).astype(np.float32)
    return values if spec.dtype == "F32" else _bfloat16(values)


@functools.cache
def _normal() -> NDArray[np.float64]:
    """Evenly likely deviates, shuffled: neighbours in the table have nothing in common."""
    inverse = NormalDist().inv_cdf
    values = np.array([inverse((i + 0.5) / 65536) for i in range(65536)])
    return np.random.default_rng(0).permutation(values)


@functools.cache
def _fp8_codes() -> NDArray[np.uint8]:
    codes = np.arange(256, dtype=np.int64)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    sizes = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    positive = sizes[:127]  # the last code is NaN
    wanted = np.abs(_normal()) * FP8_CODE_STD
    nearest = np.searchsorted((positive[1:] + positive[:-1]) / 2, wanted)
    return (nearest + 128 * (_normal() < 0)).astype(np.uint8)


@functools.cache
def _fp4_pairs() -> NDArray[np.uint8]:
    """Two values in a byte, from 8 random bits each."""
    inverse = NormalDist().inv_cdf
    values = np.array([inverse((i + 0.5) / 256) for i in range(256)]) * FP4_CODE_STD
    grid = np.array(E2M1)
    nearest = np.searchsorted((grid[1:] + grid[:-1]) / 2, np.abs(values))
    nibbles = (nearest + 8 * (values < 0)).astype(np.uint8)
    pairs = nibbles[None, :] + 16 * nibbles[:, None]
    return pairs.ravel().astype(np.uint8)


def _scales(spec: TensorSpec) -> NDArray[np.uint8]:
    """Two neighbouring powers of two, mixed so that the weights' variance is what it should be."""
    ratio = _weight_std(spec) / (FP4_CODE_STD if ".experts." in spec.name else FP8_CODE_STD)
    lower = int(np.floor(np.log2(ratio)))
    share = ((ratio / 2.0**lower) ** 2 - 1) / 3
    table = np.full(65536, lower + E8M0_BIAS, np.uint8)
    table[: round(65536 * share)] += 1
    return table


def _weight_std(scale: TensorSpec) -> float:
    """Standard deviation of the weights that a scale belongs to, which has 32 inputs a column."""
    if ".engram.embed." in scale.name:
        return 1.0  # a table of rows, no linear
    gain = _EXPERT_GAIN if "experts." in scale.name else 1.0
    gain = _SUFFIX_GAINS.get(scale.name.split(".", 2)[-1].removesuffix("scale") + "weight", gain)
    return gain * (32 * scale.shape[1]) ** -0.5


def _moments(spec: TensorSpec) -> tuple[float, float]:
    name, leaf = spec.name, spec.name.rsplit(".", 1)[-1]
    if name.endswith(_BESIDE_ONE):
        return 1.0, 0.1
    if name == "embed.weight":
        return 0.0, 0.5
    for end, std in _PLAIN_STDS.items():
        if leaf.startswith(end):
            return 0.0, std
    gains = (gain for end, gain in _SUFFIX_GAINS.items() if name.endswith(end))
    return 0.0, next(gains, 1.0) * spec.shape[-1] ** -0.5


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
