"""FP8 linears on a GPU beside what they must read, and beside bfloat16 products of the same shapes.

`make bench NAME=gpu_linear ARGS=--json`. The attention's matrices of a layer of V4.1-Flash. Each
timing replays a CUDA graph over several weights. The floor is the larger of two times: the bytes
over the rate of a plain read-only sum, and the products over the rate of a large bfloat16 matrix
product, both of the same run. The peer reads twice the bytes, and its bits depend on the number
of rows.
"""

import argparse
import sys

import torch
from torch import Tensor

from bench.gpu_attention import Rates
from bench.gpu_experts import graph_us
from deepmesh.report import Json, publish, report
from kernels.quant.linear_cuda import PackedLinear, linear_fp8_decode, pack_linear_fp8

SHAPES = {  # groups, outputs and inputs of each
    "wq_a+wkv": (1, 1792, 5120),
    "wq_b": (1, 32768, 1280),
    "wo_a": (8, 1024, 4096),
    "wo_b": (1, 5120, 8192),
}
SETS = 4  # at least 36 MB: those of one call hardly wait in the L2 for the next


def random_weight(groups: int, outputs: int, depth: int) -> PackedLinear:
    """e4m3 codes and ue8m0 scales."""
    codes = torch.randint(0, 120, (groups, outputs, depth), device="cuda")
    scale = torch.randint(113, 119, (groups, outputs // 32, depth // 32), device="cuda")
    return pack_linear_fp8(codes.to(torch.uint8), scale.to(torch.uint8))


def cases_of(name: str, batches: list[int], rates: Rates) -> list[dict[str, Json]]:
    """One matrix, all batches."""
    groups, outputs, depth = SHAPES[name]
    weights = [random_weight(groups, outputs, depth) for _ in range(SETS)]
    plain = [
        torch.randn(groups, depth, outputs, device="cuda", dtype=torch.bfloat16)
        for _ in range(SETS)
    ]
    cases: list[dict[str, Json]] = []
    for batch in batches:
        x = torch.randn(batch, groups * depth, device="cuda").bfloat16()
        split = x.view(batch, groups, depth).transpose(0, 1).contiguous()

        def peer(at: int, split: Tensor = split) -> Tensor:
            return torch.bmm(split, plain[at])

        times = graph_us(lambda at, x=x: linear_fp8_decode(x, weights[at]), SETS)
        size = groups * outputs * depth
        moved = batch * groups * (outputs + depth) * 2
        case = rates.case("linear_fp8", f"{name} B={batch}", times, size + moved, 2 * batch * size)
        case["peers"] = {"torch bf16": round(graph_us(peer, SETS)[0], 2)}
        print(case, file=sys.stderr, flush=True)
        cases.append(case)
    return cases


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    rates = Rates()
    batches = arguments.batch or [1, 16, 32, 64, 128, 256, 2048]
    cases = [case for name in SHAPES for case in cases_of(name, batches, rates)]
    config: dict[str, Json] = {
        "read_gbps": round(rates.read / 1e9, 1),
        "bf16_tflops": round(rates.flops / 1e12, 1),
    }
    found = report(
        "bench gpu_linear", config=config, cases=cases, ok=True, gpu=torch.cuda.get_device_name()
    )
    publish(found, name="gpu_linear", as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
