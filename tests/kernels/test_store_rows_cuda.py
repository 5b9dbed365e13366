"""Packed cache rows written by a GPU against the references, and their bits."""

import pytest
import torch
from torch import Tensor

from kernels.attention.packed_rows import (
    pack_compressed_rows,
    pack_keys,
    pack_window_rows,
    unpack_compressed_rows,
    unpack_keys,
    unpack_window_rows,
)
from kernels.attention.rope_ref import rotate_ref
from kernels.attention.store_rows_cuda import DIMS, PackedFormat, store_rows_decode
from kernels.mhc.rms_norm_ref import rms_norm_ref

ENTRIES = 32


def packed(x: Tensor, packed_format: PackedFormat) -> Tensor:
    match packed_format:
        case PackedFormat.WINDOW:
            return pack_window_rows(x)
        case PackedFormat.COMPRESSED:
            return pack_compressed_rows(x)
        case PackedFormat.KEY:
            return pack_keys(x, ENTRIES)


def unpacked(pool: Tensor, packed_format: PackedFormat) -> Tensor:
    match packed_format:
        case PackedFormat.WINDOW:
            return unpack_window_rows(pool)
        case PackedFormat.COMPRESSED:
            return unpack_compressed_rows(pool)
        case PackedFormat.KEY:
            return unpack_keys(pool, ENTRIES)


@pytest.mark.gpu
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("packed_format", list(PackedFormat))
def test_stored_rows_are_those_of_the_reference(
    packed_format: PackedFormat, with_norm: bool
) -> None:
    torch.manual_seed(packed_format)
    dim, rows, slots = DIMS[packed_format], 50, 4 * ENTRIES
    groups = torch.exp2(torch.randint(-6, 4, (rows, dim // 16, 1)).float())
    x = (torch.randn(rows, dim // 16, 16) * groups).flatten(1)
    x[7] = 0.0
    x = torch.cat((torch.zeros(rows, 8), x), 1).bfloat16()  # a part of a wider product
    angles, norm = torch.rand(rows, 32) * 6.28, torch.rand(dim) + 0.5
    at = torch.randperm(slots)[:rows].int()
    at[3] = -1

    def run(part: slice) -> Tensor:
        pool = packed(torch.zeros(slots, dim), packed_format).cuda()
        store_rows_decode(
            x.cuda()[part, 8:],
            (angles[part].cos().cuda(), angles[part].sin().cuda()),
            pool,
            at[part].cuda(),
            packed_format,
            norm=norm.cuda() if with_norm else None,
            eps=1e-20,
            entries=ENTRIES,
        )
        return unpacked(pool.cpu(), packed_format)

    pool = run(slice(rows))
    given = x[:, 8:].float()
    if with_norm:
        given = rms_norm_ref(given, norm, 1e-20).bfloat16().float()
    turned = rotate_ref(given, angles.cos(), angles.sin()).bfloat16().float()
    kept = at >= 0
    want = torch.zeros(slots, dim)
    want[at[kept].long()] = turned[kept]
    want = unpacked(packed(want, packed_format), packed_format)
    if with_norm:  # a value near a tie may round the other way
        finite = ~torch.isnan(want)
        assert float((pool[finite] == want[finite]).float().mean()) > 0.998
        torch.testing.assert_close(pool[finite], want[finite], rtol=0.35, atol=1e-2)
    else:
        assert torch.equal(pool, want)
    alone = run(slice(5, 6))
    assert torch.equal(alone[at[5].long()], pool[at[5].long()])
