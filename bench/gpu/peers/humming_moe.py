"""humming-kernels: two indexed MXFP4 products and the activation between them.

Sorting rows by expert and the weighted sum are not timed, in its favour.
"""

import sys
from collections.abc import Iterator

import torch
from humming.forward import (  # pyright: ignore[reportMissingImports] where it is not
    may_process_input,
)
from humming.layer import (  # pyright: ignore[reportMissingImports] where it is not
    HummingLayer,
    HummingLayerMethod,
)
from torch import Tensor

from bench.gpu.peers.job import Answer, Job, run
from bench.gpu.peers.mxfp4 import LIMIT, error_of, random_mxfp4
from bench.gpu.routing import ROUTINGS, routings
from bench.gpu.timing import graph_us

GATE = f"fminf(a, {LIMIT}f)"
SWIGLU = f"{GATE} / (1.0f + __expf(-{GATE})) * fmaxf(-{LIMIT}f, fminf(b, {LIMIT}f))"
INPUTS = {"bf16": "bfloat16", "fp8": "float8e4m3"}  # of the multiplication


class Experts:
    """One layer's, with inputs of one type."""

    def __init__(self, experts: int, hidden: int, inter: int, input_type: str) -> None:
        scale = -round(torch.tensor(float(hidden)).log2().item() / 2) - 2
        self.w13 = random_mxfp4(experts, 2 * inter, hidden, scales=(scale, scale + 2))
        self.w2 = random_mxfp4(experts, hidden, inter, scales=(scale, scale + 2))
        self.up = self._layer(self.w13, experts, input_type)
        self.down = self._layer(self.w2, experts, input_type)
        self.up_tuning, self.down_tuning = map(_tuning, (self.up, self.down))

    @staticmethod
    def _layer(weights: tuple[Tensor, Tensor], experts: int, input_type: str) -> HummingLayer:
        codes, scales = weights
        with torch.device("cuda"):
            layer = HummingLayer(
                shape_n=codes.shape[1],
                shape_k=2 * codes.shape[2],
                weight_config={"quant_method": "mxfp4"},
                input_config={"dtype": input_type},
                num_experts=experts,
                torch_dtype=torch.bfloat16,
            )
        layer.load_from_tensors({"weight": codes, "weight_scale": scales})
        layer.transform()
        return layer

    def sorted_rows(self, ids: Tensor, tuning: list[tuple[int, int, dict]]) -> dict[str, Tensor]:
        """Rows by expert, in whole blocks of the kernel that this many rows get."""
        rows = ids.numel()
        block = next(kept for first, last, kept in tuning if first < rows <= last)
        size = block["block_shape"][0]
        order: list[Tensor] = []
        experts: list[int] = []
        for expert in ids.unique().tolist():
            own = (ids.flatten() == expert).nonzero().flatten()
            count = -(-len(own) // size)
            order.append(torch.nn.functional.pad(own, (0, count * size - len(own)), value=rows))
            experts += [expert] * count
        flat = torch.cat(order).int().cuda()
        return {
            "sorted_ids": flat,
            "expert_ids": torch.tensor(experts, dtype=torch.int32, device="cuda"),
            "num_tokens_padded": torch.tensor(len(flat), dtype=torch.int32, device="cuda"),
        }

    def slots(
        self, x: Tensor, up: dict[str, Tensor], down: dict[str, Tensor], top_k: int
    ) -> Tensor:
        """[tokens · top_k, hidden]: what each expert gives, unweighted."""
        kept = {"compute_config": {"gemm_type": "indexed"}}
        both = self.up(x, **up, top_k=top_k, tuning_config=self.up_tuning, **kept)
        config = self.down.humming_config
        assert config is not None
        hidden, groups, tokens = may_process_input(
            config, both, activation_type="binary_split", activation_impl=SWIGLU
        )
        scale = tokens if groups is None else groups
        return self.down(
            hidden, input_scale=scale, **down, top_k=1, tuning_config=self.down_tuning, **kept
        )


def _tuning(layer: HummingLayer) -> list[tuple[int, int, dict]]:
    return HummingLayerMethod.get_default_tuning_configs(layer, gemm_type="indexed")


def experts(job: Job) -> Iterator[Answer]:
    """Times by type of input, routing and batch."""
    for name, input_type in INPUTS.items():
        shape = job.shape
        layer = Experts(shape["experts"], shape["hidden"], shape["inter"], input_type)
        for zipf in job.zipfs:
            for batch in job.batches:
                us, error = timed(layer, batch, zipf, shape)
                yield Answer(f"humming {name}", batch, us, zipf, error)
        del layer
        torch.cuda.empty_cache()


def timed(
    layer: Experts, batch: int, zipf: float, shape: dict[str, int]
) -> tuple[float, float | None]:
    """(time, relative error) of one case."""
    top_k, hidden = shape["top_k"], shape["hidden"]
    ids = routings(batch, shape["experts"], top_k, zipf=zipf)
    x, shares = torch.randn(batch, hidden).bfloat16().cuda(), torch.rand(batch, top_k).cuda()
    places = [
        (layer.sorted_rows(i, layer.up_tuning), layer.sorted_rows(i, layer.down_tuning))
        for i in ids
    ]
    out = layer.slots(x, *places[0], top_k)
    joined = (out.view(batch, top_k, hidden).float() * shares[..., None]).sum(1)
    error = error_of(joined, x, ids[0].cuda(), shares, layer.w13, layer.w2)
    median, _ = graph_us(lambda at: layer.slots(x, *places[at], top_k), ROUTINGS)
    return median, error


if __name__ == "__main__":
    torch.manual_seed(0)
    sys.exit(run(experts))
