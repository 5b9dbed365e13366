"""Numbers that the Engram hash is made of: multipliers and primes. No torch here."""

import functools
import math

import numpy as np

MULTIPLIER_SEED = 10007  # the generator of layer L is seeded with 10007 * L


def hash_multipliers(layer_id: int, compressed_vocab_size: int, order: int) -> tuple[int, ...]:
    """Odd multipliers of one Engram layer, one for each of the last `order` ids.

    They are bounded so that a product with a compressed id stays inside int64.
    Source: DeepSeek-V4.1-Flash reference inference code, Engram.
    """
    bound = max(1, ((2**63 - 1) // compressed_vocab_size) // 2)
    rng = np.random.default_rng(MULTIPLIER_SEED * layer_id)
    draws = rng.integers(0, bound, size=order, dtype=np.int64)
    return tuple(int(draw) * 2 + 1 for draw in draws)


@functools.lru_cache(maxsize=8)
def table_primes(
    num_layers: int, order: int, num_heads: int, base: int
) -> tuple[tuple[int, ...], ...]:
    """Primes of every Engram layer, flat over (n-gram order 2..order, head).

    A prime is used once in the whole model; each order starts again just below `base`.
    The sum over a layer is the number of rows of its table.
    """
    used: set[int] = set()
    layers: list[tuple[int, ...]] = []
    for _ in range(num_layers):
        flat: list[int] = []
        for _ in range(order - 1):
            candidate = base - 1
            for _ in range(num_heads):
                candidate += 1
                while candidate in used or not _is_prime(candidate):
                    candidate += 1
                used.add(candidate)
                flat.append(candidate)
        layers.append(tuple(flat))
    return tuple(layers)


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % d for d in range(3, math.isqrt(number) + 1, 2))
