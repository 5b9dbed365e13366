"""What `philox_bits` means, one block at a time in plain integers."""

MASK = (1 << 64) - 1
MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)


def philox_bits_ref(
    seed: int, sub_index: int, *, position: int, purpose: int, num: int
) -> list[int]:
    """See `philox_bits`."""
    words: list[int] = []
    block = 1
    while len(words) < num:
        for word in philox_block((block, position, purpose, 0), (seed, sub_index)):
            words += [word & 0xFFFFFFFF, word >> 32]
        block += 1
    return words[:num]


def philox_block(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x64."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        first, second = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 64) ^ c1 ^ k0,
            second & MASK,
            (first >> 64) ^ c3 ^ k1,
            first & MASK,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3
