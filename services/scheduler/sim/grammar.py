"""Grammars of the simulator: which tokens may follow, and when an output is complete."""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Grammar

from .hashing import ROOT, mix, mix_many

KIND = "regex"
_SHARE = 3  # one token in so many is illegal at each position


@dataclass(frozen=True, slots=True)
class SimGrammar:
    """The legal tokens depend on all output tokens so far, so that a mask of another position,
    request or epoch lets other tokens through; the output is complete after `length` of them."""

    seed: int
    length: int = 0  # 0: never complete

    @classmethod
    def read(cls, grammar: Grammar) -> "SimGrammar":
        """The grammar behind a message's text."""
        seed, length = grammar.text.removeprefix("sim:").split(":")
        return cls(int(seed), int(length))

    def message(self) -> Grammar:
        """As it travels."""
        return Grammar(KIND, f"sim:{self.seed}:{self.length}")

    @property
    def root(self) -> int:
        """State of a matcher before the first output token."""
        return mix(ROOT, self.seed)

    def legal(self, state: int, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens may follow in this state."""
        return _legal(state, vocab_size)

    def is_complete(self, num_tokens: int) -> bool:
        """Whether nothing may follow so many output tokens."""
        return 0 < self.length <= num_tokens


@lru_cache(maxsize=4096)
def _legal(state: int, vocab_size: int) -> NDArray[np.bool_]:
    draws = mix_many(np.full(vocab_size, state, np.int64), np.arange(vocab_size))
    return draws % _SHARE != 0
