"""Engines that outlive the executors which use them: weights are loaded once for many rigs."""

import itertools

from deepmesh.config import Config
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.runner import ModelEngine

NO_EPOCH = -1
_numbers = itertools.count()  # of mask workers


class KeptEngine(ModelEngine):
    """The engine with the real model; `close` only ends its epoch, `end` gives everything back."""

    def __init__(self, config: Config) -> None:
        masks = GrammarMasks(config, f"check-{next(_numbers)}", lambda *_: None)
        super().__init__(config, masks=masks)

    def close(self) -> None:
        """Whatever waits ends; weights, KV and mask worker stay."""
        self.begin_epoch(NO_EPOCH)

    def end(self) -> None:
        """Nobody uses it any more."""
        super().close()
