"""Which kind of rows the next group step runs: the ranks step together, so one rank's prefill
stalls all others' decodes, and what the others pad to is lost."""

import numpy as np

from deepmesh.wire.messages import StepKind

from .policy import Geometry
from .request import Phase
from .residency import Residency
from .waiting import WaitingQueue

MAX_PADDING = 2  # padded over real tokens above which decode rows do not ride along
HOLD_STEPS = 2  # a lone prefill waits so long for prefills of other ranks


def choose_kind(decode_tokens: list[int], prefill_tokens: list[int], *, held: int) -> StepKind:
    """A pure function of what each rank could run, and of how long prefill was held back.

    Both together while the padding that the widest rank costs the others stays bounded; else
    decode for a few steps, in the hope of more prefill to run side by side, then prefill alone.
    """
    if not any(prefill_tokens):
        return StepKind.DECODE
    if not any(decode_tokens):
        return StepKind.PREFILL
    both = [d + p for d, p in zip(decode_tokens, prefill_tokens, strict=True)]
    if max(both) * len(both) <= MAX_PADDING * sum(both):
        return StepKind.MIXED
    return StepKind.DECODE if held < HOLD_STEPS else StepKind.PREFILL


class Alignment:
    """Looks at what the ranks could run, and remembers how long prefill was held back."""

    def __init__(self, residency: Residency, waiting: WaitingQueue, geometry: Geometry) -> None:
        self._residency = residency
        self._waiting = waiting
        self._geometry = geometry
        self._ranks = len(residency.memories)
        self._held = 0

    def choose(self) -> StepKind:
        """The kind of the next step; a group of one rank has nobody to wait for."""
        if self._ranks == 1:
            return StepKind.MIXED
        kind = choose_kind(*self._intents(), held=self._held)
        self._held = self._held + 1 if kind == StepKind.DECODE else 0
        return kind

    def _intents(self) -> tuple[list[int], list[int]]:
        """Decode and prefill tokens by rank. A waiting request counts where it would likely go."""
        table, slots = self._residency.table, self._residency.slots
        here = table.resident()
        here = here[~table.leaving[here]]
        decodes = here[table.phase[here] == Phase.DECODE]
        decode = np.bincount(decodes // slots, minlength=self._ranks) * self._geometry.decode_width
        prefills = here[table.phase[here] == Phase.PREFILL]
        left = table.target[prefills] - table.confirmed_kv[prefills] - table.inflight_q[prefills]
        prefill = np.zeros(self._ranks, np.int64)
        np.add.at(prefill, prefills // slots, left)
        residents = np.bincount(here // slots, minlength=self._ranks)
        for request in self._waiting:
            rank = int(residents.argmin())
            if residents[rank] >= self._geometry.max_rows or bool((prefill > 0).all()):
                break
            residents[rank] += 1
            prefill[rank] += len(request.ids)
        budget = np.maximum(0, self._geometry.step_tokens - decode)
        return decode.tolist(), np.minimum(prefill, budget).tolist()
