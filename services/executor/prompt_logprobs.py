"""Log-probabilities of the ids of prompts, from the logits of the rows that compute them."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import PromptLogprobs
from kernels.sampling.finite_rows import finite_rows
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.token_ranks import token_ranks
from services.executor.interface import LiveRows
from services.executor.slots import SlotTable


def wanted_logits(live: LiveRows, slots: SlotTable) -> NDArray[np.int64]:
    """Of how many of its last positions each row needs logits: [rows]."""
    wanted = live.samples.astype(np.int64)
    rows = asking_rows(live, slots)
    wanted[rows] = live.counts[rows]
    return wanted


def prompt_logprobs(
    logits: Tensor, wanted: NDArray[np.int64], live: LiveRows, slots: SlotTable
) -> list[PromptLogprobs]:
    """What the rows that ask computed of their prompts.

    Args:
        logits: of the wanted positions of all rows, one row behind the other.
        wanted: as `wanted_logits` said.
    """
    found: list[PromptLogprobs] = []
    firsts = np.cumsum(wanted) - wanted
    for i in asking_rows(live, slots).tolist():
        slot, start, first = int(live.slots[i]), int(live.starts[i]), int(firsts[i])
        end = min(start + int(live.counts[i]), int(slots.prompt_len[slot]) - 1)
        ids = torch.from_numpy(slots.tokens[slot, start + 1 : end + 1].astype(np.int64))
        part = logits[first : first + end - start]
        part = torch.where(
            finite_rows(part)[:, None], part, 0.0
        )  # the request ends when it samples
        own, best, values = token_logprobs(part, ids, int(slots.num_prompt_logprobs[slot]))
        found.append(
            PromptLogprobs(
                first=start + 1,
                logprobs=own.numpy().astype("<f4").tobytes(),
                top_ids=best.numpy().astype("<i4").tobytes(),
                top_logprobs=values.numpy().astype("<f4").tobytes(),
                row=int(live.rows[i]),
                ranks=token_ranks(part, ids).numpy().astype("<i4").tobytes(),
            )
        )
    return found


def asking_rows(live: LiveRows, slots: SlotTable) -> NDArray[np.int64]:
    """Rows that compute a position whose next id is in the prompt, for requests that asked."""
    asks = slots.num_prompt_logprobs[live.slots] >= 0
    return np.flatnonzero(asks & (live.starts < slots.prompt_len[live.slots] - 1))
