"""CRC-32 as zlib defines it, at the speed of a copy: zlib's own takes most of a block's way."""

from isal import isal_zlib


def crc32(data: bytes | memoryview, before: int = 0) -> int:
    """The checksum of a payload; of the rest of one, `before` being that of what comes first."""
    return isal_zlib.crc32(data, before)  # pyright: ignore[reportUnknownMemberType]: an untyped buffer
