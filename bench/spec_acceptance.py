"""How often drafts are right: recorded on a checkpoint whose draft head is trained, by place and
confidence, and drafts made up to be right as often for one whose weights know nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from services.executor.calibration import Calibration
from services.executor.kv_cache import KvCache
from services.executor.models.outputs import DraftOutput
from services.executor.slots import SlotTable
from services.executor.speculation import DraftModel, Speculation

BINS = 8  # of confidence, equally full
WRONG = 1  # a wrong draft is the right id and so much


@dataclass(frozen=True)
class Place:
    """Drafts of one place in a block whose predecessors were right, by bins of confidence."""

    confidence: list[float]  # mean of each bin, as the model gave it
    drafts: list[int]
    right: list[float]  # share of each bin's drafts


@dataclass(frozen=True)
class Acceptance:
    """What `bench spec --record` writes."""

    source: str
    prompts: int
    places: list[Place]

    @property
    def by_place(self) -> list[float]:
        """Share of drafts that are right if those before are, by place."""
        return [float(np.average(place.right, weights=place.drafts)) for place in self.places]

    def tokens(self, draft_len: int) -> float:
        """Mean tokens of a step that verifies so many drafts."""
        return 1.0 + float(np.cumprod(self.by_place[:draft_len]).sum())

    def write(self, path: Path) -> None:
        """To a file that `read_acceptance` reads."""
        places = [vars(place) for place in self.places]
        text = {"source": self.source, "prompts": self.prompts, "places": places}
        path.write_text(json.dumps(text, indent=1) + "\n")


def read_acceptance(path: Path) -> Acceptance:
    """What was recorded."""
    found = json.loads(path.read_text())
    places = [Place(**place) for place in found["places"]]
    return Acceptance(found["source"], found["prompts"], places)


class Recording(Calibration):
    """Keeps what came of all drafts; by place (confidence, whether it was right)."""

    def __init__(self, draft_len: int) -> None:
        super().__init__(draft_len)
        self.seen: list[list[tuple[float, bool]]] = [[] for _ in range(draft_len)]

    def learn(
        self,
        confidence: NDArray[np.float32],
        verified: NDArray[np.int64],
        accepted: NDArray[np.int64],
    ) -> None:
        """See `Calibration`."""
        for row, count, right in zip(confidence, verified.tolist(), accepted.tolist(), strict=True):
            for place in range(min(count, right + 1)):
                self.seen[place].append((float(row[place]), place < right))
        super().learn(confidence, verified, accepted)

    def acceptance(self, source: str, prompts: int) -> Acceptance:
        """Of all that was seen."""
        return Acceptance(source, prompts, [_binned(seen) for seen in self.seen])


def _binned(seen: Sequence[tuple[float, bool]]) -> Place:
    parts = [part for part in np.array_split(np.array(sorted(seen), np.float64), BINS) if len(part)]
    return Place(
        confidence=[round(float(part[:, 0].mean()), 5) for part in parts],
        drafts=[len(part) for part in parts],
        right=[round(float(part[:, 1].mean()), 4) for part in parts],
    )


class RecordingSpeculation(Speculation):
    """Drafts of the model, whose fate is kept in `recording`."""

    def __init__(self, draft: DraftModel, cache: KvCache, slots: SlotTable, draft_len: int) -> None:
        super().__init__(draft, cache, slots, draft_len)
        self.calibration = self.recording = Recording(draft_len)


class OracleSpeculation(Speculation):
    """The model's draft pass, but other drafts: as often right as was recorded, and as sure."""

    truth: ClassVar[dict[int, "Fate"]] = {}  # by seed of the request

    def _drafted(
        self, out: DraftOutput, at: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        ids, confidence = super()._drafted(out, at, lengths)
        width, inits = self.draft_len, [self.slots.request(slot).init for slot in at.tolist()]
        for row, (init, length) in enumerate(zip(inits, lengths.tolist(), strict=True)):
            fate = self.truth.get(init.seed)
            index = length - init.prompt_len
            if fate is not None and index < len(fate.ids):
                ids[row], confidence[row] = fate.ids[index, :width], fate.confidence[index, :width]
        return ids, confidence


@dataclass(frozen=True)
class Fate:
    """The drafts behind each token of an output."""

    ids: NDArray[np.int32]  # [tokens, places]
    confidence: NDArray[np.float32]

    @staticmethod
    def of(acceptance: Acceptance, seed: int, output: Sequence[int], vocab_size: int) -> "Fate":
        """For the request that gives this output without drafts; the same for the same seed."""
        draw, count = np.random.default_rng(seed), len(output)
        known = np.zeros(count + len(acceptance.places), np.int32)
        known[:count] = output
        columns: list[tuple[NDArray[np.int32], NDArray[np.float32]]] = []
        for number, place in enumerate(acceptance.places):
            weights = np.array(place.drafts, np.float64)
            chosen = draw.choice(len(weights), count, p=weights / weights.sum())
            is_right = draw.random(count) < np.array(place.right)[chosen]
            right = known[number : number + count]
            ids = np.where(is_right, right, (right + WRONG) % vocab_size).astype(np.int32)
            columns.append((ids, np.array(place.confidence, np.float32)[chosen]))
        ids, confidence = (np.stack(parts, 1) for parts in zip(*columns, strict=True))
        return Fate(ids, confidence)
