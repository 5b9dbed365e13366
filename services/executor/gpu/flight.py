"""A step in flight on a device: memory that host and device share, and what came of the step."""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from deepmesh.wire.messages import DoneReason, Drafting, PromptLogprobs
from kernels.sampling.sample_cuda import SampleOut
from kernels.step.drafts_portable import NUM_BINS
from kernels.step.slots_portable import ROW_FIELDS, RowFlag
from services.executor.gpu.ahead import Shortfall, most_tokens
from services.executor.gpu.stream import DeviceStream, Mark
from services.executor.interface import LiveRows, Sampled

NUM_BUFFERS = 8  # steps in flight and on their way to being settled; more wait to be launched
MAX_CHANGES = 1 << 14  # of slot state, that a step's memory holds; more take memory of their own
_NO_IDS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
_GOES_ON = np.array([reason in (DoneReason.NONE, DoneReason.NULL) for reason in DoneReason])


class PartBuffer:
    """Rows of a step that are sampled together."""

    def __init__(self, stream: DeviceStream, max_rows: int, out_words: int) -> None:
        self.given = stream.shared(max_rows, ROW_FIELDS)
        self.flags, self.ends = stream.shared(max_rows), stream.shared(max_rows)
        # tokens of each row, where they begin in `out`, and how many were verified; unless drafts
        # are verified each row has one, in its own place
        self.counts, self.firsts = stream.shared(max_rows), stream.shared(max_rows)
        self.widths = stream.shared(max_rows)
        self.out = SampleOut.over(stream.shared(out_words))
        self.rows = self.given.numpy()


