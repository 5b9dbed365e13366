"""Confidences of drafts, made to mean what they say: by a temperature for each place in a block."""

import numpy as np
from numpy.typing import NDArray

PRIOR = (4.0, 1.0)  # drafts' curvature that holds the scale at 1, and the offset at 0, at first
REMEMBERED = 1000.0  # drafts of a place
RANGE, OFFSETS = (0.05, 4.0), (-4.0, 4.0)  # of what logits are multiplied by, and what is added
MEMORY = 0.98  # of the running means, a step
EDGE = 1e-6  # nothing is surer than that


class Calibration:
    """Learns from drafts that were verified how far their confidences are to be trusted.

    A temperature and an offset keep the order of a place's confidences and move them to the share
    of drafts that turned out right: a logistic regression of each place, by Newton steps over all
    drafts so far, of which old ones count less. What it changes is how many drafts are verified,
    never a token.
    """

    def __init__(self, draft_len: int) -> None:
        self._scale = np.ones(draft_len)  # 1 / temperature, by place
        self._offset = np.zeros(draft_len)
        self._curve = np.zeros((draft_len, 3))  # sums of weighted 1, x and xx: of logits x
        self._said = np.zeros(draft_len)  # running means, of calibrated confidences
        self._was = np.zeros(draft_len)  # and of what came of them
        self._weight = np.zeros(draft_len)

    @property
    def temperatures(self) -> NDArray[np.float64]:
        """By place; 1 until something is known."""
        return 1 / self._scale

    @property
    def error(self) -> NDArray[np.float64]:
        """By place: how far the mean confidence is above the share of drafts that were right."""
        seen = np.maximum(self._weight, EDGE)
        return (self._said - self._was) / seen

    def apply(self, confidence: NDArray[np.float32]) -> NDArray[np.float32]:
        """Calibrated; [rows, places], of each draft if those before it are right."""
        width = confidence.shape[1]
        logits = _logits(confidence) * self._scale[:width] + self._offset[:width]
        return _sigmoid(logits).astype(np.float32)

    def learn(
        self,
        confidence: NDArray[np.float32],
        verified: NDArray[np.int64],
        accepted: NDArray[np.int64],
    ) -> None:
        """What came of a step's drafts.

        Args:
            confidence: as the model gave it, [rows, places].
            verified: drafts of each row that were verified.
            accepted: how many of these were right; the next one, if it was verified, was not.
        """
        place = np.arange(confidence.shape[1])
        decided = (place < verified[:, None]) & (place <= accepted[:, None])
        right = place < accepted[:, None]
        logits = _logits(confidence)
        said = _sigmoid(logits * self._scale + self._offset)
        gap = np.where(decided, right - said, 0.0)
        curve = np.where(decided, said * (1 - said), 0.0)
        self._curve *= np.exp(-decided.sum(0) / REMEMBERED)[:, None]
        for power in range(3):
            self._curve[:, power] += (curve * logits**power).sum(0)
        self._move(gap.sum(0), (gap * logits).sum(0))
        for mean, values in ((self._said, said), (self._was, right), (self._weight, 1.0)):
            mean *= MEMORY
            mean += np.where(decided, values, 0.0).sum(0)

    def _move(self, up: NDArray[np.float64], tilt: NDArray[np.float64]) -> None:
        """A Newton step of all places, by the slopes of the likelihood in offset and scale."""
        one, x, xx = self._curve.T
        one, xx = one + PRIOR[1], xx + PRIOR[0]
        whole = one * xx - x * x  # positive: Cauchy and Schwarz, and the prior
        self._offset = np.clip(self._offset + (xx * up - x * tilt) / whole, *OFFSETS)
        self._scale = np.clip(self._scale + (one * tilt - x * up) / whole, *RANGE)


def _logits(confidence: NDArray[np.float32]) -> NDArray[np.float64]:
    bounded = np.clip(confidence.astype(np.float64), EDGE, 1 - EDGE)
    return np.log(bounded / (1 - bounded))


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-logits))
