"""flashinfer-python: MXFP4 MegaMoE of one rank, FP8 inputs in groups of 128.

Rounding of inputs is not timed, in its favour; nor is copying the routing to where it wants it.
"""

import os
import socket
import sys
from collections.abc import Iterator

import torch
from flashinfer.megamoe import (  # pyright: ignore[reportMissingImports] where it is not
    MegaMoESymmBuffer,
    mxfp4_mega_moe,
    transform_mxfp4_weights_for_mega_moe,
)
from torch import Tensor

from bench.gpu.peers.job import Answer, Job, run
from bench.gpu.peers.mxfp4 import LIMIT, error_of, random_mxfp4
from bench.gpu.routing import ROUTINGS, routings
from bench.gpu.timing import graph_us

GROUP = 128  # inputs that share a scale
GAIN = 2.0**-3  # of each product: its scales may not be smaller than 2^-5
E4M3_MAX = 448.0


def marlin(codes: Tensor) -> Tensor:
    """From two neighbours a byte to positions b (high) and b + 4 (low) of eight."""
    low, high = codes & 15, codes >> 4
    eight = torch.stack((low, high), -1).view(*codes.shape[:-1], -1, 8)
    return ((eight[..., :4] << 4) | eight[..., 4:]).flatten(-2)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 values, and a float32 scale for 128 of a row."""
    groups = x.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True) / E4M3_MAX
    return (groups / scale).flatten(1).to(torch.float8_e4m3fn), scale.squeeze(-1)


def joined() -> torch.distributed.ProcessGroup:
    """A group of this process alone."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("nccl", init_method=address, rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    assert group is not None
    return group


def experts(job: Job) -> Iterator[Answer]:
    """Times by batch and routing."""
    shape, group = job.shape, joined()
    hidden, inter, top_k = shape["hidden"], shape["inter"], shape["top_k"]
    w13 = random_mxfp4(shape["experts"], 2 * inter, hidden, scales=(-5, -3))
    w2 = random_mxfp4(shape["experts"], hidden, inter, scales=(-5, -3))
    packed = transform_mxfp4_weights_for_mega_moe((marlin(w13[0]), w13[1]), (marlin(w2[0]), w2[1]))
    gains = torch.full((shape["experts"],), GAIN, device="cuda")
    buffer = MegaMoESymmBuffer(
        group, shape["experts"], max(job.batches), top_k, hidden, inter, activation_clamp=LIMIT
    )
    shift = round(torch.tensor(GAIN).log2().item())
    scaled = [(codes, (scales.short() + shift).to(torch.uint8)) for codes, scales in (w13, w2)]
    for zipf in job.zipfs:
        for batch in job.batches:
            drawn = routings(batch, shape["experts"], top_k, zipf=zipf)
            ids = [each.cuda().long() for each in drawn]
            x, shares = torch.randn(batch, hidden, device="cuda"), torch.rand(batch, top_k).cuda()
            values, scales = rounded(x)
            buffer.stage(values, scales, ids[0], shares)
            out = torch.full((batch, hidden), float("nan"), device="cuda").bfloat16()

            def route(at: int, ids: list[Tensor] = ids, batch: int = batch) -> None:
                buffer.topk_idx[:batch].copy_(ids[at])
                buffer.commit_staged(batch)

            def call(at: int, out: Tensor = out) -> None:
                route(at)
                mxfp4_mega_moe(out, *packed, buffer, None, None, gains, gains)

            call(0)
            error = error_of(out, x, ids[0], shares, *scaled)
            both, _ = graph_us(call, ROUTINGS)
            copies, _ = graph_us(route, ROUTINGS)
            yield Answer("flashinfer mega_moe fp8", batch, both - copies, zipf, error)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(run(experts))
