"""The tokens of a step: from the logits of its rows, under masks and behind drafts."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.executor.interface import LiveRows, Sampled
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.masks.protocol import MaskState
from services.executor.masks.vocabulary import Words
from services.executor.sampler import SampleRow, Trials, sample
from services.executor.slots import SlotTable
from services.executor.speculation import Speculation


def draw_tokens(
    logits: Tensor,
    wanted: NDArray[np.int64],
    live: LiveRows,
    slots: SlotTable,
    masks: GrammarMasks | None,
    speculation: Speculation | None,
) -> Sampled:
    """A token for each row that samples, or several where drafts turn out right.

    Rows whose mask is not there sample nothing, whatever it would have allowed; and nothing is
    sampled behind a draft whose mask is not there.

    Args:
        logits: [sum of wanted, vocab_size], of the last `wanted` positions of each row.
        masks: None: no row is under a grammar.
        speculation: None: no row has drafts.
    """
    asking, num_rows = np.flatnonzero(live.samples), len(live.rows)
    if not len(asking):
        return spread(None, asking, num_rows)
    widths = np.ones(num_rows, np.int64)
    if speculation is not None:
        widths = np.where(live.drafted, live.counts, widths)
    states = None
    if masks is not None and live.masked.any():
        states = masks.collect(live, slots)
        is_free = (states[asking] == MaskState.FREE) | (states[asking] == MaskState.MASK)
        asking = asking[is_free]
        if speculation is not None:
            widths = np.minimum(widths, masks.places(live, slots))
    rows: list[SampleRow] = []
    for i in asking.tolist():
        slot, width = int(live.slots[i]), int(widths[i])
        own: list[Words | None] = [None] * width
        if states is not None and masks is not None and live.masked[i]:
            own = [masks.mask(slot, place) for place in range(width)]
            if states[i] == MaskState.FREE:
                own[0] = None
        if width > 1 and speculation is not None:
            rows += speculation.sample_rows(slot, own)
        else:
            rows.append(slots.sample_row(slot, own[0]))
    trials = None
    if speculation is not None and speculation.rejects:
        trials = speculation.trials(live.slots[asking], widths[asking])
    drawn = _sample(logits, wanted, live, asking, widths, rows, trials) if rows else None
    if drawn is None or len(rows) == len(asking) or speculation is None:
        result = spread(drawn, asking, num_rows)
    else:
        counts = np.ones(num_rows, np.int64)
        firsts = np.cumsum(widths[asking]) - widths[asking]  # of what was drawn for each
        for i, first in zip(asking.tolist(), firsts.tolist(), strict=True):
            if widths[i] > 1:
                span = slice(first, first + int(widths[i]))
                held = speculation.holding(live, i, drawn.tokens[span])
                counts[i] = _sound(drawn.finite[span], held)
        is_wide = np.zeros(num_rows, bool)
        is_wide[asking] = widths[asking] > 1
        speculation.keep(live, np.where(is_wide, counts, 0), widths)
        result = spread(drawn, asking, num_rows, firsts, counts)
    if states is not None and masks is not None:
        result = masks.settle(live, slots, states, result)
    return result


def _sample(
    logits: Tensor,
    wanted: NDArray[np.int64],
    live: LiveRows,
    asking: NDArray[np.int64],
    widths: NDArray[np.int64],
    rows: Sequence[SampleRow],
    trials: Trials | None,
) -> Sampled:
    """One token for each of `rows`: `widths` of each row `asking`, its first positions if it has
    drafts and the last one if not."""
    if len(rows) < len(logits):
        own, ends = widths[asking], np.cumsum(wanted)[asking]
        begins = np.where(live.drafted[asking], ends - wanted[asking], ends - own)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(own) - own, own)
        logits = logits[torch.from_numpy(np.repeat(begins, own) + place)]
    return sample(logits, rows, trials)


def _sound(finite: NDArray[np.bool_], count: int) -> int:
    """So many of the tokens drawn hold; one whose logits are not finite is drawn again, alone."""
    bad = np.flatnonzero(~finite[:count])
    return max(1, int(bad[0])) if len(bad) else count


def spread(
    drawn: Sampled | None,
    asking: NDArray[np.int64],
    num_rows: int,
    firsts: NDArray[np.int64] | None = None,
    counts: NDArray[np.int64] | None = None,
) -> Sampled:
    """What was drawn for the rows `asking`, as arrays over all rows.

    Args:
        firsts: where what was drawn for each of `asking` begins; None: one token each.
        counts: [num_rows], tokens of each row that hold; a row that is not asking has one, which
            means nothing. None: one each.
    """
    each = np.ones(num_rows, np.int64) if counts is None else counts
    total, finite = int(each.sum()), np.ones(num_rows, bool)
    tokens, logprobs = np.zeros(total, np.int32), np.zeros(total, np.float32)
    top_ids = [np.zeros(0, np.int32)] * total
    top_logprobs = [np.zeros(0, np.float32)] * total
    if drawn is not None:
        own = each[asking]
        place = np.arange(int(own.sum())) - np.repeat(np.cumsum(own) - own, own)
        first = np.arange(len(asking)) if firsts is None else firsts
        source = np.repeat(first, own) + place
        at = np.repeat((np.cumsum(each) - each)[asking], own) + place
        tokens[at], logprobs[at] = drawn.tokens[source], drawn.logprobs[source]
        finite[asking] = drawn.finite[first]
        for i, j in zip(at.tolist(), source.tolist(), strict=True):
            top_ids[i], top_logprobs[i] = drawn.top_ids[j], drawn.top_logprobs[j]
    return Sampled(tokens, finite, logprobs, top_ids, top_logprobs, counts)
