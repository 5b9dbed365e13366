"""Grammars of the rows of a step: between its forward and its sampling, while the device works."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.sample_cuda import MaskFlag
from services.executor.flights import Settling
from services.executor.gpu.flight import DraftBuffer, StepFlight
from services.executor.gpu.sampler import Copy, DeviceSampler
from services.executor.interface import LiveRows, Sampled
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.masks.protocol import MaskState

_FLAGS = np.zeros(len(MaskState), np.int32)  # what the sampler knows each MaskState as
_FLAGS[MaskState.FREE], _FLAGS[MaskState.MASK] = MaskFlag.FREE, MaskFlag.MASK


class Masked(NamedTuple):
    """What is known of rows, one array element each."""

    states: NDArray[np.uint8]  # MaskState
    places: NDArray[np.int64]  # at which it may sample, drafts before all but the first

    def some(self, index: NDArray[np.int64]) -> "Masked":
        """Of these rows."""
        return Masked(self.states[index], self.places[index])


class Masking:
    """Asks for masks, and brings them to the device.

    The mask worker's gate knows exact states alone. So it is asked by the launching thread while
    all steps before are settled, and told by the settling thread what became of a step: never by
    both at a time.
    """

    def __init__(self, masks: GrammarMasks | None, sampler: DeviceSampler, copy: Copy) -> None:
        """
        Args:
            masks: None: there are no grammars.
            copy: see `DeviceSampler.flush`.
        """
        self._masks, self._sampler, self._copy = masks, sampler, copy
        self._are_free = True  # the sampler's states of all rows

    def collect(
        self, flight: StepFlight, settling: Settling, behind: Callable[[], None]
    ) -> Masked | None:
        """What is known of each launched row, if any of them samples under a grammar.

        Waits for all steps before to be settled (`behind`), and for masks on their way.
        """
        masks, launched, slots = self._masks, flight.live, settling.slots
        if masks is None:
            return None
        if not (launched.masked & launched.samples).any():

            def look(live: LiveRows, drawn: Sampled) -> Sampled:
                masks.begin(live, slots)
                return drawn

            flight.settle_masks = look
            return None
        behind()
        live = settling.live()
        masks.begin(live, slots)
        own = masks.collect(live, slots)
        flight.settle_masks = lambda live, drawn: masks.settle(live, slots, own, drawn)
        states = np.full(len(launched.rows), MaskState.MISSING, np.uint8)
        places, at = np.ones(len(states), np.int64), np.searchsorted(launched.rows, live.rows)
        states[at] = own
        if launched.drafted.any():
            places[at] = masks.places(live, slots)
        return Masked(states, places)

    def tell(self, drafts: DraftBuffer) -> None:
        """What was drafted, whose masks the worker is to make; called by the settling thread."""
        if self._masks is not None:
            self._masks.draft(*drafts.known())

    def free(self) -> None:
        """All rows sample without a grammar."""
        if not self._are_free:
            self._sampler.states.fill_(MaskFlag.FREE)
            self._are_free = True

    def spread(
        self,
        live: LiveRows,
        masked: Masked,
        room: tuple[Tensor, Tensor],
    ) -> None:
        """MaskState and mask of each place of rows that verify drafts.

        Args:
            room: on the device: masks [rows, places, words] and states [rows, places], int32.
        """
        masks, (words_room, states_room) = self._masks, room
        assert masks is not None
        width = states_room.shape[1]
        flags = np.zeros(tuple(states_room.shape), np.int32)
        num, firsts = len(live.rows), _FLAGS[masked.states]
        flags[:num] = np.where(live.masked, 0, MaskFlag.FREE)[:, None]
        there = np.arange(width) < np.minimum(masked.places, width)[:, None]
        flags[:num][live.masked[:, None] & there] = MaskFlag.MASK
        flags[:num, 0] = firsts
        flags[:num][live.masked & (firsts == 0), 1:] = 0
        self._copy(states_room, flags)
        self._are_free = False
        rows, places = np.nonzero(flags == MaskFlag.MASK)
        if not len(rows):
            return
        last = int(rows[-1]) + 1
        words = np.zeros((last, *words_room.shape[1:]), np.int32)
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            words[row, place] = masks.mask(int(live.slots[row]), place)
        self._copy(words_room[:last], words)

    def send(self, slots: NDArray[np.int64], states: NDArray[np.uint8]) -> None:
        """MaskState and mask of each row that is sampled next, in their order."""
        sampler, masks = self._sampler, self._masks
        assert masks is not None
        flags = np.zeros(sampler.states.shape[0], np.int32)
        flags[: len(slots)] = _FLAGS[states]
        self._copy(sampler.states, flags)
        self._are_free = False
        places = np.flatnonzero(flags == MaskFlag.MASK)
        if not len(places):
            return
        last = int(places[-1]) + 1
        words = np.zeros((last, sampler.masks.shape[1]), np.int32)
        for place in places.tolist():
            words[place] = masks.mask(int(slots[place]))
        self._copy(sampler.masks[:last], words)
