"""Reference of `gather.py`."""

import torch
from torch import Tensor

from kernels.quant.unpack_ref import unpack_scale_ref


def gather_rows_ref(table: Tensor, scales: Tensor, rows: Tensor) -> Tensor:
    flat = rows.flatten()
    codes = table.view(torch.uint8).index_select(0, flat).view(torch.float8_e4m3fn)
    spread = unpack_scale_ref(scales.view(torch.uint8).index_select(0, flat))
    values = codes.float().unflatten(1, (-1, 32)).mul_(spread.unsqueeze(2))
    return values.reshape(rows.shape[0], rows.shape[1] * table.shape[1])
