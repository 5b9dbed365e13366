"""Linears of a layer of V4.1-Flash, and its head, beside torch's bfloat16 products."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.gpu.timing import Rates, graph_us
from deepmesh.report import Json
from kernels.quant.linear_bf16_cuda import PackedBf16, linear_bf16, pack_linear_bf16
from kernels.quant.linear_cuda import PackedLinear, linear_fp8_decode, pack_linear_fp8
from kernels.quant.linear_prefill_cuda import linear_prefill
from kernels.quant.rows_prefill_cuda import expand_linear, round_rows

SETS_BYTES = 160 << 20  # weights in turn, so that those of one call hardly wait in the L2
MAX_SETS = 8


@dataclass(frozen=True)
class Shape:
    """Groups of linears side by side."""

    name: str
    groups: int
    outputs: int  # of each group
    depth: int  # inputs of each group
    rounds: bool  # inputs are rounded to FP8, weights are FP8; else bfloat16

    @property
    def weights(self) -> int:
        """Of all groups."""
        return self.groups * self.outputs * self.depth

    @property
    def weight_bytes(self) -> float:
        """As the checkpoint stores them: `wo_a` is FP8 there, the head is not."""
        return self.weights * (2 if self.name == "head" else 1 + 1 / 1024)


SHAPES = (
    Shape("wq_a+wkv", 1, 1792, 5120, True),
    Shape("wq_b", 1, 32768, 1280, True),
    Shape("wo_a", 8, 1024, 4096, False),
    Shape("wo_b", 1, 5120, 8192, True),
    Shape("shared w13", 1, 4608, 5120, True),
    Shape("shared w2", 1, 5120, 2304, True),
    Shape("head", 1, 129280, 5120, False),
)


def fp8(shape: Shape) -> PackedLinear:
    """e4m3 codes and ue8m0 scales, random."""
    size = shape.groups, shape.outputs, shape.depth
    codes = torch.randint(0, 120, size, device="cuda")
    blocks = shape.groups, shape.outputs // 32, shape.depth // 32
    scale = torch.randint(113, 119, blocks, device="cuda")
    return pack_linear_fp8(codes.to(torch.uint8), scale.to(torch.uint8))


def bf16(shape: Shape) -> PackedBf16:
    """Random values."""
    size = shape.groups, shape.outputs, shape.depth
    return pack_linear_bf16(torch.randn(size, device="cuda", dtype=torch.bfloat16))


class Weights:
    """One shape's, several times, and those of torch."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.sets = max(1, min(MAX_SETS, round(SETS_BYTES / shape.weight_bytes)))
        self.fp8 = [fp8(shape) for _ in range(self.sets)] if shape.rounds else []
        self.bf16 = [] if shape.rounds else [bf16(shape) for _ in range(self.sets)]
        size = shape.groups, shape.depth, shape.outputs
        plain = [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(self.sets)]
        self.plain = plain

    def peer(self, x: Tensor, at: int) -> Tensor:
        """torch's product; x [groups, num_tokens, depth]."""
        return torch.bmm(x, self.plain[at])


def _inputs(shape: Shape, tokens: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(tokens, shape.groups * shape.depth, device="cuda").bfloat16()
    return x, x.view(tokens, shape.groups, -1).transpose(0, 1).contiguous()


def decode_cases(rates: Rates, batches: list[int]) -> Iterator[dict[str, Json]]:
    """Few rows: rounding of the inputs, product, and what joins slices of K."""
    for shape in SHAPES:
        held = Weights(shape)
        for batch in batches:
            x, split = _inputs(shape, batch)
            if shape.rounds:
                times = graph_us(lambda at, x=x, w=held.fp8: linear_fp8_decode(x, w[at]), held.sets)
            else:
                times = graph_us(lambda at, x=x, w=held.bf16: linear_bf16(x, w[at]), held.sets)
            peer_us, _ = graph_us(lambda at, x=split, w=held: w.peer(x, at), held.sets)
            read = shape.weight_bytes + 2 * batch * shape.groups * (shape.outputs + shape.depth)
            flops = 2.0 * batch * shape.weights
            case = rates.case("linear", f"{shape.name} B={batch}", times, read=read, flops=flops)
            case["peers"] = {"torch bf16": round(peer_us, 2)}
            yield case
        del held


def prefill_cases(rates: Rates, tokens: int) -> Iterator[dict[str, Json]]:
    """Many rows: rounding of the inputs, expansion of the weights, product."""
    for shape in SHAPES:
        if shape.name == "head":  # of a prompt, one row
            continue
        held = Weights(shape)
        x, split = _inputs(shape, tokens)

        def ours(at: int, x: Tensor = x, held: Weights = held) -> Tensor:
            if held.shape.rounds:
                return linear_prefill(round_rows(x), expand_linear(held.fp8[at]))
            return linear_prefill(x, held.bf16[at])

        times = graph_us(ours, held.sets)
        peer_us, _ = graph_us(lambda at, x=split, w=held: w.peer(x, at), held.sets)
        read = shape.weight_bytes + 2 * tokens * shape.groups * (shape.outputs + shape.depth)
        flops = 2.0 * tokens * shape.weights
        name = f"{shape.name} {tokens} tokens"
        case = rates.case("linear_prefill", name, times, read=read, flops=flops)
        case["peers"] = {"torch bf16": round(peer_us, 2)}
        yield case
        del held, ours
