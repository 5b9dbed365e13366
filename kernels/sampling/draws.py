"""What a draw needs to know of each row."""

from typing import NamedTuple

from torch import Tensor


class Draws(NamedTuple):
    """One value per row, each [rows]."""

    temperature: Tensor  # float32, >= 0; 0 takes the largest logit
    top_k: Tensor  # int64; 0 is off
    top_p: Tensor  # float32, 0 < p <= 1; 1 is off
    min_p: Tensor  # float32, 0 <= p <= 1; 0 is off
    seed: Tensor  # int64
    sub_index: Tensor  # int64
    position: Tensor  # int64, absolute position of the token that is drawn
