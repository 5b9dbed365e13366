"""The rows of all ranks for one group step, chosen and not yet numbered."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .guests import Share, part_lengths
from .residency import Residency


@dataclass(slots=True)
class Plan:
    """Rows by table index, rank by rank."""

    decode: NDArray[np.intp]  # ascending
    # (index, start, end) of known ids; from P on the decode kernels compute them (two classes)
    prefill: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    # [n, 3]: index, position and state block of points that the rows may reach
    captures: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    starved: set[int] = field(default_factory=set[int])  # ranks with a row that lacks blocks only
    tried: set[int] = field(default_factory=set[int])  # phases whose residents had their chance
    held: bool = False  # rows wait for their tokenizers
    flags: int = 0  # messages.GroupFlag bits of the step
    share: Share | None = None  # the only row is a chunk that all ranks compute together

    @property
    def empty(self) -> bool:
        """No rank has a row."""
        return len(self.decode) == 0 and not self.prefill

    def capture(self, residency: Residency, index: int, position: int) -> bool:
        """Lease a state block for a resumable point; without one the point is not kept."""
        return self.capture_rows(residency, np.array([index]), np.array([position])) > 0

    def capture_rows(
        self, residency: Residency, rows: NDArray[np.intp], positions: NDArray[np.int64]
    ) -> int:
        """The same for many rows; how many of the points are kept."""
        blocks = residency.take_states(rows)
        found = np.stack([rows, positions, blocks], axis=1)[blocks >= 0]
        self.captures.append(found)
        return len(found)

    def tokens_by_rank(self, ranks: int, slots: int, width: int) -> NDArray[np.int64]:
        """Positions that the rows of each rank may write; decode rows are `width` wide."""
        if self.share is not None:
            return part_lengths(self.share)
        tokens = np.bincount(self.decode // slots, minlength=ranks).astype(np.int64) * width
        for index, start, end in self.prefill:
            tokens[index // slots] += end - start
        return tokens
