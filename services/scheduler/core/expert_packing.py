"""Placements made from nothing: how many copies each expert gets, and where they go."""

import heapq

import numpy as np
from numpy.typing import NDArray

from deepmesh.experts import EMPTY, Places

from .expert_places import Array


def replicate(weights: Array, ranks: int, total: int) -> NDArray[np.int64]:
    """Copies of each expert, `total` of all, one by one to the heaviest share; at most one a rank.

    Args:
        weights: [experts]: how heavy each is.
    """
    copies = np.ones(len(weights), np.int64)
    shares = weights.astype(np.float64).copy()
    for _ in range(total - len(weights)):
        expert = int(shares.argmax())
        if shares[expert] < 0:
            break  # all of them are everywhere
        copies[expert] += 1
        shares[expert] = weights[expert] / copies[expert] if copies[expert] < ranks else -1.0
    return copies


def pack(costs: Array, copies: NDArray[np.int64], ranks: int, slots: int) -> Places:
    """Copies to ranks, heaviest first, each to where the sum of the busiest loads grows least.

    A copy that finds no rank without its expert is left out: it has others.

    Args:
        costs: [points, experts], of one copy.
    """
    num_points = len(costs)
    places = np.full((ranks, slots), EMPTY, np.int32)
    used = np.zeros(ranks, np.int64)
    loads, peak = np.zeros((num_points, ranks)), np.zeros((num_points, 1))
    mean = costs.mean(0)
    for expert in np.argsort(-mean, kind="stable").tolist():
        cost, here = costs[:, expert, None], list[int]()
        for _ in range(int(copies[expert])):
            grown = loads + cost
            score = np.maximum(grown, peak).mean(0) + 1e-3 * grown.mean(0)
            score[used == slots] = np.inf
            score[here] = np.inf
            rank = int(score.argmin())
            if score[rank] == np.inf:
                break  # only for a further copy: there are as many slots as copies
            places[rank, used[rank]] = expert
            used[rank] += 1
            here.append(rank)
            loads[:, rank] += cost[:, 0]
            peak = np.maximum(peak, loads[:, rank, None])
    return places


def pack_lightest(costs: Array, copies: NDArray[np.int64], ranks: int, slots: int) -> Places:
    """Copies to ranks, heaviest first, each to the rank that has least to do, a slot, and none of
    this expert: the public algorithm of 2025, without two copies on a rank.

    A copy that finds no such rank is left out: it has others.

    Args:
        costs: [experts], of one copy.
    """
    held: list[list[int]] = [[] for _ in range(ranks)]
    lightest = [(0.0, rank) for rank in range(ranks)]
    owners = np.repeat(np.arange(len(costs)), copies)
    for expert in owners[np.argsort(-costs[owners], kind="stable")].tolist():
        passed = list[tuple[float, int]]()
        while lightest and expert in held[lightest[0][1]]:
            passed.append(heapq.heappop(lightest))
        if lightest:
            load, rank = heapq.heappop(lightest)
            held[rank].append(expert)
            if len(held[rank]) < slots:
                passed.append((load + float(costs[expert]), rank))
        for item in passed:
            heapq.heappush(lightest, item)
    filled = [experts + [EMPTY] * (slots - len(experts)) for experts in held]
    return np.array(filled, np.int32).reshape(ranks, slots)
