"""Seeds of requests, and of the choices of one request (`n` in the OpenAI protocols)."""

SEED_BITS = 53  # of seeds that a gateway draws: every JSON reader holds them exactly
_MASK = (1 << 63) - 1


def derived_seed(seed: int, choice: int) -> int:
    """The seed of one choice, seed + choice: a request with this seed has the same output.

    Args:
        seed: of the request, 0 <= seed < 2**63.
        choice: index from 0 on.
    """
    return (seed + choice) & _MASK
