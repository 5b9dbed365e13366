"""Tokens of a step from its logits on a device: `csrc/sample.cu`, and `csrc/sample_portable.cu` for
hosts. Both compute the same bits, which are those of the CPU's kernels.

Nothing here reads the device or allocates, so it can be part of a graph: what a row asks for is a
record of its slot, decided upon on the device.
"""

import ctypes
import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import numpy as np
import torch
from torch import Tensor

from kernels import cuda, portable

MAX_TOP = 20  # best ids of a row
RECORD_WORDS = 16
CHANGE_WORDS = 1 + RECORD_WORDS
ROW_FIELDS = 3
IN_PROMPT = 1 << 30  # beside the count in the output, in a slot's counts
MAX_FAST_IDS = 5120 * 256  # of a vocabulary that sample.cu has room for
_FLAGS = ("-fmad=false",)  # as on the CPU: products and sums are rounded one by one
_PLANES = 4  # token, whether it is one, log-probability, number of best ids
_OUT_WORDS = _PLANES + 2 * MAX_TOP


class Has(IntFlag):
    """Parts of a slot's table, in the order in which they lie there."""

    BANS = 4  # bits of the ids that may be sampled at all, [words]
    STOPS = 8  # bits of the ids that may not below the least length, [words]
    BIAS = 2  # float32, [vocab_size]
    PENALTIES = 1  # how often each id was sampled, and IN_PROMPT, [vocab_size]
    WORDS = (
        16  # number, size of the ring, ids that went into it; ring; where words begin; their ids
    )


# A slot, and its record: temperature, top_p, min_p, top_k; presence, frequency and repetition
# penalty, Has; seed, sub_index, address of the table; least length, number of best ids (-1: no
# log-probabilities).
CHANGE = struct.Struct("<i3fi3fi3Q2i")
assert CHANGE.size == 4 * CHANGE_WORDS


class MaskFlag(IntEnum):
    """Of a row; with any other value it samples nothing."""

    MASK = 1
    FREE = 2


def mask_words(vocab_size: int) -> int:
    """Words of 32 ids."""
    return -(-vocab_size // 32)


@dataclass(frozen=True)
class SampleOut:
    """Results at fixed addresses, all of them views of one tensor."""

    all: Tensor  # [everything], int32: one copy brings it to the host
    tokens: Tensor  # [max_rows], int32
    found: Tensor  # [max_rows], int32: 1 if that is a token, 0 if nothing was sampled
    logprobs: Tensor  # [max_rows], float32; 0 where none is asked for
    num_top: Tensor  # [max_rows], int32
    top_ids: Tensor  # [max_rows, MAX_TOP], int32, best first; num_top of them count
    top_logprobs: Tensor  # [max_rows, MAX_TOP], float32

    @staticmethod
    def over(whole: Tensor) -> "SampleOut":
        """Views of a tensor on any device."""
        rows = whole.shape[0] // _OUT_WORDS
        planes = whole[: _PLANES * rows].view(_PLANES, rows)
        best = whole[_PLANES * rows :].view(2, rows, MAX_TOP)
        logprobs, top_logprobs = planes[2].view(torch.float32), best[1].view(torch.float32)
        return SampleOut(whole, planes[0], planes[1], logprobs, planes[3], best[0], top_logprobs)


@dataclass(frozen=True)
class SampleBuffers:
    """What a graph of `sample_rows` reads and writes beside its logits and rows."""

    records: Tensor  # [num_slots, RECORD_WORDS], int32, as in CHANGE
    states: Tensor  # [max_rows], int32: MaskFlag
    masks: Tensor  # [max_rows, words], int32: bit i % 32 of word i // 32 allows id i
    out: SampleOut
    scratch: Tensor  # int64, all zero between two calls
    vocab_size: int

    @staticmethod
    def of(num_slots: int, vocab_size: int, max_rows: int, device: torch.device) -> "SampleBuffers":
        """All rows free."""
        words = mask_words(vocab_size)

        def ints(*shape: int, value: int = 0) -> Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=device)

        return SampleBuffers(
            ints(num_slots, RECORD_WORDS),
            ints(max_rows, value=MaskFlag.FREE),
            ints(max_rows, words),
            SampleOut.over(ints(max_rows * _OUT_WORDS)),
            torch.zeros(max_rows * scratch_words(vocab_size), dtype=torch.int64, device=device),
            vocab_size,
        )


def scratch_words(vocab_size: int) -> int:
    """Of a row, eight bytes each; see `Scratch` and `Space` in sample.cu."""
    units, sums, groups = (-(-vocab_size // size) for size in (256, 1024, 8))
    return 771 + units + 1 + -(-sums // 2) + -(-groups // 8)


def sample_rows(logits: Tensor, rows: Tensor, starts: Tensor, buffers: SampleBuffers) -> None:
    """One token for each row that samples.

    As on the CPU: `apply_penalties`, bias, bans, `sample_tokens`, `token_logprobs` of the logits as
    they came.

    Args:
        logits: [num_rows, vocab_size], float32, rows of any stride.
        rows: [num_rows, ROW_FIELDS], int32: slot, count of positions, what to do behind the last
            one: 0 nothing, 1 sample. The 1 of a row without its mask becomes 2: MISSED. A slot -1
            is padding.
        starts: [num_rows], int32: the first position of each row; the token's is start + count.
        buffers: those of all steps. Ids that slots count and remember grow by what is sampled.
    Bits of a row depend on that row alone, and are those of the CPU's kernels, unless two double
    logarithms that differ in the last bit round to different floats.
    """
    num_rows, vocab_size = logits.shape
    out, masks = buffers.out, buffers.masks
    assert logits.dtype is torch.float32, logits.dtype
    assert logits.stride(1) == 1, "logits of a row lie side by side"
    assert rows.is_contiguous(), "rows are contiguous"
    assert starts.is_contiguous(), "starts are contiguous"
    if vocab_size != buffers.vocab_size or num_rows > masks.shape[0]:
        raise ValueError(f"logits: {list(logits.shape)} for {list(masks.shape)} words of masks")
    if rows.shape != (num_rows, ROW_FIELDS) or starts.shape != (num_rows,):
        raise ValueError(f"rows: {list(rows.shape)}, starts: {list(starts.shape)} for {num_rows}")
    if num_rows == 0:
        return
    addresses = [rows, starts, buffers.records, buffers.states, masks]
    arguments = np.array(
        [
            logits.data_ptr(),
            logits.stride(0),
            vocab_size,
            num_rows,
            *[tensor.data_ptr() for tensor in addresses],
            masks.shape[1],
            np.float64(2.0 ** (63 - max(11, vocab_size.bit_length()))).view(np.int64),
            out.all.data_ptr(),
            out.tokens.shape[0],
            buffers.scratch.data_ptr(),
        ],
        np.int64,
    )
    if not logits.is_cuda or vocab_size > MAX_FAST_IDS:
        portable.run("sampling", "sample_portable", "sample", logits[0], arguments.ctypes.data)
        return
    stream = torch.cuda.current_stream(logits.device).cuda_stream
    address = ctypes.c_void_p(arguments.ctypes.data)
    library = cuda.load("sampling", "sample", _FLAGS)
    cuda.check(library.sample(ctypes.c_void_p(logits.data_ptr()), address, ctypes.c_void_p(stream)))


def put_records(changes: int, count: int, buffers: SampleBuffers) -> None:
    """Bring records of slots up to date.

    Args:
        changes: address of `count` CHANGE, in memory of the device or pinned memory of the host.
    """
    portable.run("sampling", "sample_portable", "put_records", changes, count, buffers.records)
