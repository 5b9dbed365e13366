"""The token oracle: every request's output in closed form, whatever the schedule was."""

from collections.abc import Iterable

_MASK = (1 << 63) - 1
ROOT = 0x5EED


def mix(state: int, value: int) -> int:
    """One step of a 63-bit hash (the finaliser of splitmix64)."""
    x = (state * 0x9E3779B97F4A7C15 + value + 0x632BE59BD9B4E019) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 31)) & _MASK


def chain_of(ids: Iterable[int], start: int = ROOT) -> list[int]:
    """Hash of all tokens up to and including each position."""
    chain: list[int] = []
    state = start
    for token in ids:
        state = mix(state, token)
        chain.append(state)
    return chain


def next_token(chain: int, seed: int, sub_index: int, vocab_size: int) -> int:
    """The token behind a prefix: a function of prefix, seed and sub-index only."""
    return mix(mix(chain, seed), sub_index) % vocab_size


def expected_output(
    prompt: list[int],
    *,
    seed: int,
    sub_index: int,
    vocab_size: int,
    max_tokens: int,
    min_tokens: int,
    stop_ids: frozenset[int],
) -> tuple[list[int], str]:
    """All output tokens of a request that nobody disturbs, and why it ends."""
    state = chain_of(prompt)[-1]
    output: list[int] = []
    while True:
        token = sample(state, seed, sub_index, vocab_size, stop_ids, len(output) < min_tokens)
        output.append(token)
        state = mix(state, token)
        if token in stop_ids:
            return output, "stop"
        if len(output) >= max_tokens:
            return output, "length"


def sample(
    chain: int, seed: int, sub_index: int, vocab_size: int, stop_ids: frozenset[int], banned: bool
) -> int:
    """The oracle's token; where stop ids are `banned`, the next id that is not one."""
    token = next_token(chain, seed, sub_index, vocab_size)
    while banned and token in stop_ids:
        token = (token + 1) % vocab_size
    return token
