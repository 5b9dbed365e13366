"""Placements made better: exchanges between two slots, and other experts in spare slots."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.experts import EMPTY, Places

from .expert_places import Array, copies_of, copy_costs, membership
from .expert_points import Points

SPREAD = 0.02  # what evenness of all ranks counts beside the busiest: ties are broken by it
LEAST_GAIN = 1e-8
FEW_RANKS = 24  # looked at first
MAX_REPLACED = 64  # slots looked at for another expert
TRIED = 3  # of these, with swaps behind them
SWAPS_BEHIND = 40


class Refinement:
    """Local search from one placement. Every step lowers `score`, so it ends.

    The score of a placement is the mean over the points of the busiest rank's load, in mean loads,
    plus a small part for unevenness, plus `move_cost` for each expert that its rank lacks at home.
    """

    def __init__(
        self,
        points: Points,
        places: Places,
        *,
        max_copies: int,
        ridge: float = 0.0,
        home: Places | None = None,
        move_cost: float = 0.0,
    ) -> None:
        """
        Args:
            max_copies: of all experts together.
            home: where experts are at present; None: nowhere, and moving costs nothing.
        """
        self.places = places.copy()
        self._points, self._ridge, self._max_copies = points, ridge, max_copies
        self._num_experts = points.loads.shape[1]
        # a mean over the points is one over the steps
        self._weights = (points.weights * len(points.weights))[:, None]
        self._copies = copies_of(places, self._num_experts)
        self._has = membership(places, self._num_experts)
        self._unit = max(float(self._costs_of(np.ones_like(self._copies)).sum(1).mean()), 1e-30)
        self._unit /= len(places)
        self._num_points = len(points.loads)
        self._by_rank: Array = np.zeros((self._num_points, len(places)))
        self.peak = 0.0  # the mean over the points of the busiest rank's load, in mean loads
        self._away = np.zeros_like(self._has, np.float64)
        if home is not None and move_cost:
            self._away = move_cost * ~membership(home, self._num_experts)
            self._away[:, EMPTY] = 0.0
        self._costs = np.empty((len(points.loads), self._num_experts + 1))
        self._left = 0  # steps
        self._slot_ranks = np.repeat(np.arange(len(places)), places.shape[1])
        # by slot: what its expert costs, what its rank has to do, and what the expert's move cost
        self._slot_costs = self._slot_loads = np.empty((0, 0))
        self._slot_away = np.empty(0)
        self._entry = self._away  # what an expert's coming costs: endless where it is already
        self._refresh()

    def _costs_of(self, copies: NDArray[np.int64]) -> Array:
        return copy_costs(self._points.loads, copies, self._ridge) * self._weights

    def _refresh(self) -> None:
        """Costs and loads from the copies."""
        self._costs[:, :-1] = self._costs_of(self._copies) / self._unit
        self._costs[:, EMPTY] = 0.0
        ranks, slots = self.places.shape
        flat = self.places.ravel()
        self._slot_costs = self._costs[:, flat]
        self._by_rank = self._slot_costs.reshape(-1, ranks, slots).sum(2)
        self._slot_loads = self._by_rank.repeat(slots, 1)
        self._slot_away = self._away[self._slot_ranks, flat]
        self._entry = np.where(self._has, np.inf, self._away)
        self._look()

    def _look(self) -> None:
        """Loads have changed."""
        self.peak = float(self._by_rank.max(1).sum()) / self._num_points

    @property
    def score(self) -> float:
        """What the search lowers."""
        squares = float(np.vdot(self._by_rank, self._by_rank)) / self._by_rank.size
        return self.peak + SPREAD * squares + float(self._slot_away.sum())

    def run(self, max_steps: int, good: float = 1.0) -> None:
        """Improve until nothing helps, or `peak` is `good`, or so many ranks have been tried."""
        self._left = max_steps
        while self._left > 0 and self.peak > good:
            if not self._swap_any() and not any(map(self._replace, self._critical()[:2])):
                return

    def _swap_any(self) -> bool:
        """A swap of one of the busiest ranks, if any helps."""
        return any(self._left > 0 and self._swap(rank) for rank in self._critical())

    def _critical(self) -> list[int]:
        """Ranks that are the busiest at some point, those that cost most first."""
        busiest: list[int] = self._by_rank.argmax(1).tolist()
        if len(busiest) == 1 or len(self.places) == 1:
            return busiest[:1]
        leads: list[list[float]] = np.partition(self._by_rank, -2, axis=1)[:, -2:].tolist()
        costs = dict.fromkeys(busiest, 0.0)
        for rank, (second, first) in zip(busiest, leads, strict=True):
            costs[rank] += first - second
        return sorted(costs, key=lambda rank: -costs[rank])

    def _swap(self, rank: int) -> bool:
        """The best exchange of a slot of `rank` with one elsewhere, if any helps; with the ranks
        that have least to do, if there is one, as that is found sooner."""
        self._left -= 1
        ranks, slots = self.places.shape
        if ranks > FEW_RANKS + 1:
            loads = self._by_rank.sum(0)
            loads[rank] = np.inf
            few = loads.argpartition(FEW_RANKS)[:FEW_RANKS]
            at: NDArray[np.intp] = np.add.outer(few * slots, _indices(slots)).ravel()
            if self._swap_with(rank, at):
                return True
        return ranks > 1 and self._swap_with(rank, None)

    def _swap_with(self, rank: int, at: NDArray[np.intp] | None) -> bool:
        """The same with the slots `at`, of other ranks, or with any slot."""
        slots, size = self.places.shape[1], self._by_rank.size
        begin, end = rank * slots, (rank + 1) * slots
        own, gives = self.places[rank], self._slot_costs[:, begin:end]
        takes, theirs, away = self._slot_costs, self._slot_loads, self._slot_away
        owner, flat = self._slot_ranks, self.places.ravel()
        if at is not None:
            takes, theirs, away = takes[:, at], theirs[:, at], away[at]
            owner, flat = owner[at], flat[at]
        mine = self._by_rank[:, rank, None]
        diff = gives[:, :, None] - takes[:, None, :]
        peak = theirs[:, None, :] + diff
        np.subtract(mine[:, :, None], diff, out=diff)
        np.maximum(peak, diff, out=peak)
        np.maximum(peak, self._others(rank, owner)[:, None, :], out=peak)
        change = peak.sum(0)
        change *= 1 / self._num_points
        # the sum of squares grows by 2 d (d - (mine - theirs)), with d = gives - takes
        rest = theirs - takes
        spread = gives.T @ (rest - takes)
        spread += (gives * (gives - mine)).sum(0)[:, None]
        spread -= np.einsum("ps,ps->s", takes, rest - mine)
        spread *= 2 * SPREAD / size
        change += spread
        change += self._entry.T[own[:, None], owner]
        change += self._entry[rank, flat] - away
        change -= (self._slot_away[begin:end] + self.peak)[:, None]
        if at is None:
            change[:, begin:end] = np.inf
        best = int(change.argmin())
        if change.flat[best] >= -LEAST_GAIN:
            return False
        slot, other = divmod(best, len(flat))
        self._exchange(begin + slot, other if at is None else int(at[other]))
        return True

    def _exchange(self, one: int, other: int) -> None:
        """The experts of two slots, of different ranks."""
        slots = self.places.shape[1]
        first, second = one // slots, other // slots
        flat = self.places.reshape(-1)
        out, back = int(flat[one]), int(flat[other])
        diff = self._slot_costs[:, one] - self._slot_costs[:, other]
        flat[one], flat[other] = back, out
        self._slot_costs[:, [one, other]] = self._slot_costs[:, [other, one]]
        for rank, slot, gone, new, more in (
            (first, one, out, back, -diff),
            (second, other, back, out, diff),
        ):
            if gone != EMPTY:
                self._has[rank, gone], self._entry[rank, gone] = False, self._away[rank, gone]
            if new != EMPTY:
                self._has[rank, new], self._entry[rank, new] = True, np.inf
            self._slot_loads[:, rank * slots : (rank + 1) * slots] += more[:, None]
            self._slot_away[slot] = self._away[rank, new]
            self._by_rank[:, rank] += more
        self._look()

    def _others(self, rank: int, owner: NDArray[np.intp]) -> Array:
        """[points, slots]: the busiest load but for `rank` and the owner of the slot."""
        loads, rows = self._by_rank.copy(), np.arange(self._num_points)
        loads[:, rank] = -1.0
        first = loads.argmax(1)
        top = loads[rows, first]
        loads[rows, first] = -1.0
        found: Array = np.where(owner == first[:, None], loads.max(1)[:, None], top[:, None])
        return found

    def _replace(self, rank: int) -> bool:
        """Another copy of what weighs on `rank`, in the slot of a copy that others can spare, or
        one copy less of it there; and the swaps that this makes possible."""
        at, expert = self._options(rank)
        if not len(at):
            return False
        before, kept = self.score, self._state()
        order = np.argsort(self._scores_with(at, expert), kind="stable")[:TRIED]
        for option in order.tolist():
            self._put(int(at[option]), int(expert[option]))
            for _ in range(SWAPS_BEHIND):
                if self.score < before - LEAST_GAIN:
                    return True
                if not self._swap_any():
                    break
            if self.score < before - LEAST_GAIN:
                return True
            self._restore(kept)
        return False

    def _options(self, rank: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Slots, of all ranks, and the experts that may be put there."""
        own, flat, owner = self.places[rank], self.places.ravel(), self._slot_ranks
        mean = self._costs.sum(0) / self._num_points
        copies = np.append(self._copies, 2)
        spare = np.where(flat == EMPTY, self._copies.sum() < self._max_copies, copies[flat] > 1)
        less = mean[flat] / np.maximum(copies[flat] - 1, 1) - mean[flat]  # more for its others
        guess = self._by_rank.sum(0)[owner] / self._num_points + less
        slots, experts = list[NDArray[np.intp]](), list[int]()
        for expert in own[np.argsort(-mean[own], kind="stable")][:2].tolist():
            if expert != EMPTY:
                fits = np.flatnonzero(spare & ~self._has[owner, expert])
                slots.append(fits[np.argsort(guess[fits], kind="stable")][:MAX_REPLACED])
                experts.append(expert)
        dropped = np.flatnonzero((own != EMPTY) & (copies[own] > 1)) + rank * len(own)
        slots.append(dropped)
        experts.append(EMPTY)
        return np.concatenate(slots), np.repeat(experts, [len(part) for part in slots])

    def _scores_with(self, at: NDArray[np.intp], expert: NDArray[np.intp]) -> Array:
        """The score with `expert` in the slot `at`, for each of the options."""
        owner, old, option = self._slot_ranks[at], self.places.ravel()[at], np.arange(len(at))
        fewer, more = np.append(self._copies, 2), np.append(self._copies, 1)
        without = self._costs_of(np.maximum(fewer[:-1] - 1, 1)) / self._unit
        with_one = self._costs_of(more[:-1] + 1) / self._unit
        pad = ((0, 0), (0, 1))
        rest, grown = np.pad(without, pad)[:, old], np.pad(with_one, pad)[:, expert]
        loads = self._by_rank[:, None, :] + (
            (rest - self._costs[:, old])[:, :, None] * self._has[:, old].T
            + (grown - self._costs[:, expert])[:, :, None] * self._has[:, expert].T
        )
        loads[:, option, owner] += grown - rest
        moves = self._away[owner, expert] - self._away[owner, old]
        return loads.max(2).mean(0) + SPREAD * (loads**2).mean((0, 2)) + moves

    def _put(self, at: int, expert: int) -> None:
        old = int(self.places.flat[at])
        self.places.flat[at] = expert
        if old != EMPTY:
            self._copies[old] -= 1
        if expert != EMPTY:
            self._copies[expert] += 1
        self._has = membership(self.places, self._num_experts)
        self._refresh()

    def _state(self) -> tuple[Places, NDArray[np.int64]]:
        return self.places.copy(), self._copies.copy()

    def _restore(self, state: tuple[Places, NDArray[np.int64]]) -> None:
        self.places, self._copies = state[0].copy(), state[1].copy()
        self._has = membership(self.places, self._num_experts)
        self._refresh()


def _indices(count: int) -> NDArray[np.intp]:
    return np.arange(count, dtype=np.intp)
