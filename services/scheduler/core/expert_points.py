"""A window of counted steps as a few typical ones: what a placement is planned for."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .expert_places import Array

ROUNDS = 8  # of the clustering
LEAST_BEYOND = 0.15  # variance between steps, in that of mere counting; below it they are alike
NOISE_LEFT = 0.5  # of counting, in a group of steps
BLOCKS = 4  # of a window, to tell a trend from bursts
LEAST_IN_BLOCK = 4  # records
MOST_CHANGE = 4.0  # of a share, within a window
LEAST_TREND = 0.5  # of what varies between the blocks
ROOT5 = 5**0.5
CONTRASTS: Array = np.array(  # a line, and two curves
    [[-3, -1, 1, 3], [ROOT5, -ROOT5, -ROOT5, ROOT5], [-1, 3, -3, 1]], np.float64
) / np.sqrt(20)


@dataclass(frozen=True)
class Points:
    """Typical steps of one layer."""

    loads: Array  # [points, experts], mean rows in a step
    weights: Array  # [points], share of the steps that each stands for; sum 1


def typical_steps(
    counts: Array,
    most: int,
    num_steps: NDArray[np.int64] | None = None,
    *,
    follows_trend: bool = True,
) -> Points:
    """Steps that are alike, wherever they are in the window, become one point: what experts are
    wanted together is kept, and the noise of counting is not planned for.

    Args:
        counts: [records, experts], rows counted; a record may be the sum over several steps.
        most: points, at most.
        num_steps: of each record; None: one each.
        follows_trend: the plan is for what comes behind the window, not for the window.
    """
    steps = np.ones(len(counts)) if num_steps is None else num_steps.astype(np.float64)
    some = counts.sum(1) > 0
    counts, steps = counts[some], steps[some]
    if not len(counts):
        return Points(np.zeros((1, counts.shape[1])), np.ones(1))
    if follows_trend:
        counts = counts * trend(counts)
    groups = np.zeros(len(counts), np.intp)
    beyond = max(0.0, _dispersion(counts) - 1) if len(counts) > 1 else 0.0
    if beyond > LEAST_BEYOND:
        groups = _cluster(counts / counts.sum(1, keepdims=True), min(most, len(counts)))
    found = np.unique(groups)
    loads = np.stack([counts[groups == g].sum(0) / steps[groups == g].sum() for g in found])
    # of what a group differs by, this part is more than the noise that brought it together
    mean = loads.sum(1, keepdims=True) * (counts.sum(0) / counts.sum())
    loads = mean + beyond / (beyond + NOISE_LEFT) * (loads - mean)
    shares = np.array([steps[groups == g].sum() for g in found])
    return Points(loads, shares / shares.sum())


def trend(counts: Array) -> Array:
    """[records, experts]: what each expert's share comes to at the end of the window, over what
    it was on its way there.

    Four blocks of the window; a straight line through them counts as far as it explains more than
    the two curves that are left, which is what mere bursts do to all three alike.
    """
    ratio = np.ones_like(counts)
    if len(counts) < BLOCKS * LEAST_IN_BLOCK:
        return ratio
    blocks = [counts[part].sum(0) for part in np.array_split(np.arange(len(counts)), BLOCKS)]
    shares = np.stack([block / block.sum() for block in blocks])
    mean = shares.mean(0)
    known = mean > 0
    parts = np.sum((CONTRASTS @ shares)[:, known] ** 2 / mean[known], 1)
    line, rest = float(parts[0]), float(parts[1] + parts[2]) / 2
    part = 1 - rest / line if line > 0 else 0.0
    if part < LEAST_TREND:
        return ratio
    slope = part * (CONTRASTS[0] @ shares)[known] / 20**0.5  # by half a block
    at = BLOCKS * ((2 * np.arange(len(counts)) + 1) / len(counts) - 1)
    way = np.maximum(mean[known] + np.outer(at, slope), mean[known] / MOST_CHANGE)
    end = np.maximum(mean[known] + BLOCKS * slope, mean[known] / MOST_CHANGE)
    ratio[:, known] = np.clip(end / way, 1 / MOST_CHANGE, MOST_CHANGE)
    return ratio


def _dispersion(counts: Array) -> float:
    """Variance between the records, in that of counting rows that are drawn alike."""
    totals, mean = counts.sum(1, keepdims=True), counts.sum(0) / counts.sum()
    expected = totals * mean
    known = mean > 0
    squares = ((counts - expected)[:, known] ** 2 / expected[:, known]).sum()
    return float(squares / max(1, (len(counts) - 1) * (int(known.sum()) - 1)))


def _cluster(shares: Array, most: int) -> NDArray[np.intp]:
    """k-means on square roots, in which the noise of all experts is alike; seeds far apart."""
    at = np.sqrt(shares)
    centres = at.mean(0, keepdims=True)
    nearest = ((at - centres[0]) ** 2).sum(1)
    seeds = list[int]()
    for _ in range(most):
        seeds.append(int(nearest.argmax()))
        nearest = np.minimum(nearest, ((at - at[seeds[-1]]) ** 2).sum(1))
    centres = at[seeds]
    groups = np.full(len(at), -1)
    for _ in range(ROUNDS):
        squares = (centres**2).sum(1) - 2 * at @ centres.T
        new = squares.argmin(1)
        if (new == groups).all():
            break
        groups = new
        for g in np.unique(groups):
            centres[g] = at[groups == g].mean(0)
    return groups
