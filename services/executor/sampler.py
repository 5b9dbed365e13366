"""From logits to tokens: adjusts each row as its request asks, then calls the sampling kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.sampling.finite_rows import finite_rows
from kernels.sampling.masks import apply_masks
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.rejection import accept_drafts
from kernels.sampling.sample_tokens import Draws, sample_tokens
from kernels.sampling.token_logprobs import token_logprobs
from services.executor.interface import Sampled
from services.executor.sample_row import SampleRow, SampleSettings

__all__ = ["SampleRow", "Trials", "sample"]

_NO_IDS, _NO_LOGPROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)


class Trials(NamedTuple):
    """Drafts to be accepted as often as is right, see `accept_drafts`."""

    at: Tensor  # rows that have one, int64
    ids: Tensor  # int64
    probs: Tensor  # [trials, vocab_size], that they were drawn from


def sample(logits: Tensor, rows: Sequence[SampleRow], trials: Trials | None = None) -> Sampled:
    """One token per row; [rows, vocab_size] float32 logits as the model made them.

    Penalties come first, then logit_bias, then what bans ids: allowed_token_ids, bad_words, the
    grammar's mask, and stop ids below the minimum length. Log-probabilities are those of the
    model: before all of that, at temperature 1. A row whose logits are not all finite, or with no
    id left to sample, is marked and gets a meaningless token. Every row's bits depend on that row
    alone.
    """
    usable = finite_rows(logits)
    if not bool(usable.all()):
        logits = torch.where(usable[:, None], logits, 0.0)
    settings = [row.resolved for row in rows]
    adjusted = _adjust(logits, rows, settings)
    draws = _draws(rows)
    ids = sample_tokens(adjusted, draws)
    if trials is not None:
        own = Draws(*(values[trials.at] for values in draws))
        ids[trials.at] = accept_drafts(adjusted[trials.at], own, trials.ids, trials.probs)
    if adjusted is not logits:
        usable &= adjusted.gather(1, ids[:, None])[:, 0] > -torch.inf
    logprobs, top_ids, top_logprobs = _logprobs(logits, ids, rows)
    return Sampled(ids.to(torch.int32).numpy(), usable.numpy(), logprobs, top_ids, top_logprobs)


def _draws(rows: Sequence[SampleRow]) -> Draws:
    params = [row.init.sampling for row in rows]
    return Draws(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([max(0, p.top_k) for p in params], dtype=torch.int64),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seed=torch.tensor([row.init.seed for row in rows], dtype=torch.int64),
        sub_index=torch.tensor([row.init.sub_index for row in rows], dtype=torch.int64),
        position=torch.tensor([len(row.tokens) for row in rows], dtype=torch.int64),
    )


def _adjust(
    logits: Tensor, rows: Sequence[SampleRow], settings: Sequence[SampleSettings]
) -> Tensor:
    """The logits to sample from; the input itself if no row asks for anything."""
    penalised = any(s.has_penalty for s in settings)
    masked = [i for i, row in enumerate(rows) if row.mask is not None]
    edited = [i for i, row in enumerate(rows) if _has_edits(row, settings[i])]
    if not penalised and not masked and not edited:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    if penalised:
        _penalise(logits, rows, settings)
    for i in edited:
        _edit(logits[i].numpy(), rows[i], settings[i])
    if masked:
        _mask(logits, masked, rows)
    return logits


def _has_edits(row: SampleRow, settings: SampleSettings) -> bool:
    return (
        len(settings.bias_ids) > 0
        or settings.allowed is not None
        or len(settings.bad_ids) > 0
        or len(settings.bad_words) > 0
        or len(row.tokens) < row.init.min_len
    )


def _edit(logits: NDArray[np.float32], row: SampleRow, settings: SampleSettings) -> None:
    """Bias and bans of one row, in place."""
    np.add.at(logits, settings.bias_ids, settings.bias)
    if settings.allowed is not None:
        kept = logits[settings.allowed]
        logits[:] = -np.inf
        logits[settings.allowed] = kept
    logits[settings.bad_ids] = -np.inf
    output = row.tokens[row.init.prompt_len :]
    for word in settings.bad_words:
        before = len(word) - 1
        if len(output) >= before and np.array_equal(output[-before:], word[:-1]):
            logits[word[-1]] = -np.inf
    if len(row.tokens) < row.init.min_len:
        logits[settings.stop_ids] = -np.inf


def _penalise(
    logits: Tensor, rows: Sequence[SampleRow], settings: Sequence[SampleSettings]
) -> None:
    """Counts are made from the tokens, so a recomputed request has the ones it had before."""
    params = [row.init.sampling for row in rows]
    apply_penalties(
        logits,
        tokens=[
            row.tokens if s.has_penalty else _NO_IDS for row, s in zip(rows, settings, strict=True)
        ],
        prompt_lens=[
            row.init.prompt_len if s.has_penalty else 0
            for row, s in zip(rows, settings, strict=True)
        ],
        presence=torch.tensor([p.presence_penalty for p in params], dtype=torch.float32),
        frequency=torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32),
        repetition=torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32),
    )


def _mask(logits: Tensor, masked: list[int], rows: Sequence[SampleRow]) -> None:
    masks = np.stack([mask for i in masked if (mask := rows[i].mask) is not None])
    if len(masked) == len(rows):
        apply_masks(logits, torch.from_numpy(masks))
        return
    part = logits[masked]
    apply_masks(part, torch.from_numpy(masks))
    logits[masked] = part


def _logprobs(
    logits: Tensor, ids: Tensor, rows: Sequence[SampleRow]
) -> tuple[NDArray[np.float32], list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Of the rows that ask; the others get zeros and empty lists."""
    logprobs = np.zeros(len(rows), np.float32)
    top_ids, top_logprobs = [_NO_IDS] * len(rows), [_NO_LOGPROBS] * len(rows)
    asking = [i for i, row in enumerate(rows) if row.init.n_logprobs >= 0]
    if asking:
        num_top = max(rows[i].init.n_logprobs for i in asking)
        part, drawn = (logits, ids) if len(asking) == len(rows) else (logits[asking], ids[asking])
        own, best, values = token_logprobs(part, drawn, num_top)
        logprobs[asking] = own.numpy()
        best_ids, best_values = best.to(torch.int32).numpy(), values.numpy()
        for j, i in enumerate(asking):
            width = rows[i].init.n_logprobs
            top_ids[i], top_logprobs[i] = best_ids[j, :width], best_values[j, :width]
    return logprobs, top_ids, top_logprobs
