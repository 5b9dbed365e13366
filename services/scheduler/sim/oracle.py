"""The token oracle: every request's output in closed form, whatever the schedule was."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .grammar import SimGrammar
from .hashing import ROOT, mix, mix_many


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


def next_tokens(
    chains: NDArray[np.int64],
    seeds: NDArray[np.uint64],
    sub_indices: NDArray[np.uint64],
    vocab_size: int,
) -> NDArray[np.int64]:
    """`next_token` of many prefixes."""
    return mix_many(mix_many(chains, seeds), sub_indices) % vocab_size


def expected_output(
    prompt: list[int],
    *,
    seed: int,
    sub_index: int,
    vocab_size: int,
    max_tokens: int,
    min_tokens: int,
    stop_ids: frozenset[int],
    grammar: SimGrammar | None = None,
) -> tuple[list[int], str]:
    """All output tokens of a request that nobody disturbs, and why it ends."""
    state = chain_of(prompt)[-1]
    matcher = grammar.root if grammar else 0
    output: list[int] = []
    while True:
        token = sample(
            next_token(state, seed, sub_index, vocab_size),
            banned=stop_ids if len(output) < min_tokens else frozenset(),
            legal=grammar.legal(matcher, vocab_size) if grammar else None,
            vocab_size=vocab_size,
        )
        output.append(token)
        state = mix(state, token)
        if token in stop_ids:
            return output, "stop"
        if grammar:
            matcher = mix(matcher, token)
            if grammar.is_complete(len(output)):
                return output, "grammar"
        if len(output) >= max_tokens:
            return output, "length"


def sample(
    token: int, *, banned: frozenset[int], legal: NDArray[np.bool_] | None, vocab_size: int
) -> int:
    """The oracle's `token`; where it may not come, the next id that may."""
    for _ in range(vocab_size):
        if token not in banned and (legal is None or legal[token]):
            return token
        token = (token + 1) % vocab_size
    raise AssertionError("no token is left to sample")
