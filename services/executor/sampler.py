"""From logits to tokens: adjusts each row as its request asks, then calls the sampling kernels."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import SlotInit
from kernels.sampling.penalties import apply_penalties
from kernels.sampling.sample_tokens import Draws, sample_tokens
from kernels.sampling.token_logprobs import token_logprobs
from services.executor.interface import Sampled


class SampleRow(NamedTuple):
    """What the sampler knows of the request behind a row of logits."""

    init: SlotInit
    stop_ids: frozenset[int]
    tokens: NDArray[np.int32]  # all ids before the one to sample: its position is their number


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> Sampled:
    """One token per row; [rows, vocab_size] float32 logits as the model made them.

    Penalties come first, then logit_bias, then the ban of stop ids below the minimum length.
    Log-probabilities are those of the model: before all of that, at temperature 1. A row whose
    logits are not all finite is marked and gets a meaningless token. Every row's bits depend
    on that row alone.
    """
    finite = torch.isfinite(logits).all(dim=1)
    if not bool(finite.all()):
        logits = torch.where(finite[:, None], logits, 0.0)
    ids = sample_tokens(_adjust(logits, rows), _draws(rows))
    logprobs, top_ids, top_logprobs = _logprobs(logits, ids, rows)
    return Sampled(ids.to(torch.int32).numpy(), finite.numpy(), logprobs, top_ids, top_logprobs)


def _draws(rows: Sequence[SampleRow]) -> Draws:
    params = [row.init.sampling for row in rows]
    return Draws(
        temperature=torch.tensor([p.temperature for p in params], dtype=torch.float32),
        top_k=torch.tensor([max(0, p.top_k) for p in params]),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seed=torch.tensor([row.init.seed for row in rows]),
        sub_index=torch.tensor([row.init.sub_index for row in rows]),
        position=torch.tensor([len(row.tokens) for row in rows]),
    )


def _adjust(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """The logits to sample from; the input itself if no row asks for anything."""
    penalised = [i for i, row in enumerate(rows) if _has_penalty(row)]
    biased = [i for i, row in enumerate(rows) if row.init.sampling.logit_bias]
    short = [i for i, row in enumerate(rows) if len(row.tokens) < row.init.min_len]
    if not penalised and not biased and not short:
        return logits
    logits = logits.clone()
    if penalised:
        logits[penalised] = _penalise(logits[penalised], [rows[i] for i in penalised])
    for i in biased:
        ids, values = zip(*rows[i].init.sampling.logit_bias, strict=True)
        logits[i].index_add_(0, torch.tensor(ids), torch.tensor(values, dtype=torch.float32))
    for i in short:
        logits[i, sorted(rows[i].stop_ids)] = float("-inf")
    return logits


def _has_penalty(row: SampleRow) -> bool:
    params = row.init.sampling
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    )


def _penalise(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    """Counts are made from the tokens, so a recomputed request has the ones it had before."""
    vocab = logits.shape[1]
    counts = [np.bincount(row.tokens[row.init.prompt_len :], minlength=vocab) for row in rows]
    prompts = [np.bincount(row.tokens[: row.init.prompt_len], minlength=vocab) for row in rows]
    params = [row.init.sampling for row in rows]
    return apply_penalties(
        logits,
        output_counts=torch.from_numpy(np.stack(counts)).to(torch.int32),
        in_prompt=torch.from_numpy(np.stack(prompts) > 0),
        presence=torch.tensor([p.presence_penalty for p in params], dtype=torch.float32),
        frequency=torch.tensor([p.frequency_penalty for p in params], dtype=torch.float32),
        repetition=torch.tensor([p.repetition_penalty for p in params], dtype=torch.float32),
    )


def _logprobs(
    logits: Tensor, ids: Tensor, rows: Sequence[SampleRow]
) -> tuple[NDArray[np.float32], list[NDArray[np.int32]], list[NDArray[np.float32]]]:
    """Of the rows that ask; the others get zeros and empty lists."""
    logprobs = np.zeros(len(rows), np.float32)
    top_ids = [np.zeros(0, np.int32)] * len(rows)
    top_logprobs = [np.zeros(0, np.float32)] * len(rows)
    asking = [i for i, row in enumerate(rows) if row.init.n_logprobs >= 0]
    if asking:
        num_top = max(rows[i].init.n_logprobs for i in asking)
        own, best, values = token_logprobs(logits[asking], ids[asking], num_top)
        logprobs[asking] = own.numpy()
        for j, i in enumerate(asking):
            width = rows[i].init.n_logprobs
            top_ids[i] = best[j, :width].to(torch.int32).numpy()
            top_logprobs[i] = values[j, :width].numpy()
    return logprobs, top_ids, top_logprobs
