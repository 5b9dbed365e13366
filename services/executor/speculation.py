"""DSpark in the executor's step: which drafts a step verifies, what of them holds, and the next.

A draft is accepted exactly where it is the token that the sampler draws there anyway, so drafts
change how many tokens a step brings and never which. With `Speculation.rejects` it is accepted as
often as is right, instead: tokens have the same distribution then, and are others.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import Drafting, Pool, SubmitStep
from kernels.sampling.draws import Draws
from kernels.sampling.rejection import DRAFT_STREAM, token_probs
from services.executor.batch import StepBatch
from services.executor.calibration import Calibration
from services.executor.interface import LiveRows, Sampled
from services.executor.kv_cache import KvCache
from services.executor.models.outputs import DraftBatch, DraftOutput
from services.executor.sample_row import SampleRow
from services.executor.sampler import Trials
from services.executor.slots import UNWRITTEN, SlotTable

NUM_BINS = 16  # of survival probability, of StepResult.confidence
NOWHERE = -1
PAIR = 2  # positions that make one compressed entry

DraftModel = Callable[[DraftBatch, KvCache, Draws, int], DraftOutput]


def scratch_blocks(draft_len: int) -> int:
    """State blocks that each slot needs beside its own, for pairs that drafts leave open."""
    return -(-draft_len // PAIR)


class Pieces(NamedTuple):
    """Rows of the batch; those that verify drafts are cut into pairs: see `_pieces`."""

    rows: LiveRows
    owners: NDArray[np.int64]  # live row of each
    state_blocks: NDArray[np.int32]


class Speculation:
    """The drafts of one engine epoch by slot; only the device stream's thread comes here."""

    def __init__(self, draft: DraftModel, cache: KvCache, slots: SlotTable, draft_len: int) -> None:
        """
        Args:
            draft: the model's draft pass.
            cache: with `scratch_blocks` for each slot behind the state blocks of the capacity.
            slots: of this engine epoch.
            draft_len: drafts of a row, at most.
        """
        self.slots = slots
        self.rejects = False  # how drafts are accepted; set before there are any
        self._draft, self._cache, self.draft_len = draft, cache, draft_len
        num, each = len(slots.rid), scratch_blocks(draft_len)
        first = slots.capacity.num_state_blocks
        self._scratch = first + np.arange(num * each, dtype=np.int32).reshape(num, each)
        self._ids = np.zeros((num, draft_len), np.int32)
        self._confidence = np.zeros((num, draft_len), np.float32)  # as the model gave it
        self._survival = np.zeros((num, draft_len), np.float32)
        self._length = np.full(num, NOWHERE, np.int64)  # of the sequence that the drafts continue
        self._gen = np.zeros(num, np.uint32)
        self.calibration = Calibration(draft_len)
        self._probs: Tensor | None = None  # that drafts were drawn from, where they are needed

    # ------------------------------------------------------------ before the forward pass

    def trim(
        self, live: LiveRows, step: SubmitStep, bound: NDArray[np.int64] | None = None
    ) -> LiveRows:
        """The positions that each row computes: with the drafts that the step verifies.

        The step's verify capacity goes to the drafts that are likeliest to survive, which are
        always the first ones of each row; ties by request. None stands for the place behind the
        request's last token.

        Args:
            bound: drafts of each row, at most: there are no masks behind more.
        """
        rows = np.flatnonzero(live.drafted)
        if not len(rows):
            return live
        capacity = step.descriptor.verify_capacity or len(rows) * (1 + self.draft_len)
        if capacity <= len(rows):  # drafts do not pay: steps should not be longer for that
            return live._replace(counts=np.where(live.drafted, 1, live.counts))
        at, slots = live.slots[rows], self.slots
        known = (self._length[at] == slots.total_len[at]) & (self._gen[at] == slots.gen[at])
        known &= live.samples[rows]
        room = np.minimum(self.draft_len, slots.max_len[at] - slots.total_len[at] - 1)
        most = np.where(known, np.minimum(live.counts[rows] - 1, room), 0)
        if bound is not None:
            most = np.minimum(most, bound[rows])
        widths = best_drafts(self._survival[at], most, capacity - len(rows), slots.rid[at])
        counts = live.counts.copy()
        counts[rows] = 1 + widths
        return live._replace(counts=counts)

    def batch(self, live: LiveRows, num_logits: NDArray[np.int64], context_ids: int) -> StepBatch:
        """The batch of a step, drafts among its ids; logits of all positions of drafted rows.

        Args:
            live: as `trim` gave it.
            num_logits: of each row without drafts, as for `StepBatch.of_slots`.
        """
        if not (live.drafted & (live.counts > 1)).any():
            wanted = np.where(live.drafted, 1, num_logits)
            return StepBatch.of_slots(live, self.slots, wanted, context_ids)
        parts = self._pieces(live)
        wide = live.drafted[parts.owners]
        wanted = np.where(wide, parts.rows.counts, num_logits[parts.owners])
        with self._drafts_in(live):
            batch = StepBatch.of_slots(parts.rows, self.slots, wanted, context_ids)
        batch.state_blocks[:] = torch.from_numpy(parts.state_blocks)
        return batch

    def _pieces(self, live: LiveRows) -> Pieces:
        """The rows of the batch, and where each leaves its open pair."""
        rows, owners, place = cut_pairs(live)
        blocks = self.slots.state_block[rows.slots]
        later = place > 0
        blocks[later] = self._scratch[rows.slots[later], place[later] - 1]
        return Pieces(rows, owners, blocks)

    def _drafts_in(self, live: LiveRows) -> "_Lent":
        """Drafts stand behind the known ids of their slots, as long as this lasts."""
        rows = np.flatnonzero(live.drafted & (live.counts > 1))
        return _Lent(self.slots, live.slots[rows], live.counts[rows] - 1, self._ids)

    # ------------------------------------------------------------ behind it

    def sample_rows(self, slot: int, masks: Sequence[NDArray[np.int32] | None]) -> list[SampleRow]:
        """What the sampler is to know for positions of a drafted row: the drafts before each, and
        its mask."""
        base = self.slots.sample_row(slot)
        ids = np.concatenate((base.tokens, self._ids[slot, : len(masks) - 1]))
        known = len(base.tokens)
        return [
            base._replace(tokens=ids[: known + place], mask=mask)
            for place, mask in enumerate(masks)
        ]

    def holding(self, live: LiveRows, row: int, drawn: NDArray[np.int32]) -> int:
        """How many of the tokens drawn for the positions of a drafted row follow drafts that are
        right: the first, and each whose draft before it was drawn, too."""
        differs = np.flatnonzero(drawn[:-1] != self._ids[live.slots[row], : len(drawn) - 1])
        return int(differs[0]) + 1 if len(differs) else len(drawn)

    def keep(self, live: LiveRows, counts: NDArray[np.int64], widths: NDArray[np.int64]) -> None:
        """The open pairs of the last positions that hold become those of their requests, and it is
        known how good the drafts were.

        Args:
            counts: tokens of each row that hold; 0: its drafts were not looked at.
            widths: positions of each row at which one was drawn.
        """
        seen = np.flatnonzero(live.drafted & (counts > 0) & (widths > 1))
        self.calibration.learn(
            self._confidence[live.slots[seen]], widths[seen] - 1, counts[seen] - 1
        )
        heads = PAIR - live.starts % PAIR
        last = live.starts + counts - 1
        place = (last - last % PAIR - live.starts - heads) // PAIR
        rows = np.flatnonzero(live.drafted & (counts > 0) & (place >= 0))
        if len(rows):
            at = live.slots[rows]
            own = torch.from_numpy(self.slots.state_block[at].astype(np.int64))
            kept = torch.from_numpy(self._scratch[at, place[rows]].astype(np.int64))
            self._cache.pairs[own] = self._cache.pairs[kept]

    def propose(self, live: LiveRows, sampled: Sampled) -> bytes:
        """Draft behind the last token of each row that sampled one and goes on.

        Returns: the histogram of StepResult.confidence.
        """
        counts = np.ones(len(live.rows), np.int64) if sampled.counts is None else sampled.counts
        ends = np.zeros(len(counts)) if sampled.reasons is None else sampled.reasons
        rows = np.flatnonzero(live.samples & sampled.finite & (counts > 0) & (ends == 0))
        at, slots = live.slots[rows], self.slots
        lengths = slots.total_len[at] + counts[rows]
        going = lengths < slots.max_len[at]
        rows, at, lengths = rows[going], at[going], lengths[going]
        if not len(rows):
            return b""
        anchors = sampled.tokens[(np.cumsum(counts) - 1)[rows]]
        width = -(-int(lengths.max()) // slots.block_size)
        batch = DraftBatch(
            anchors=torch.from_numpy(anchors.astype(np.int64)),
            positions=torch.from_numpy(lengths - 1),
            window_blocks=torch.from_numpy(slots.tables[Pool.WINDOW][at, :width]),
        )
        draws = self._draws(at, lengths)
        out = self._draft(batch, self._cache, draws, self.draft_len)
        if self.rejects:
            self._keep_probs(out, at, draws)
        self._ids[at], self._confidence[at] = self._drafted(out, at, lengths)
        survival = self.calibration.apply(self._confidence[at]).cumprod(1)
        self._survival[at], self._length[at], self._gen[at] = survival, lengths, slots.gen[at]
        bins = np.minimum((survival * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        return np.bincount(bins.ravel(), minlength=NUM_BINS).astype("<u4").tobytes()

    def _drafted(
        self, out: DraftOutput, at: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Ids and confidences of the rows of slots `at`, whose sequences are so long."""
        return out.ids.numpy().astype(np.int32), out.confidence.numpy()

    def drafting(self, confidence: bytes, took_ns: int) -> Drafting | None:
        """What is told of a draft pass that returned `confidence`."""
        num = int(np.frombuffer(confidence, "<u4").sum())
        if not num:
            return None
        return Drafting(took_ns, num, self.calibration.error.tolist())

    def trials(self, at: NDArray[np.int64], widths: NDArray[np.int64]) -> Trials | None:
        """The drafts of the rows that sample, `widths` positions each, all behind the others."""
        owner = np.repeat(np.arange(len(at)), widths)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(widths) - widths, widths)
        rows = np.flatnonzero(place < widths[owner] - 1)
        if not len(rows) or self._probs is None:
            return None
        slots, places = at[owner[rows]], place[rows]
        return Trials(
            torch.from_numpy(rows),
            torch.from_numpy(self._ids[slots, places].astype(np.int64)),
            self._probs[torch.from_numpy(slots), torch.from_numpy(places)],
        )

    def _keep_probs(self, out: DraftOutput, at: NDArray[np.int64], draws: Draws) -> None:
        if self._probs is None:
            shape = (len(self.slots.rid), self.draft_len, out.logits.shape[-1])
            self._probs = torch.zeros(shape)
        slots = torch.from_numpy(at)
        for place in range(self.draft_len):
            self._probs[slots, place] = token_probs(out.logits[:, place], draws).float()

    def drafts(self, at: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The position of the first draft of each slot, and its drafts."""
        return self._length[at], self._ids[at]

    def _draws(self, at: NDArray[np.int64], lengths: NDArray[np.int64]) -> Draws:
        """Drafts under the noise that the sampler will draw their positions with, or, where it is
        to accept or reject them, under noise that is not its own."""
        stream = DRAFT_STREAM if self.rejects else 0
        inits = [self.slots.request(slot).init for slot in at.tolist()]
        params = [init.sampling for init in inits]
        return Draws(
            temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
            top_k=torch.tensor([max(0, p.top_k) for p in params], dtype=torch.int64),
            top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
            min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
            seed=torch.tensor([init.seed for init in inits], dtype=torch.int64),
            sub_index=torch.tensor([init.sub_index + stream for init in inits], dtype=torch.int64),
            position=torch.from_numpy(lengths),
        )


class _Lent:
    """Ids in a slot table that are not known to hold, and are gone again afterwards."""

    def __init__(
        self,
        slots: SlotTable,
        at: NDArray[np.int64],
        counts: NDArray[np.int64],
        ids: NDArray[np.int32],
    ) -> None:
        owners = np.repeat(np.arange(len(at)), counts)
        place = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._slots, self._at = slots, at[owners]
        self._where = slots.total_len[self._at] + place
        self._ids = ids[self._at, place]

    def __enter__(self) -> None:
        self._slots.tokens[self._at, self._where] = self._ids

    def __exit__(self, *_: object) -> None:
        self._slots.tokens[self._at, self._where] = UNWRITTEN


def cut_pairs(live: LiveRows) -> tuple[LiveRows, NDArray[np.int64], NDArray[np.int64]]:
    """Rows with drafts, cut into pairs of positions behind the first one or two.

    A row of the batch leaves its open pair in its state block, and needs one only if it begins
    within a pair. So each later pair can have a place of its own, from which `Speculation.keep`
    takes that of the last position that holds.

    Returns: the parts, the row that each is of, and its number there.
    """
    counts = live.counts
    heads = np.where(live.drafted, np.minimum(counts, PAIR - live.starts % PAIR), counts)
    num = 1 + -(-(counts - heads) // PAIR)
    owners = np.repeat(np.arange(len(counts)), num)
    place = np.arange(len(owners)) - np.repeat(np.cumsum(num) - num, num)
    before = np.where(place > 0, heads[owners] + PAIR * (place - 1), 0)
    widths = np.where(place > 0, np.minimum(PAIR, counts[owners] - before), heads[owners])
    parts = LiveRows(
        rows=live.rows[owners],
        slots=live.slots[owners],
        starts=live.starts[owners] + before,
        counts=widths,
        samples=live.samples[owners],
        drafted=live.drafted[owners],
        masked=live.masked[owners],
        skips=None if live.skips is None else live.skips[owners],
    )
    return parts, owners, place


def best_drafts(
    survival: NDArray[np.float32],
    most: NDArray[np.int64],
    spare: int,
    rids: NDArray[np.uint64],
) -> NDArray[np.int64]:
    """How many drafts of each row are among the `spare` likeliest; [rows, drafts] survival, which
    never rises along a row."""
    num, width = survival.shape
    allowed = np.arange(width) < most[:, None]
    if int(most.sum()) <= spare:
        return most
    place = np.broadcast_to(np.arange(width), survival.shape)[allowed]
    owner = np.broadcast_to(np.arange(num)[:, None], survival.shape)[allowed]
    order = np.lexsort((rids[owner], place, -survival[allowed]))
    return np.bincount(owner[order[:spare]], minlength=num)
