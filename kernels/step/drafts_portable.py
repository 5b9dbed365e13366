"""Drafts of decode rows on a device, by slot: `csrc/drafts_portable.cu`.

A step's rows become tokens, one behind the other: the one that is known, and the drafts behind it
that the step verifies. As in `slots_portable` nothing waits for the host, which writes arguments to
pinned memory and reads results there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import portable
from kernels.step.slots_portable import NO_SLOT, ROW_FIELDS, SlotArrays

NUM_BINS = 16  # of survival
FIT = 8  # of a place: scale, offset, curve of 3, what was said, what was, weight


@dataclass(frozen=True)
class DraftArrays:
    """What each slot keeps of its drafts; `SlotArrays.drafted` says what they continue."""

    ids: Tensor  # [slots, places], int32
    confidence: Tensor  # [slots, places], float32: as the model gave it
    survival: Tensor  # [slots, places], float32: that it is right, and all before it
    fits: Tensor  # [places, FIT], float64: of confidences to what became of them

    @staticmethod
    def of(num_slots: int, places: int, device: torch.device) -> "DraftArrays":
        """No drafts."""

        def floats() -> Tensor:
            return torch.zeros(num_slots, places, device=device)

        fits = torch.zeros(places, FIT, dtype=torch.float64, device=device)
        fits[:, 0] = 1
        ids = torch.zeros(num_slots, places, dtype=torch.int32, device=device)
        return DraftArrays(ids, floats(), floats(), fits)


@dataclass(frozen=True)
class DraftTables:
    """Rows and tokens of a step; what lies behind them is of no meaning."""

    rows: Tensor  # [rows, ROW_FIELDS], as `begin_rows` leaves them
    positions: Tensor  # [rows]
    most: Tensor  # [rows]: drafts that may be verified; -1: the request is over
    chosen: Tensor  # [rows, places]: drafts that are
    widths: Tensor  # [rows]: tokens
    firsts: Tensor  # [rows]: where they begin
    held: Tensor  # [rows]: tokens that turned out right
    sources: Tensor  # [rows]: block of the open pair that the request keeps; -1: its own
    tokens: Tensor  # [tokens, ROW_FIELDS]: a row of one position each; slot -1: padding
    starts: Tensor  # [tokens]: positions
    place_of: Tensor  # [tokens]: drafts before it in its row
    row_of: Tensor  # [tokens]

    @staticmethod
    def of(rows: Tensor, positions: Tensor, places: int, num_tokens: int) -> "DraftTables":
        """For so many tokens, and the rows of a table that there is."""

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=rows.device)

        num = len(rows)
        return DraftTables(
            rows=rows,
            positions=positions,
            most=ints(num),
            chosen=ints(num, places),
            widths=ints(num),
            firsts=ints(num),
            held=ints(num),
            sources=ints(num),
            tokens=ints(num_tokens, ROW_FIELDS).fill_(NO_SLOT),
            starts=ints(num_tokens),
            place_of=ints(num_tokens),
            row_of=ints(num_tokens),
        )


class DraftState:
    """State of slots, drafts and tables, as the kernels want them."""

    def __init__(
        self,
        arrays: SlotArrays,
        drafts: DraftArrays,
        tables: DraftTables,
        spare: tuple[int, int],
        vocab_size: int,
    ) -> None:
        """`spare`: state blocks that each slot has for open pairs behind drafts: the first one of
        slot 0, and how many each has."""
        self.drafts, self.tables, self.spare = drafts, tables, spare
        slots = (
            *(arrays.kv_len, arrays.max_len, arrays.done, arrays.recent, arrays.stops),
            *(arrays.state_block, arrays.window_blocks, arrays.drafted),
            *(drafts.ids, drafts.confidence, drafts.survival, drafts.fits),
        )
        sizes = (
            *(drafts.ids.shape[1], arrays.recent.shape[1], arrays.stops.shape[1]),
            *(arrays.window_blocks.shape[1], *spare, vocab_size),
        )
        own = (getattr(tables, name) for name in DraftTables.__dataclass_fields__)
        self._slots = _struct(*(x.data_ptr() for x in slots), *sizes)
        self._tables = _struct(*(x.data_ptr() for x in own))
        self._pair = self._slots.ctypes.data, self._tables.ctypes.data

    @property
    def places(self) -> int:
        """Drafts of a row, at most."""
        return self.drafts.ids.shape[1]

    def begin(self, given: int, num_rows: int, num_tokens: int, spare: int, stamp: int = 0) -> None:
        """`begin_rows`, and the tokens that these rows compute: with drafts, if they are known.

        The `spare` likeliest drafts are verified, which are always the first ones of each row.

        Args:
            given: as for `begin_rows`; a count of 1 + n allows n drafts.
            num_tokens: that there is room for; padding lies behind those of the rows.
        """
        counts = given, num_rows, num_tokens, spare, stamp
        _run("begin_drafted", self.tables.rows, *self._pair, *counts)

    def place_masks(
        self, given: Tensor, states: Tensor, num_tokens: int, masks: Tensor, flags: Tensor
    ) -> None:
        """Masks of rows and places go to their tokens.

        Args:
            given: [rows, 1 + places, words], int32.
            states: [rows, 1 + places], int32: MaskFlag of each.
            masks, flags: of `SampleBuffers`.
        """
        shape = states.shape[1], masks.shape[1], num_tokens
        _run("place_masks", given, self._pair[1], states, *shape, masks, flags)

    def take_turns(self, sampled: tuple[Tensor, Tensor], now: int, num_tokens: int) -> None:
        """Only tokens behind `now` drafts sample next: those whose drafts were all drawn.

        Where sampling counts what it draws, places take turns from 0 on; what was drawn before
        stays (`Sampling.KEPT`).
        """
        tokens, found = sampled
        _run("take_turns", tokens, *self._pair, found, now, num_tokens)

    def accept(
        self,
        num_rows: int,
        sampled: tuple[Tensor, Tensor],
        results: tuple[int, int, int, int, int],
        pairs: Tensor,
        *,
        verifies: bool,
        stamp: int = 0,
    ) -> None:
        """As `advance_rows`: tokens as far as each draft is the one that was drawn.

        Open pairs are those behind the last token that holds, and it is learned how good
        confidences were.

        Args:
            sampled: tokens, and whether they are any, by token.
            results: addresses of [num_rows], int32: RowFlag; positions that are valid now; tokens;
                where those of the row begin in what was sampled, and how many were.
            pairs: of the cache: [blocks, …], float32.
            verifies: whether there may be drafts among what was sampled.
        """
        tokens, found = sampled
        size = pairs.numel() // pairs.shape[0]
        after = pairs, size, verifies, stamp
        _run("accept_drafts", tokens, *self._pair, found, num_rows, *results, *after)

    def plan(
        self,
        given: int,
        angles: tuple[Tensor, Tensor],
        out: tuple[Tensor, ...],
        sizes: tuple[int, int, int, int, int],
        stamp: int = 0,
    ) -> None:
        """What a draft pass reads: the newest token of each slot, and noise behind it.

        Args:
            given: address of the slots of the rows, int32, -1 for padding; those that are over
                become padding.
            angles: cosines and sines, [positions, rope_dim / 2].
            out: rows, starts, ids, positions, window_slots, cosines and sines of `DraftStep`.
            sizes: number of rows, tokens of a draft block, window, positions of a block of the
                pools, id of the noise.
        """
        cos, sin = angles
        num_rows, size, window, block, noise = sizes
        counts = num_rows, size, window, cos.shape[1], block, noise
        _run("plan_drafts", cos, self._pair[0], sin, given, *counts, *out, stamp)

    def store(
        self,
        rows: Tensor,
        ids: Tensor,
        chances: Tensor,
        results: tuple[int, int, int, int],
        stamp: int = 0,
    ) -> None:
        """The drafts of a pass become those of the slots.

        Args:
            rows: of `DraftStep`, of its first place.
            ids, chances: [places, rows]: int32; float32, of the confidence head.
            results: addresses of ids [rows, places] and lengths [rows], int32; NUM_BINS counts,
                int32; how far confidences are too high, float32 by place.
        """
        num_rows = ids.shape[1]
        _run("store_drafts", rows, self._pair[0], ids, chances, num_rows, *results, stamp)


def _struct(*words: int) -> NDArray[np.int64]:
    return np.array(words, np.int64)


def _run(function: str, *arguments: portable.Argument) -> None:
    portable.run("step", "drafts_portable", function, *arguments)
