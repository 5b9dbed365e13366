"""Routed experts of a layer over the ranks of a group: who has which, and how many rows came."""

import numpy as np
import torch
from torch import Tensor

from deepmesh.experts import EMPTY, Places


class SpreadExperts:
    """Where each expert lies: slot s of rank r is number r · slots + s of the group.

    The same on all ranks at every step; `place` is called between two of them. The exchange and
    the kernels see slots in place of experts: with several copies of an expert, its rows are dealt
    out to them in equal shares.
    """

    def __init__(self, places: Places, rank: int, num_experts: int) -> None:
        """`places` [ranks, slots]: the expert in each slot, or EMPTY."""
        self.num_experts = num_experts
        self._rank, self.slots = rank, places.shape[1]
        self.first_slot = rank * self.slots
        self.owners = torch.arange(len(places)).repeat_interleave(self.slots)  # rank of each slot
        self.counts = torch.zeros(num_experts, dtype=torch.int64)  # rows of our tokens, since ever
        self.rows = 0  # that came to the experts held here in the latest step
        self.place(places)

    def place(self, places: Places) -> None:
        """From now on experts lie so."""
        self.places = places.copy()
        flat = torch.from_numpy(self.places.reshape(-1).astype(np.int64))
        held = (flat != EMPTY).nonzero().squeeze(1)
        held = held[flat[held].argsort(stable=True)]
        self._copies = torch.bincount(flat[held], minlength=self.num_experts)
        self._most = int(self._copies.max())
        first = self._copies.cumsum(0) - self._copies
        number = torch.arange(len(held)) - first[flat[held]]
        self._slot_of = torch.zeros(self.num_experts, self._most, dtype=torch.int64)
        self._slot_of[flat[held], number] = held

    def table(self) -> tuple[Tensor, Tensor]:
        """[num_experts, most copies], the slots of each expert, and how many there are of it."""
        return self._slot_of, self._copies

    def choose(self, expert_ids: Tensor) -> Tensor:
        """The slots that compute each row [num_tokens, top_k]; the rows are counted."""
        flat = expert_ids.flatten()
        wanted = torch.bincount(flat, minlength=self.num_experts)
        self.counts += wanted
        if self._most == 1:
            return self._slot_of[:, 0][expert_ids]
        order = flat.argsort(stable=True)
        number = torch.empty_like(order)  # of a row among those of its expert
        number[order] = torch.arange(len(flat)) - (wanted.cumsum(0) - wanted)[flat[order]]
        # each rank begins with another copy: else the first of them got every rank's odd row
        copy = (number + self._rank) % self._copies[flat]
        return self._slot_of[flat, copy].view_as(expert_ids)

    def arrived(self, slots: Tensor) -> None:
        """Rows of these slots are computed here, as far as they are this rank's."""
        here = (slots >= self.first_slot) & (slots < self.first_slot + self.slots)
        self.rows = int(here.sum())
