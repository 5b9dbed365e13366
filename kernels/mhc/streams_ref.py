"""Reference of `streams.py`: one small product per token, always of the same shape."""

import torch
from torch import Tensor


def collapse_ref(streams: Tensor, pre: Tensor) -> Tensor:
    return torch.bmm(pre.unsqueeze(1), streams).squeeze(1)


def expand_ref(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    weights = torch.cat((comb.transpose(1, 2), post.unsqueeze(2)), 2)
    return torch.bmm(weights, torch.cat((streams, output.unsqueeze(1)), 1))
