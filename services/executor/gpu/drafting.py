"""Drafts in the steps of a device: which are verified, what of them holds, and the next ones.

Nothing here waits for the device: how many drafts each row verifies is decided there, by how likely
they are to survive, and so is how many of them hold. The host knows bounds until a step is settled.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import Capacity, Descriptor
from kernels.sampling.sample_cuda import mask_words
from services.executor.gpu.decode_program import bucket_for
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.draft_step import DraftStep
from services.executor.gpu.flight import DraftBuffer, Part, PartBuffer
from services.executor.gpu.masking import Masked, Masking
from services.executor.gpu.sampler import Copy, DeviceSampler
from services.executor.gpu.slots import DeviceSlots
from services.executor.gpu.step_parts import Forwards
from services.executor.interface import LiveRows
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.sample_row import SampleRow


class DeviceDrafting:
    """The drafts of one model on one device; only the launching thread comes here."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        forwards: Forwards,
        slots: DeviceSlots,
        sampler: DeviceSampler,
        masking: Masking,
        *,
        max_rows: int,
        device: torch.device,
    ) -> None:
        """`sampler`: of steps; with room for `verified_tokens` rows."""
        self._config, self._forwards, self._slots = config, forwards, slots
        self._sampler, self._masking = sampler, masking
        self.places = capacity.draft_len
        num_slots, vocab_size = capacity.num_slots, config.vocab_size
        self._state = slots.draft_state(forwards.max_tokens)
        self._own = DeviceSampler(num_slots, vocab_size, max_rows, device, is_plain=True)
        self._remembers = np.zeros(num_slots, bool)  # what it samples: penalties, bad words
        self._verifies = False  # drafts, in the present step
        self._turns = 0  # of places, in the present step; 0: all sample at once
        for logits in forwards.logits:
            sampler.capture(logits, *self._tokens(len(logits)))
        self._programs = forwards.draft_programs(self.places, self._draw)
        self._untold = (
            torch.zeros(max_rows, self.places, dtype=torch.int32, device=device),
            torch.zeros(max_rows, dtype=torch.int32, device=device),
        )
        words = mask_words(vocab_size)
        width = 1 + self.places
        self._masks: Callable[[], tuple[Tensor, Tensor]] = lambda: (
            torch.zeros(max_rows, width, words, dtype=torch.int32, device=device),
            torch.zeros(max_rows, width, dtype=torch.int32, device=device),
        )
        self._mask_room: tuple[Tensor, Tensor] | None = None  # made for the first grammar

    def open(self, row: SampleRow) -> None:
        """A request enters its slot."""
        settings = row.resolved
        self._remembers[row.init.slot] = settings.has_penalty or bool(settings.bad_words)
        self._own.stage(row)

    def flush(self, copy: Copy) -> None:
        """See `DeviceSampler`."""
        self._own.flush(copy)

    # ------------------------------------------------------------ the rows of a step

    def asked(self, live: LiveRows, agreed: Descriptor | None) -> tuple[NDArray[np.int64], int]:
        """Tokens that each row asks for, and how many drafts the step verifies in all.

        Args:
            agreed: None: no drafts are verified.
        """
        drafts = np.where(live.drafted, live.counts - 1, 0)
        room = self._forwards.max_tokens - len(live.rows)
        if agreed is None:
            room = 0
        elif agreed.verify_capacity:
            room = min(room, agreed.verify_capacity - int(np.count_nonzero(live.drafted)))
        spare = max(0, min(int(drafts.sum()), room))
        return (1 + drafts if spare else np.ones_like(drafts)), spare

    def decode(self, buffer: PartBuffer, live: LiveRows, spare: int, stamp: int = 0) -> Tensor:
        """Logits of all tokens that the rows compute.

        Args:
            buffer: holds the rows.
            live: with the counts that `asked` gave.
        """
        num, drafts, self._verifies = len(live.rows), live.counts - 1, spare > 0
        has_memory = bool(drafts[self._remembers[live.slots]].any())
        self._turns = 1 + min(self.places, int(drafts.max(initial=0))) if has_memory else 0
        step: DecodeStep = self._forwards.step(num + spare)
        self._state.begin(buffer.given.data_ptr(), num, step.num_tokens, spare, stamp)
        self._slots.plan(step, self._state)
        return self._forwards.decode(step)

    def sample(self, part: Part, live: LiveRows, logits: Tensor, masked: Masked | None) -> None:
        """Draw the tokens of a step's rows, and bring them to the host.

        Where what is drawn counts for the next draw, one place after the other: only behind drafts
        that hold is anything drawn.
        """
        sampler, count = self._sampler, len(logits)
        if masked is None:
            self._masking.free()
        else:
            if self._mask_room is None:
                self._mask_room = self._masks()
            words, states = self._mask_room
            self._masking.spread(live, masked, (words, states))
            self._state.place_masks(words, states, count, sampler.masks, sampler.states)
        tokens, out = self._tokens(count), sampler.out
        if not self._turns:
            sampler.sample(logits, *tokens)
        for now in range(self._turns):
            self._state.take_turns((out.tokens, out.found), now, count)
            sampler.sample(logits, *tokens)
        part.buffer.out.all.copy_(out.all, non_blocking=True)

    def accept(self, buffer: PartBuffer, num_rows: int, stamp: int = 0) -> None:
        """Write back what the rows did."""
        out = self._sampler.out
        rooms = (buffer.flags, buffer.ends, buffer.counts, buffer.firsts, buffer.widths)
        flags, ends, counts, firsts, widths = (room.data_ptr() for room in rooms)
        results = flags, ends, counts, firsts, widths
        sampled, pairs = (out.tokens, out.found), self._forwards.pairs
        verifies = self._verifies
        self._state.accept(num_rows, sampled, results, pairs, verifies=verifies, stamp=stamp)

    # ------------------------------------------------------------ the next drafts

    def propose(
        self, buffer: DraftBuffer, slots: NDArray[np.int64], stamp: int, *, tells: bool
    ) -> None:
        """Draft behind the newest token of each of these slots whose request goes on.

        Args:
            stamp: address of the int64 that gets the time behind the pass.
            tells: the host gets the drafts, too; else they stay on the device.
        """
        sizes = [program.step.num_rows for program in self._programs]
        program = self._programs[sizes.index(bucket_for(sizes, len(slots)))]
        step, config = program.step, self._config
        buffer.given[: step.num_rows] = -1
        buffer.given[: len(slots)] = torch.from_numpy(slots.astype(np.int32))
        buffer.slots = slots
        out = (step.rows, step.starts, step.ids, step.positions, step.window_slots, *step.plain)
        noise, block = config.dspark_noise_token_id, config.dspark_block_size
        shape = step.num_rows, block, config.sliding_window, BLOCK_TOKENS, noise
        begin, end = (buffer.stamps[i].data_ptr() for i in range(2))
        self._state.plan(buffer.given.data_ptr(), self._slots.plain, out, shape, begin)
        program.launch()
        self._drafted(step)
        told = (buffer.ids, buffer.lengths) if tells else self._untold
        results = (*told, buffer.bins, buffer.errors)
        ids, lengths, bins, errors = (room.data_ptr() for room in results)
        rows = step.rows[0]
        self._state.store(rows, step.drafts, step.chances, (ids, lengths, bins, errors), end)
        self._slots.stamp(stamp)

    def _drafted(self, step: DraftStep) -> None:
        """What came out of a pass; benchmarks put drafts of their own making in its place."""

    def _draw(self, logits: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
        self._own.sample(logits, rows, starts)
        return self._own.out.tokens[: len(logits)]

    def _tokens(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows of the sampler, and their positions."""
        tables = self._state.tables
        return tables.tokens[:count], tables.starts[:count]
