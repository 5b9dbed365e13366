"""Layouts of the packed arrays inside messages: numpy structured types, little-endian."""

import numpy as np
from numpy.typing import NDArray

ROW = np.dtype(
    [
        ("rid", "<u8"),
        ("epoch", "<u4"),
        ("slot", "<u4"),
        ("gen", "<u4"),
        ("mode", "u1"),  # messages.RowMode
        ("source", "u1"),  # messages.RowSource
        ("sample", "u1"),  # 1: sample a token behind the last position
        ("grammar", "u1"),
        ("producer_step", "<u8"),  # step that made the input token (source DEVICE)
        ("start_lo", "<u4"),  # first position; exact for source HOST
        ("start_hi", "<u4"),  # upper bound of the first position
        ("q", "<u4"),  # positions the row may write
        ("skip", "<u4"),  # first positions that may leave out the upper layers (prefill)
    ]
)

BLOCK = np.dtype(
    [
        ("slot", "<u4"),
        ("gen", "<u4"),
        ("pool", "<u4"),  # messages.Pool
        ("index", "<u4"),  # logical block index: position // block_size
        ("block", "<u4"),
    ]
)

SLOT = np.dtype([("slot", "<u4"), ("gen", "<u4")])

CANCEL = np.dtype([("rid", "<u8"), ("epoch", "<u4"), ("slot", "<u4")])

RESULT = np.dtype(
    [
        ("rid", "<u8"),
        ("epoch", "<u4"),
        ("slot", "<u4"),
        ("gen", "<u4"),
        ("num_tokens", "<u2"),
        ("done_reason", "u1"),  # messages.DoneReason
        ("num_verified", "u1"),
        ("kv_len", "<u4"),  # positions valid on the device after this row
    ]
)


def pack_ids(ids: "list[int] | range | NDArray[np.int32]") -> bytes:
    """Token or block ids as int32 little-endian bytes."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> NDArray[np.int32]:
    """The array behind `pack_ids`, read-only."""
    return np.frombuffer(data, dtype="<i4")
