"""What steps take on each rank, as the executors profiled it at load."""

import numpy as np

from deepmesh.wire.messages import Capacity

# Relative weights where nobody has profiled: only comparisons between ranks use them. A decode
# row reads all experts it meets for one token; a prefill shares them among many tokens.
PREFILL_TOKEN = 1.0
DECODE_ROW = 4.0
CONTEXT_KILOTOKEN = 0.5


class Costs:
    """Columns over ranks, [ranks] float64; ns when `are_known`, else relative weights."""

    def __init__(self, capacities: list[Capacity]) -> None:
        costs = [capacity.costs for capacity in capacities]
        self.are_known = all(cost.prefill_token_ns > 0 for cost in costs)
        if self.are_known:
            self.base = np.array([cost.base_ns for cost in costs], np.float64)
            self.prefill_token = np.array([cost.prefill_token_ns for cost in costs], np.float64)
            self.decode_row = np.array([cost.decode_row_ns for cost in costs], np.float64)
            kilotoken = np.array([cost.context_kilotoken_ns for cost in costs], np.float64)
        else:
            ranks = len(costs)
            self.base = np.zeros(ranks)
            self.prefill_token = np.full(ranks, PREFILL_TOKEN)
            self.decode_row = np.full(ranks, DECODE_ROW)
            kilotoken = np.full(ranks, CONTEXT_KILOTOKEN)
        self.context_token = kilotoken / 1000

    def prefill_step_ns(self, tokens: list[int]) -> float:
        """Predicted time of a group step of that many prefill tokens by rank; 0: not known."""
        if not self.are_known:
            return 0.0
        return float((self.base + self.prefill_token * np.array(tokens)).max())

    def slowest_ns(self) -> dict[str, int]:
        """Of the slowest rank, as ReplicaStats names them; 0 where not known."""
        if not self.are_known:
            return {}
        return {
            "prefill_token_ns": int(self.prefill_token.max()),
            "decode_row_ns": int(self.decode_row.max()),
            "context_kilotoken_ns": int(1000 * self.context_token.max()),
        }
