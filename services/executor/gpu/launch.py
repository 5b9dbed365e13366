"""Puts steps on a device one behind the other, without waiting for what the ones before sampled."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    Descriptor,
    PromptLogprobs,
    RowMode,
    SlotInit,
)
from kernels.sampling.sample_cuda import MAX_TOP
from kernels.step.slots_portable import NO_SLOT, Sampling
from services.executor.batch import StepBatch
from services.executor.capacity import verified_tokens
from services.executor.flights import Settling
from services.executor.gpu.ahead import AheadSlots
from services.executor.gpu.drafting import DeviceDrafting
from services.executor.gpu.flight import (
    BufferPool,
    Part,
    PartBuffer,
    StepBuffer,
    StepFlight,
)
from services.executor.gpu.masking import Masked, Masking
from services.executor.gpu.prompt_scores import PromptScores
from services.executor.gpu.sampler import DeviceSampler
from services.executor.gpu.slots import DeviceSlots
from services.executor.gpu.step_parts import Forwards, GroupSteps
from services.executor.gpu.stream import DeviceStream
from services.executor.interface import LiveRows
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.model_config import ModelConfig
from services.executor.prompt_logprobs import wanted_logits
from services.executor.slots import SlotTable

_log = logging.getLogger(__name__)


class _Passes(NamedTuple):
    """The forwards of a step."""

    is_decode: NDArray[np.bool_]  # live rows of a forward of decode rows
    again: NDArray[np.bool_]  # the same, whose positions before the last one are walked first
    rest: NDArray[np.int64]  # those of the forward of prompts
    decode_rows: int
    walks: int  # forwards before that
    prefill_tokens: int


class Launcher:
    """All that steps of one model on one device have in common. Only the launching thread comes
    here, but for `close`.

    A decode row, one output token behind the newest id, is computed from its slot's state by the
    program of the step's bucket. Prompt chunks go through the eager forward, with ids that the host
    knows. What takes longer:
    - a step with grammars waits, between forward and sampling, until the steps before are settled
      and the masks are there;
    - output that is computed again goes token by token through the decode program, if prompts have
      kernels of their own;
    - log-probabilities of prompts are worked out on the device, and copied with the tokens.
    Where drafts are verified a decode row is several tokens, see `DeviceDrafting`.
    Requests with more stop ids than a slot holds end when the host has seen the token.

    In a group of ranks a step is the forwards that its descriptor names, on each of them.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        compressed_ids: Tensor,
        forwards: Forwards,
        stream: DeviceStream,
        *,
        max_rows: int,
        masks: GrammarMasks | None,
        run_ops: Callable[[Sequence[BlockOp]], None],
        group: GroupSteps | None = None,
        drafting: type[DeviceDrafting] = DeviceDrafting,
    ) -> None:
        """
        Args:
            max_rows: of a step.
            run_ops: launches operations on blocks.
            group: of ranks that share the experts; None: this one is alone.
            drafting: benchmarks have drafts of their own making.
        """
        self._group = group
        self._config, self._capacity = config, capacity
        self._forwards, self._stream, self._run_ops = forwards, stream, run_ops
        self._max_rows = max_rows
        with stream.on():
            self._device = DeviceSlots(
                config, capacity, compressed_ids, 2 * max_rows, stream.device
            )
            places = capacity.draft_len
            most = verified_tokens(max_rows, places)
            self._sampler = DeviceSampler(
                capacity.num_slots, config.vocab_size, most, stream.device
            )
            self._masking = Masking(masks, self._sampler, self._copy)
            self._drafting: DeviceDrafting | None = None
            if places:
                self._drafting = drafting(
                    config,
                    capacity,
                    forwards,
                    self._device,
                    self._sampler,
                    self._masking,
                    max_rows=max_rows,
                    device=stream.device,
                )
            else:
                for logits in forwards.logits:
                    self._sampler.capture(logits, *self._device.part(0, len(logits)))
        words = self._sampler.out.all.shape[0]
        loads = (0, 0) if group is None else group.loads_shape
        self._pool = BufferPool(lambda: StepBuffer(stream, max_rows, words, loads, places))
        self._exact: SlotTable | None = None  # of the epoch that `_ahead` is of
        self._ahead = self._new_epoch()

    @property
    def has_two_classes(self) -> bool:
        """See `Forwards`."""
        return self._forwards.has_two_classes

    def close(self) -> None:
        """A launch that waits for memory ends now."""
        self._pool.close()

    def _new_epoch(self) -> AheadSlots:
        return AheadSlots(
            self._capacity,
            on_open=self._open,
            on_append=self._device.append,
            on_end=self._device.end,
        )

    def _open(self, init: SlotInit) -> None:
        assert init.n_logprobs <= MAX_TOP, f"init: {init.n_logprobs} best ids of {MAX_TOP}"
        row = self._ahead.sample_row(init.slot)
        self._device.open(init)
        self._sampler.stage(row)
        if self._drafting is not None:
            self._drafting.open(row)

    # ------------------------------------------------------------ a step

    @torch.inference_mode()
    def launch(self, settling: Settling, behind: Callable[[], None]) -> StepFlight:
        """See `LaunchEngine`."""
        if settling.slots is not self._exact:
            self._exact, self._ahead = settling.slots, self._new_epoch()
        ahead, turn, buffer = self._ahead, settling.turn, self._pool.take()
        try:
            with self._stream.on():
                ahead.catch_up()
                before = turn.enter(ahead)
                if before:
                    self._run_ops(before)
                if self._group is not None:
                    self._group.enter(turn.step)
                live = ahead.resolve(turn.rows)
                flight = self._flight(live, buffer)
                self._send_changes(buffer.changes, flight.kept)
                self._sampler.flush(self._copy)
                if self._drafting is not None:
                    self._drafting.flush(self._copy)
                if len(live.rows) or self._group is not None:
                    self._launch_rows(flight, settling, behind)
                else:
                    self._device.stamp(buffer.begin, buffer.end)
                if self._group is not None:
                    flight.settle_group = self._group.leave(turn.step, buffer.loads)
                ahead.project(live, turn.step.step_id)
                flight.ready = flight.tail = self._stream.mark()
                if after := [op for op in turn.step.ops if op.after]:
                    flight.tail_status = self._run_after(after)
                    flight.tail = self._stream.mark()
        except Exception:
            ahead.fail(turn.rows)
            with contextlib.suppress(RuntimeError), self._stream.on():
                self._stream.mark().wait()  # the device may read the buffer yet
            self._pool.give(buffer)
            raise
        return flight

    def _flight(self, live: LiveRows, buffer: StepBuffer) -> StepFlight:
        ahead = self._ahead
        return StepFlight(
            live=live,
            gens=ahead.gen[live.slots],
            num_logprobs=ahead.num_logprobs[live.slots],
            buffer=buffer,
            pool=self._pool,
            wall_ns=self._stream.wall_ns,
            hear=ahead.hear,
            may_verify=self._drafting is not None,
        )

    def _run_after(self, ops: Sequence[BlockOp]) -> int:
        try:
            self._run_ops(ops)
        except Exception:  # the rows are not to blame: the operations report it
            _log.exception("operations behind a step failed")
            return 1
        return 0

    def _send_changes(self, room: Tensor, kept: list[object]) -> None:
        """`room`: shared memory for them; more than fits takes memory of its own."""
        changes = self._device.changes.take()
        if not len(changes):
            return
        if len(changes) > len(room):
            room = self._stream.shared(*changes.shape)
            kept.append(room)
        room[: len(changes)] = torch.from_numpy(changes)
        self._device.apply(room.data_ptr(), len(changes))

    def _copy(self, to: Tensor, values: NDArray[np.int32]) -> None:
        given = torch.from_numpy(values)
        if to.is_cuda:
            given = given.pin_memory()  # its memory is not reused before the copy is made
        to.copy_(given.view(to.shape), non_blocking=True)

    # ------------------------------------------------------------ rows

    def _launch_rows(
        self, flight: StepFlight, settling: Settling, behind: Callable[[], None]
    ) -> None:
        live = flight.live
        passes = self._passes(live, settling)
        decode, rest = np.flatnonzero(passes.is_decode | passes.again), passes.rest
        rest = rest[np.argsort(~live.samples[rest], kind="stable")]  # those that sample come first
        self._ahead.check_known(_some(live, np.flatnonzero(~passes.is_decode)))
        if passes.walks:
            self._walk(_some(live, np.flatnonzero(passes.again)), passes, flight.kept)
        first, second = flight.buffer.parts
        begin, end = flight.buffer.begin, flight.buffer.end
        agreed, drafting = settling.turn.step.descriptor, self._drafting
        # part, first row, rows, logits
        parts: list[tuple[Part, int, int, Tensor]] = []
        if passes.decode_rows:
            own = _some(live, decode)
            logits = self._decode(first, own, passes.decode_rows, agreed, begin)
            part = Part(first, decode, verifies=drafting is not None)
            parts.append((part, 0, len(decode) if drafting else len(logits), logits))
        if len(rest):
            some = _some(live, rest)
            _fill(second, some, len(rest))
            given = second.given.data_ptr()
            self._device.begin(given, self._max_rows, len(rest), 0 if parts else begin)
            logits = self._prefill(some, flight, passes.prefill_tokens)
            parts.append((Part(second, rest), self._max_rows, len(rest), logits))
        elif passes.prefill_tokens:
            if not parts:
                self._device.stamp(begin)
            self._forwards.serve(passes.prefill_tokens)
        masked = self._masking.collect(flight, settling, behind) if len(live.rows) else None
        asking = live.slots[live.samples]
        drafts = drafting is not None and bool(agreed.n_draft_passes) and len(asking) > 0
        for part, at, count, logits in parts:
            stamp = end if part is parts[-1][0] and not drafts else 0
            if len(logits):
                self._sample(part, at, logits, live, masked)
            self._advance(part, at, count, stamp)
        if drafts:
            assert drafting is not None
            tells = bool(live.masked.any())
            drafting.propose(flight.buffer.drafts, asking, end, tells=tells)
            flight.drafted, flight.tell_drafts = True, self._masking.tell if tells else None
        elif not parts:
            self._device.stamp(end) if passes.prefill_tokens else self._device.stamp(begin, end)
        flight.parts = [part for part, *_ in parts]

    def _advance(self, part: Part, first: int, count: int, stamp: int = 0) -> None:
        if part.verifies and self._drafting is not None:
            self._drafting.accept(part.buffer, count, stamp)
            return
        buffer, out = part.buffer, self._sampler.out
        results = buffer.flags.data_ptr(), buffer.ends.data_ptr()
        self._device.advance(first, count, (out.tokens, out.found), results, stamp)

    def _passes(self, live: LiveRows, settling: Settling) -> _Passes:
        """Which forward computes each row, and how large it is.

        Raises:
            RuntimeError: rows do not fit what a group agreed on.
        """
        ahead, counts = self._ahead, live.counts
        newest = ahead.newest(live)
        if self._group is None:
            again = np.zeros_like(newest)
            if self._forwards.has_two_classes:
                again = ~newest & (live.starts >= ahead.prompt_len[live.slots])
            rest = np.flatnonzero(~(newest | again))
            num_rows = int(np.count_nonzero(newest | again))
            walks = int(counts[again].max(initial=1)) - 1
            return _Passes(newest, again, rest, num_rows, walks, int(counts[rest].sum()))
        agreed = settling.turn.step.descriptor
        by_decode = settling.turn.rows["mode"][live.rows] != RowMode.PREFILL
        again, rest = by_decode & ~newest, np.flatnonzero(~by_decode)
        walks = int(counts[again].max(initial=1)) - 1
        ours = int(by_decode.sum()), walks, int(counts[rest].sum())
        theirs = agreed.decode_rows, agreed.walks, agreed.prefill_tokens
        if any(own > most for own, most in zip(ours, theirs, strict=True)):
            raise RuntimeError(
                f"this rank has {ours} of decode rows, walks and prompt tokens, the"
                f" group agreed on {theirs}"
            )
        return _Passes(by_decode & newest, again, rest, *theirs)

    def _decode(
        self,
        buffer: PartBuffer,
        live: LiveRows,
        num_rows: int,
        agreed: Descriptor | None = None,
        stamp: int = 0,
    ) -> Tensor:
        """Logits of one position of each row, and of drafts behind it as the step has `agreed`."""
        if self._drafting is not None:
            counts, spare = self._drafting.asked(live, agreed)
            live = live._replace(counts=counts)
            _fill(buffer, live, len(live.rows))
            return self._drafting.decode(buffer, live, spare, stamp)
        step = self._forwards.step(num_rows)
        count = step.num_tokens
        _fill(buffer, live._replace(counts=np.ones_like(live.counts)), count)
        self._device.begin(buffer.given.data_ptr(), 0, count, stamp)
        self._device.plan(step)
        return self._forwards.decode(step)

    def _walk(self, live: LiveRows, passes: _Passes, kept: list[object]) -> None:
        """Output whose ids are known, but for the last position of each row: token by token, as it
        was computed before."""
        ahead, changes = self._ahead, self._device
        for j in range(passes.walks + 1):
            going = _some(live, np.flatnonzero(live.counts > j))
            for slot, start in zip(going.slots.tolist(), going.starts.tolist(), strict=True):
                changes.set_recent(slot, ahead.tokens[slot, : start + j + 1])
            self._send_changes(self._stream.shared(0, 2), kept)
            if j == passes.walks:
                continue
            going = _some(live, np.flatnonzero(live.counts > j + 1))
            part = PartBuffer(self._stream, self._max_rows, 0)
            kept.append(part)
            nothing = going._replace(samples=np.zeros_like(going.samples))
            num_rows = len(going.rows) if self._group is None else passes.decode_rows
            count = len(self._decode(part, nothing, num_rows))
            is_wide = self._drafting is not None
            whole = Part(part, np.arange(len(going.rows)), verifies=is_wide)
            self._advance(whole, 0, len(going.rows) if is_wide else count)

    def _prefill(self, live: LiveRows, flight: StepFlight, padded: int) -> Tensor:
        """Logits of the rows that sample."""
        ahead = self._ahead
        wanted = wanted_logits(live, ahead)
        batch = StepBatch.of_slots(live, ahead, wanted, self._config.context_ids)
        logits = self._forwards.prefill(batch, padded)
        if int(wanted.sum()) == int(live.samples.sum()):
            return logits
        scores = PromptScores(
            logits, wanted, live, ahead, copy=self._copy, shared=self._stream.shared
        )

        def prompt(settled: LiveRows) -> list[PromptLogprobs]:
            return [one for one in scores.messages() if one.row in settled.rows]

        flight.prompt = prompt
        asking = np.cumsum(wanted)[live.samples] - 1
        index = torch.empty(len(asking), dtype=torch.int32, device=logits.device)
        self._copy(index, asking.astype(np.int32))
        return logits[index]

    # ------------------------------------------------------------ sampling

    def _sample(
        self, part: Part, first: int, logits: Tensor, live: LiveRows, masked: Masked | None
    ) -> None:
        own = None if masked is None else masked.some(part.live)
        if part.verifies and self._drafting is not None:
            self._drafting.sample(part, _some(live, part.live), logits, own)
            return
        count = logits.shape[0]
        if own is None:
            self._masking.free()
        else:
            self._masking.send(live.slots[part.live[:count]], own.states[:count])
        rows, positions = self._device.part(first, count)
        self._sampler.sample(logits, rows, positions)
        part.buffer.out.all.copy_(self._sampler.out.all, non_blocking=True)


def _some(live: LiveRows, index: NDArray[np.int64]) -> LiveRows:
    return LiveRows(
        rows=live.rows[index],
        slots=live.slots[index],
        starts=live.starts[index],
        counts=live.counts[index],
        samples=live.samples[index],
        drafted=live.drafted[index],
        masked=live.masked[index],
    )


def _fill(buffer: PartBuffer, live: LiveRows, count: int) -> None:
    """`count` rows for the device, padding behind those that live."""
    given, num = buffer.rows, len(live.rows)
    given[num:count] = NO_SLOT
    given[:num, 0], given[:num, 1] = live.slots, live.counts
    given[:num, 2] = np.where(live.samples, Sampling.TOKEN, Sampling.NOTHING)
