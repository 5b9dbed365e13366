"""Which kind of rows the next group step runs: the ranks step together, so one rank's prefill
stalls all others' decodes, and what the others pad to is lost."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import StepKind

from .costs import Costs
from .plan import Plan
from .policy import Geometry
from .request import Phase
from .residency import Residency
from .waiting import WaitingQueue

MAX_PADDING = 2  # padded over real tokens of one step above which decodes do not ride along
MAX_PAD_SHARE = 0.15  # of the tokens of recent steps, as far as the choice can influence it
STALL_STEPS = 2  # prefill steps in a row while decodes wait, if nobody knows what they take
RECENT_STEPS = 64  # over which the pad share is averaged


@dataclass(frozen=True, slots=True)
class Intents:
    """What the ranks could run in the next group step, and what the last ones left waiting: all
    that the choice of its kind may depend on. Steps are group steps, so all ranks agree."""

    decode_tokens: list[int]  # by rank
    prefill_tokens: list[int]  # by rank, at most what the step has room for
    held: int = 0  # steps in a row that ran decode only although there was prefill
    stalled: int = 0  # steps in a row that ran prefill only although there was decode
    waiting_tokens: int = 0  # prefill tokens of all requests, room or not
    room: int = 0  # prefill tokens that one step can hold, all ranks together
    prefill_ns: float = 0.0  # predicted time of a step of `prefill_tokens`; 0: not known
    pads: float = 0.0  # pad tokens of recent steps ...
    padded: float = 0.0  # ... out of so many
    step: int = 0  # steps so far


ChooseKind = Callable[[Intents], StepKind]


@dataclass(frozen=True, slots=True)
class KindPolicy:
    """Hysteresis between decode and prefill, for what cannot run in one step.

    Both together while the padding that the widest rank costs the others stays bounded. Else a
    run of prefill begins when enough of it waits, or has been held back `hold_steps` steps in the
    hope of more to run side by side; it ends when little is left or the decodes' patience is. So
    prefill waits at most max(1, hold_steps) steps, decode as long as `decode_itl_ns` allows.
    """

    hold_steps: int = 1
    decode_itl_ns: float = 100e6

    def choose(self, intents: Intents) -> StepKind:
        """A pure function of the intents."""
        if not any(intents.prefill_tokens):
            return StepKind.DECODE
        if not any(intents.decode_tokens):
            return StepKind.PREFILL
        pairs = zip(intents.decode_tokens, intents.prefill_tokens, strict=True)
        both = [decode + prefill for decode, prefill in pairs]
        padded, real = max(both) * len(both), sum(both)
        if padded <= MAX_PADDING * real:
            pads = intents.pads + padded - real
            is_even = pads <= MAX_PAD_SHARE * (intents.padded + padded)
            waited = intents.held >= self.hold_steps
            return StepKind.MIXED if is_even or waited else StepKind.DECODE
        if intents.stalled:
            enough = 8 * intents.waiting_tokens >= intents.room
            runs = enough and intents.stalled < self._stall_steps(intents)
        else:
            enough = 2 * intents.waiting_tokens >= intents.room
            runs = enough or intents.held >= self.hold_steps
        return StepKind.PREFILL if runs else StepKind.DECODE

    def _stall_steps(self, intents: Intents) -> int:
        if intents.prefill_ns <= 0:
            return STALL_STEPS
        return max(1, int(self.decode_itl_ns // intents.prefill_ns))


class Alignment:
    """Looks at what the ranks could run, and remembers what the last steps left waiting."""

    def __init__(
        self,
        residency: Residency,
        waiting: WaitingQueue,
        geometry: Geometry,
        *,
        costs: Costs,
        choose_kind: ChooseKind,
        is_paced: bool,
    ) -> None:
        """`is_paced`: steps bound their prefill by time (`pace.py`), so both kinds always fit."""
        self._residency = residency
        self._waiting = waiting
        self._geometry = geometry
        self._costs = costs
        self._choose_kind = choose_kind
        self._is_paced = is_paced
        self._ranks = len(residency.memories)
        self._held = self._stalled = 0
        self._wanted_both = False  # of the step being planned
        self._pads = self._padded = 0.0
        self._steps = 0

    def choose(self) -> StepKind:
        """The kind of the next step; where only one side has work there is no choice."""
        table = self._residency.table
        is_ready = ~table.leaving
        has_prefill = bool(self._waiting) or bool((is_ready & (table.phase == Phase.PREFILL)).any())
        has_decode = bool((is_ready & (table.phase == Phase.DECODE)).any())
        self._wanted_both = has_prefill and has_decode
        if not self._wanted_both:
            return StepKind.PREFILL if has_prefill else StepKind.DECODE
        if self._is_paced:
            return StepKind.MIXED
        return self._choose_kind(self._intents())

    def ran(self, plan: Plan) -> None:
        """Count the step that was planned, by what it has and what it could have had."""
        ran_prefill, ran_decode = bool(plan.prefill), len(plan.decode) > 0
        self._held = self._held + 1 if self._wanted_both and not ran_prefill else 0
        self._stalled = self._stalled + 1 if self._wanted_both and not ran_decode else 0
        self._steps += 1
        if self._ranks > 1:
            width = self._geometry.decode_width
            tokens = plan.tokens_by_rank(self._ranks, self._residency.slots, width)
            padded = int(tokens.max()) * self._ranks
            keep = 1 - 1 / RECENT_STEPS
            self._pads = keep * self._pads + padded - int(tokens.sum())
            self._padded = keep * self._padded + padded

    def _intents(self) -> Intents:
        table, slots = self._residency.table, self._residency.slots
        here = table.resident()
        here = here[~table.leaving[here]]
        decodes = here[table.phase[here] == Phase.DECODE]
        decode = np.bincount(decodes // slots, minlength=self._ranks) * self._geometry.decode_width
        prefills = here[table.phase[here] == Phase.PREFILL]
        left = table.target[prefills] - table.confirmed_kv[prefills] - table.inflight_q[prefills]
        prefill = np.zeros(self._ranks, np.int64)
        np.add.at(prefill, prefills // slots, left)
        self._add_waiting(prefill, np.bincount(here // slots, minlength=self._ranks))
        room = np.maximum(self._geometry.chunk_align, self._geometry.step_tokens - decode)
        wanted = np.minimum(prefill, room).tolist()
        return Intents(
            decode_tokens=decode.tolist(),
            prefill_tokens=wanted,
            held=self._held,
            stalled=self._stalled,
            waiting_tokens=self._waiting.num_tokens + int(left.sum()),
            room=int(room.sum()),
            prefill_ns=self._costs.prefill_step_ns(wanted),
            pads=self._pads,
            padded=self._padded,
            step=self._steps,
        )

    def _add_waiting(self, prefill: NDArray[np.int64], residents: NDArray[np.intp]) -> None:
        """A waiting request counts where it would likely go."""
        for request in self._waiting:
            rank = int(residents.argmin())
            if residents[rank] >= self._geometry.max_rows or bool((prefill > 0).all()):
                return
            if not request.is_parked:
                residents[rank] += 1
                prefill[rank] += len(request.ids)
