"""A plan for all layers of a model: what is asked of the planner, and what comes of it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepmesh.experts import Places

from .expert_planner import PlanOptions, plan_layer
from .expert_points import typical_steps

POINTS = 8  # typical steps of a window that a plan looks at


@dataclass(frozen=True, slots=True, eq=False)
class PlanExperts:
    """Ask for placements of all layers; it takes up to seconds, so it is done beside the loop."""

    number: int
    counts: NDArray[np.int64]  # [records, layers, experts], rows
    steps: NDArray[np.int64]  # of each record
    places: list[Places]  # of each layer, at present
    options: PlanOptions


@dataclass(frozen=True, slots=True, eq=False)
class ExpertsPlanned:
    """Layers that are to be changed, those that gain most first."""

    number: int
    layers: list[tuple[int, Places]]


def plan_experts(order: PlanExperts) -> ExpertsPlanned:
    """Plan layer by layer."""
    found: list[tuple[float, int, Places]] = []
    for layer, current in enumerate(order.places):
        counts = order.counts[:, layer].astype(np.float64)
        points = typical_steps(counts, POINTS, order.steps)
        plan = plan_layer(points, current, order.options)
        if plan.moves or not np.array_equal(plan.places, current):
            found.append((plan.peak - plan.peak_before, layer, plan.places))
    found.sort(key=lambda change: change[:2])
    return ExpertsPlanned(order.number, [(layer, places) for _, layer, places in found])
