"""Reference of `gate.py`."""

from torch import Tensor

from kernels.attention.select_ref import mask_to_indices_ref, top_k_mask_ref
from kernels.quant.pointwise_ref import softplus_ref


def route_ref(
    scores: Tensor, bias: Tensor, top_k: int, scaling: float, temperature: float
) -> tuple[Tensor, Tensor]:
    affinity = softplus_ref(scores / temperature).sqrt_()
    # A token whose numbers are not finite still needs experts; its weights stay NaN.
    choice = (affinity + bias).nan_to_num_(nan=0.0)
    expert_ids = mask_to_indices_ref(top_k_mask_ref(choice, top_k), top_k)
    chosen = affinity.gather(1, expert_ids)
    total = chosen[:, :1].clone()
    for slot in range(1, top_k):  # plain additions in a fixed order
        total += chosen[:, slot : slot + 1]
    return expert_ids, chosen.div_(total.add_(1e-20)).mul_(scaling)
