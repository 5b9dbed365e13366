"""Names of prefixes: chained hashes of blocks, the same in schedulers, kvstores and the router."""

import hashlib

import numpy as np
from numpy.typing import NDArray

HASH_BYTES = 16


def root_hash(salt: bytes, fingerprint: str) -> bytes:
    """Start of a chain: equal tokens meet only under the same salt and the same weights."""
    return hashlib.blake2b(
        fingerprint.encode() + b"\0" + salt, digest_size=HASH_BYTES, person=b"deepmesh"
    ).digest()


def extend_chain(
    chain: list[bytes], root: bytes, ids: NDArray[np.int32], block_size: int, end: int
) -> None:
    """Append the hashes of the full blocks of `ids[:end]` that `chain` does not have yet."""
    for index in range(len(chain), end // block_size):
        parent = chain[-1] if chain else root
        block = ids[index * block_size : (index + 1) * block_size].tobytes()
        chain.append(hashlib.blake2b(parent + block, digest_size=HASH_BYTES).digest())
