"""CRC-32 as zlib defines it, at the speed of a copy: zlib's own takes most of a block's way."""

from isal import isal_zlib


def crc32(data: bytes | memoryview) -> int:
    """The checksum of a payload."""
    return isal_zlib.crc32(data)  # pyright: ignore[reportUnknownMemberType]: an untyped buffer