class DraftBuffer:
    """Of a step's draft pass."""

    def __init__(self, stream: DeviceStream, max_rows: int, places: int) -> None:
        self.given = stream.shared(max_rows)  # slots
        self.ids, self.lengths = stream.shared(max_rows, places), stream.shared(max_rows)
        self.bins, self.errors = stream.shared(NUM_BINS), stream.shared(places, dtype=torch.float32)
        self.stamps = stream.shared(2, dtype=torch.int64)
        self.slots = np.zeros(0, np.int64)  # of the rows

    def drafting(self) -> tuple[bytes, Drafting | None]:
        """StepResult.confidence and .drafting."""
        num = int(self.bins.sum())
        if not num:
            return b"", None
        begin, end = self.stamps.tolist()
        return self.bins.numpy().astype("<u4").tobytes(), Drafting(
            max(0, end - begin), num, self.errors.tolist()
        )

    def known(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
        """Slots, positions of their first drafts, and the drafts, for `GrammarMasks.draft`."""
        num = len(self.slots)
        lengths = self.lengths[:num].numpy().astype(np.int64)
        kept = np.flatnonzero(lengths >= 0)
        return self.slots[kept], lengths[kept], self.ids[:num].numpy()[kept]


class LoadsBuffer:
    """What a rank of a group has counted in a step."""

    def __init__(self, stream: DeviceStream, num_layers: int, num_experts: int) -> None:
        self.rows = stream.shared(num_layers)  # that came to the experts held here
        self.counts = stream.shared(num_layers, num_experts)  # of our own tokens, by expert


class StepBuffer:
    """Memory of one step: what it is given, and what comes back."""

    def __init__(
        self,
        stream: DeviceStream,
        max_rows: int,
        out_words: int,
        loads: tuple[int, int] = (0, 0),
        places: int = 0,
    ) -> None:
        """
        Args:
            loads: layers and experts of a rank that is one of several.
            places: drafts of a row.
        """
        self.drafts = DraftBuffer(stream, max_rows, places)
        self.loads = LoadsBuffer(stream, *loads)
        self.changes = stream.shared(MAX_CHANGES, 2)
        self.parts = (
            PartBuffer(stream, max_rows, out_words),
            PartBuffer(stream, max_rows, out_words),
        )
        self.stamps = stream.shared(2, dtype=torch.int64)
        self.begin, self.end = (self.stamps[i].data_ptr() for i in range(2))  # addresses


class BufferPool:
    """Step memory that is free; whoever needs some waits until a step is settled."""

    def __init__(self, make: Callable[[], StepBuffer], count: int = NUM_BUFFERS) -> None:
        self._free = deque(make() for _ in range(count))
        self._changed = threading.Condition()
        self._is_closing = False

    def take(self) -> StepBuffer:
        """One that nobody uses.

        Raises:
            RuntimeError: the device is given back.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._free or self._is_closing)
            if self._is_closing:
                raise RuntimeError("the device is given back")
            return self._free.popleft()

    def give(self, buffer: StepBuffer) -> None:
        """It is free again."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify_all()

    def close(self) -> None:
        """Whoever waits ends now."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()


@dataclass
class Part:
    """Rows of a step that were launched together: of the decode graph, or of prompt chunks."""

    buffer: PartBuffer
    live: NDArray[np.int64]  # which of the launch's live rows, in the order of the buffer's rows
    verifies: bool = False  # the buffer says which tokens are whose


@dataclass
class StepFlight:
    """See `Flight`."""

    live: LiveRows  # as launched
    gens: NDArray[np.uint32]  # of their slots
    num_logprobs: NDArray[np.int64]  # as SlotInit.n_logprobs
    buffer: StepBuffer
    pool: BufferPool
    wall_ns: Callable[[int, int], tuple[int, int]]
    hear: Callable[[Shortfall], None]
    may_verify: bool = False  # drafts: a row's tokens are counted
    parts: list[Part] = field(default_factory=list)
    ready: Mark | None = None
    tail: Mark | None = None
    tail_status: int = 0
    prompt: Callable[[LiveRows], Sequence[PromptLogprobs]] | None = None
    settle_masks: Callable[[LiveRows, Sampled], Sampled] | None = None
    drafted: bool = False  # there was a draft pass
    # rows with the positions that they computed, where only the device knew, and their logits
    note: Callable[[LiveRows, int], None] | None = None
    tell_drafts: Callable[[DraftBuffer], None] | None = None  # to whoever makes masks behind them
    settle_group: Callable[[], tuple[bytes, bytes]] | None = None
    kept: list[object] = field(default_factory=list)  # memory that the device still reads

    def wait(self) -> tuple[int, int]:
        """See `Flight`."""
        assert self.ready is not None
        self.ready.wait()
        begin, end = self.buffer.stamps.tolist()
        return self.wall_ns(begin, end)

    def sampled(self, live: LiveRows) -> Sampled:
        """See `Flight`."""
        if self.settle_group is None:
            return self._sampled(live)
        experts = self.settle_group()  # first: of exchanges that failed rows are not a number
        return self._sampled(live)._replace(experts=experts)

    def _sampled(self, live: LiveRows) -> Sampled:
        num = len(self.live.rows)
        flags, counts = np.zeros(num, np.int32), np.ones(num, np.int64)
        verified = np.zeros(num, np.int64)
        for part in self.parts:
            at, buffer, count = part.live, part.buffer, len(part.live)
            flags[at] = buffer.flags[:count].numpy()
            if part.verifies:
                counts[at] = np.maximum(1, buffer.counts[:count].numpy())
                verified[at] = np.maximum(1, buffer.widths[:count].numpy()) - 1
        chosen = np.searchsorted(self.live.rows, live.rows)
        missing = np.ones(len(live.rows), bool)
        there = chosen < num
        missing[there] = self.live.rows[chosen[there]] != live.rows[there]
        missing[~missing] = (flags[chosen[~missing]] & RowFlag.LIVE) == 0
        if missing.any():
            row = int(live.rows[missing][0])
            raise RuntimeError(f"row {row}: the device took its request for done")
        gave = (flags[chosen] & RowFlag.FINITE) != 0
        finite = gave | ((flags[chosen] & RowFlag.DONE) == 0)  # else it merely sampled nothing
        found = self._tokens(chosen, counts, gave)._replace(finite=finite)
        if self.may_verify:
            found = found._replace(counts=counts[chosen], verified=verified[chosen])
        if self.note is not None:
            widths = 1 + verified[chosen]
            positions = np.where(live.drafted, widths, live.counts)
            self.note(live._replace(counts=positions), int(widths[live.samples].sum()))
        if self.drafted:
            confidence, drafting = self.buffer.drafts.drafting()
            found = found._replace(confidence=confidence, drafting=drafting)
        if self.prompt is not None:
            found = found._replace(prompt=self.prompt(live))
        if self.settle_masks is not None:
            found = self.settle_masks(live, found)
        if self.tell_drafts is not None and live.masked.any():
            self.tell_drafts(self.buffer.drafts)
        return found

    def _tokens(
        self, chosen: NDArray[np.int64], counts: NDArray[np.int64], gave: NDArray[np.bool_]
    ) -> Sampled:
        """Of the launched rows `chosen`: `counts` of each, zeros where it did not give any."""
        num, first = len(self.live.rows), 0
        firsts = np.zeros(num, np.int64)  # in the parts, one behind the other
        for part in self.parts:
            own, count = part.buffer.out.tokens, len(part.live)
            places = part.buffer.firsts[:count].numpy() if part.verifies else np.arange(count)
            firsts[part.live] = first + places
            first += len(own)
        outs = [part.buffer.out for part in self.parts]
        each = counts[chosen]
        owner = np.repeat(np.arange(len(chosen)), each)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(each) - each, each)
        at = firsts[chosen[owner]] + place
        tokens, logprobs = np.zeros(len(at), np.int32), np.zeros(len(at), np.float32)
        top_ids, top_logprobs = [_NO_IDS] * len(at), [_NO_LOGPROBS] * len(at)
        if outs:
            wanted = self.num_logprobs[chosen[owner]]
            took = gave[owner]
            tokens[took] = np.concatenate([out.tokens.numpy() for out in outs])[at[took]]
            asks = took & (wanted >= 0)
            logprobs[asks] = np.concatenate([out.logprobs.numpy() for out in outs])[at[asks]]
            ends = np.cumsum([len(out.tokens) for out in outs])
            for i in np.flatnonzero(took & (wanted > 0)).tolist():
                which = int(np.searchsorted(ends, at[i], side="right"))
                out, j = outs[which], int(at[i] - (ends[which] - len(outs[which].tokens)))
                top_ids[i] = out.top_ids[j, : int(wanted[i])].numpy().copy()
                top_logprobs[i] = out.top_logprobs[j, : int(wanted[i])].numpy().copy()
        return Sampled(tokens, np.ones(len(chosen), bool), logprobs, top_ids, top_logprobs)

    def settled(self, live: LiveRows, result: NDArray[np.void]) -> None:
        """See `Flight`."""
        launched = self.live
        positions, tokens = launched.counts.copy(), most_tokens(launched)
        at = np.searchsorted(launched.rows, live.rows)
        own = result[live.rows]
        positions[at] -= own["kv_len"].astype(np.int64) - live.starts
        tokens[at] -= own["num_tokens"]
        ended = np.ones(len(positions), bool)  # what was not live any more is over
        ended[at] = ~_GOES_ON[own["done_reason"]]
        if positions.any() or tokens.any() or ended.any():
            self.hear(Shortfall(launched.slots, self.gens, positions, tokens, ended))

    def failed(self) -> None:
        """See `Flight`."""
        none, ended = np.zeros(len(self.gens), np.int64), np.ones(len(self.gens), bool)
        self.hear(Shortfall(self.live.slots, self.gens, none, none, ended))

    def wait_tail(self) -> None:
        """See `Flight`."""
        assert self.tail is not None
        self.tail.wait()

    def land(self) -> None:
        """See `Flight`."""
        self.kept.clear()
        self.pool.give(self.buffer)
