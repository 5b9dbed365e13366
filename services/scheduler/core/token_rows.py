"""Rows of steady decode (one token, nothing else) as the wire has them, written in columns."""

from typing import cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import TokenRow

RID_BYTES = 16
WIRE_RID = np.dtype(f"V{RID_BYTES}")  # as one value: copied at once, not byte by byte
_encoder = msgspec.msgpack.Encoder()
# A position of this size takes the widest form, which smaller ones may take, too.
_TEMPLATE = _encoder.encode(TokenRow(rid=bytes(RID_BYTES), pos=1 << 31, ids=bytes(4)))
_RID = 3  # behind the array's byte, and the tag and length of the rid
_POS = _RID + RID_BYTES + 1  # behind its tag
_IDS = _POS + 4 + 2  # behind tag and length
_LAYOUT = np.dtype(
    {
        "names": ["rid", "pos", "ids"],
        "formats": [WIRE_RID, ">u4", "<i4"],
        "offsets": [_RID, _POS, _IDS],
        "itemsize": len(_TEMPLATE),
    }
)


def encode_rows(
    rids: NDArray[np.void], positions: NDArray[np.int64], ids: NDArray[np.int32]
) -> bytes:
    """MessagePack of `TokenRow(rid, position, id)` for each row, one behind the other.

    Args:
        rids: [n], WIRE_RID.
        positions: [n], index of the token in its output.
        ids: [n].
    """
    data = np.frombuffer(bytearray(_TEMPLATE * len(ids)), _LAYOUT)
    data["rid"], data["pos"], data["ids"] = rids, positions, ids
    return data.tobytes()


def join_rows(count: int, encoded: bytes, rows: list[TokenRow]) -> list[TokenRow]:
    """`count` encoded rows and then `rows`, as a list that is encoded already."""
    size = (count + len(rows)).to_bytes(4, "big")
    parts = [b"\xdd", size, encoded, *map(_encoder.encode, rows)]  # an array of 32-bit length
    # msgspec writes Raw as it is, wherever it stands
    return cast("list[TokenRow]", msgspec.Raw(b"".join(parts)))
