"""Packed KV rows: what comes back is what was rounded, and the bytes are the documented ones."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from kernels import native
from kernels.attention.cache_rows import cache_rows, store_rows
from kernels.attention.pools import RowFormat, RowPool
from kernels.attention.pools_ref import pack_rows_ref, unpack_rows_ref

PACKED = (RowFormat.FP8, RowFormat.FP4_E4M3, RowFormat.FP4_UE8M0)
DIMS = (32, 64, 96, 128, 512)
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _best_level() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    native.use()


def rows_of(count: int, dim: int) -> Tensor:
    """Rows of every size that a format has to bear, zeros and the largest codes among them."""
    sizes = torch.tensor([1e-20, 1e-6, 1e-3, 0.1, 1.0, 300.0, 1e5])
    rows = torch.randn(count, dim) * sizes[torch.arange(count) % len(sizes)].unsqueeze(1)
    rows[::9, ::3] = 0.0
    rows[1::9, 0] = -rows[1::9].abs().amax(1)
    return rows


def angles(count: int) -> tuple[Tensor, Tensor]:
    return torch.ones(count, 8), torch.zeros(count, 8)  # rows stay as they are


def empty_pool(row_format: RowFormat, dim: int, rows: int) -> RowPool:
    if row_format is RowFormat.FLOAT:
        return RowPool(torch.zeros(rows, dim), row_format, dim)
    held = torch.zeros(rows, row_format.row_bytes(dim), dtype=torch.uint8)
    return RowPool(held, row_format, dim)


@pytest.mark.parametrize("level", [*native.supported_levels(), native.REFERENCE])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("row_format", RowFormat)
def test_rows_come_back_as_they_were_rounded(row_format: RowFormat, dim: int, level: str) -> None:
    native.use(level)
    rows, slots = rows_of(50, dim), torch.randperm(60)[:50]
    pool = empty_pool(row_format, dim, 61)
    store_rows(rows, *angles(50), pool, slots, bf16=False)
    wanted = cache_rows(rows, *angles(50), row_format=row_format, bf16=False)
    assert torch.equal(pool.gather(slots), wanted)
    untouched = torch.ones(61, dtype=torch.bool)
    untouched[slots] = False
    assert not pool.rows[untouched].any()


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("row_format", PACKED)
def test_bytes_are_those_of_torchs_low_precision_types(row_format: RowFormat, dim: int) -> None:
    rows, slots = rows_of(50, dim), torch.arange(50)
    pool = empty_pool(row_format, dim, 50)
    store_rows(rows, *angles(50), pool, slots, bf16=False)
    assert torch.equal(pool.rows, pack_rows_ref(rows, row_format))
    assert torch.equal(pool.gather(slots), unpack_rows_ref(pool.rows, row_format, dim))


@pytest.mark.parametrize("row_format", PACKED)
def test_every_byte_is_read_alike(row_format: RowFormat) -> None:
    """Also codes and scales that nothing writes: what a poisoned block holds."""
    held = torch.randint(256, (300, row_format.row_bytes(64)), dtype=torch.uint8)
    held[0], held[1] = 0, 0xFF
    pool, slots = RowPool(held, row_format, 64), torch.arange(300)
    scale_bytes = row_format.row_bytes(64) - (64 if row_format is RowFormat.FP8 else 32)
    scales = held[:, -scale_bytes:]
    if row_format is RowFormat.FP4_E4M3:
        scales &= 0x7F  # no scale is negative
    else:
        scales.clamp_(min=1)  # nor below 2^-126
        held[0] = 0
    assert torch.equal(
        pool.gather(slots).nan_to_num(), unpack_rows_ref(held, row_format, 64).nan_to_num()
    )
    found = pool.gather(slots)
    assert not found[0].any()
    assert found[1].isnan().all()


@pytest.mark.parametrize("level", [*native.supported_levels(), native.REFERENCE])
@pytest.mark.parametrize("row_format", RowFormat)
def test_what_is_not_a_number_stays_so_in_its_row_alone(row_format: RowFormat, level: str) -> None:
    native.use(level)
    rows, slots = torch.randn(5, 64), torch.arange(5)
    rows[2, 40] = torch.nan
    pool = empty_pool(row_format, 64, 5)
    store_rows(rows, *angles(5), pool, slots, bf16=False)
    found = pool.gather(slots)
    assert found[2, 40].isnan()
    assert found[2, :32].isfinite().all()
    assert found[torch.tensor([0, 1, 3, 4])].isfinite().all()


def test_pools_of_another_shape_are_refused() -> None:
    for row_format, dim in ((RowFormat.FP8, 64), (RowFormat.FLOAT, 64)):
        with pytest.raises(ValueError, match="RowPool"):
            RowPool(torch.zeros(3, 65, dtype=torch.uint8), row_format, dim)
    pool = empty_pool(RowFormat.FP8, 48, 3)
    with pytest.raises(ValueError, match="no whole groups"):
        store_rows(torch.zeros(1, 48), *angles(1), pool, torch.tensor([0]), bf16=False)
