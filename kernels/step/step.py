"""The memory that all operations of a step share: `Step` of csrc/step.h, one word a member."""

import numpy as np

from kernels.step.program import Reference

FIELDS = (
    *("threads", "num_tokens", "num_rows", "num_wanted", "num_ending"),
    *("is_crowded_1", "is_crowded_2"),
    *("ids", "positions", "row_starts", "context", "num_context", "wanted"),
    *("global_blocks", "global_width", "window_blocks", "window_width", "state_blocks"),
    *("plain_cos", "plain_sin", "turned_cos", "turned_sin", "logits", "features"),
    *("row_of", "ending"),
)
_INDEX = {field: index for index, field in enumerate(FIELDS)}


class Step:
    """Counts and addresses of one step; programs keep references to them."""

    def __init__(self) -> None:
        self._words = np.zeros(len(FIELDS), np.int64)

    @property
    def address(self) -> int:
        """Where the members lie."""
        return self._words.ctypes.data

    def __getitem__(self, field: str) -> int:
        return int(self._words[_INDEX[field]])

    def reference(self, field: str) -> Reference:
        """An argument that is read when the program runs."""
        return Reference(self.address + 8 * _INDEX[field])

    def fill(self, **values: int) -> None:
        """Set members by name."""
        for field, value in values.items():
            self._words[_INDEX[field]] = value
