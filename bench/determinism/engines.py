"""Engines that outlive the executors which use them: weights are loaded once for many rigs."""

import itertools

import numpy as np
from numpy.typing import NDArray

from deepmesh.config import Config
from services.executor.gpu.engine import GpuEngine
from services.executor.interface import LiveRows
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.masks.protocol import MaskState
from services.executor.runner import ModelEngine
from services.executor.slots import SlotTable

NO_EPOCH = -1
_numbers = itertools.count()  # of mask workers


class LateMasks(GrammarMasks):
    """Every mask is there only when it is asked for the second time."""

    def __init__(self, config: Config, name: str) -> None:
        super().__init__(config, name, lambda *_: None)
        self._asked: set[tuple[int, ...]] = set()  # slot, generation, position

    def collect(self, live: LiveRows, slots: SlotTable) -> NDArray[np.uint8]:
        """As the masks do, but late."""
        states = super().collect(live, slots)
        for row in np.flatnonzero(states == MaskState.MASK).tolist():
            slot = int(live.slots[row])
            place = (slot, int(slots.gen[slot]), int(slots.total_len[slot]))
            if place not in self._asked:
                self._asked.add(place)
                states[row] = MaskState.MISSING
        return states


class KeptEngine(ModelEngine):
    """The engine with the real model; `close` only ends its epoch, `end` gives everything back."""

    def __init__(self, config: Config, *, late_masks: bool = False) -> None:
        super().__init__(config, masks=_masks(config, late_masks=late_masks))

    def close(self) -> None:
        """Whatever waits ends; weights, KV and mask worker stay."""
        self.begin_epoch(NO_EPOCH)

    def end(self) -> None:
        """Nobody uses it any more."""
        super().close()


class KeptGpuEngine(GpuEngine):
    """The same on a GPU, or with the GPU's kernels of any shape on a host."""

    def __init__(self, config: Config, *, late_masks: bool = False, on_host: bool = False) -> None:
        masks = _masks(config, late_masks=late_masks)
        super().__init__(config, masks=masks, device="cpu" if on_host else "cuda")

    def close(self) -> None:
        """See `KeptEngine`."""
        self.begin_epoch(NO_EPOCH)

    def end(self) -> None:
        """See `KeptEngine`."""
        super().close()


Kept = KeptEngine | KeptGpuEngine


def kept_engine(config: Config, *, late_masks: bool = False, on_host: bool = False) -> Kept:
    """Of the device that [executor] names; `on_host`: that of a GPU, but on a host."""
    if config.executor.device == "cpu":
        return KeptEngine(config, late_masks=late_masks)
    return KeptGpuEngine(config, late_masks=late_masks, on_host=on_host)


def _masks(config: Config, *, late_masks: bool) -> GrammarMasks:
    name = f"check-{next(_numbers)}"
    return LateMasks(config, name) if late_masks else GrammarMasks(config, name, lambda *_: None)
