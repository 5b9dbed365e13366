"""Log-probabilities of prompts on a device, worked out behind the chunk that computed them."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import PromptLogprobs
from kernels.sampling.finite_rows import finite_rows
from kernels.sampling.scores_cuda import token_scores
from kernels.sampling.token_logprobs import token_logprobs
from kernels.sampling.token_ranks import token_ranks
from services.executor.interface import LiveRows
from services.executor.prompt_logprobs import asking_rows
from services.executor.slots import SlotTable

Copy = Callable[[Tensor, NDArray[np.int32]], None]
Shared = Callable[..., Tensor]


class _Part(NamedTuple):
    """What one row computed of its prompt."""

    row: int  # of the step
    first: int  # row of the logits
    num: int
    position: int  # of the first id whose log-probability it is
    num_top: int


class PromptScores:
    """What the rows that ask computed of their prompts: a few numbers a position, not its logits.

    Launches only; the results are in host memory once the device has come so far.
    """

    def __init__(
        self,
        logits: Tensor,
        wanted: NDArray[np.int64],
        live: LiveRows,
        slots: SlotTable,
        *,
        copy: Copy,
        shared: Shared,
    ) -> None:
        """
        Args:
            logits: of the wanted positions of all rows, one row behind the other.
            wanted: as `prompt_logprobs.wanted_logits` said.
            copy: as `DeviceSampler.flush` takes it.
            shared: new host memory of a shape, as `DeviceStream.shared`.
        """
        self._parts: list[_Part] = []
        firsts = np.cumsum(wanted) - wanted
        ids = np.zeros(len(logits), np.int32)
        for i in asking_rows(live, slots).tolist():
            slot, start, first = int(live.slots[i]), int(live.starts[i]), int(firsts[i])
            end = min(start + int(live.counts[i]), int(slots.prompt_len[slot]) - 1)
            count, num_top = end - start, int(slots.num_prompt_logprobs[slot])
            ids[first : first + count] = slots.tokens[slot, start + 1 : end + 1]
            self._parts.append(_Part(int(live.rows[i]), first, count, start + 1, num_top))
        on_device = torch.empty(len(ids), dtype=torch.int32, device=logits.device)
        copy(on_device, ids)
        num_top = max(part.num_top for part in self._parts)
        scores = _scores(logits, on_device, num_top)
        self._found = [shared(*found.shape, dtype=found.dtype) for found in scores]
        for to, found in zip(self._found, scores, strict=True):
            to.copy_(found, non_blocking=True)

    def messages(self) -> list[PromptLogprobs]:
        """Of all rows that asked."""
        logprobs, ranks, top_ids, top_logprobs = (found.numpy() for found in self._found)
        messages: list[PromptLogprobs] = []
        for part in self._parts:
            rows, width = slice(part.first, part.first + part.num), slice(part.num_top)
            messages.append(
                PromptLogprobs(
                    first=part.position,
                    logprobs=logprobs[rows].astype("<f4").tobytes(),
                    top_ids=top_ids[rows, width].astype("<i4").tobytes(),
                    top_logprobs=top_logprobs[rows, width].astype("<f4").tobytes(),
                    row=part.row,
                    ranks=ranks[rows].astype("<i4").tobytes(),
                )
            )
        return messages


def _scores(logits: Tensor, ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `token_scores`; on a host by the CPU's kernels."""
    if logits.is_cuda:
        return token_scores(logits, ids, num_top)
    logits, ids = torch.where(finite_rows(logits)[:, None], logits, 0.0), ids.long()
    own, best, values = token_logprobs(logits, ids, num_top)
    return own, token_ranks(logits, ids).to(torch.int32), best.to(torch.int32), values
