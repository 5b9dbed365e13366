"""Engine epochs are never used twice, by no instance of a scheduler: what its predecessors used."""

import contextlib
from pathlib import Path

MARGIN = 1024  # more epochs than an instance begins between two looks at its log
EPOCH_BITS = 32  # a step id has the epoch above 32 bits of the step's number


class EpochLog:
    """A file with the highest epoch begun so far. Lost with the file: then the clock alone counts.

    Epochs begin at the second of the start, so that a lost file does no harm unless a scheduler
    was restarted within a second, or its clock was set back, and the file was lost as well.
    """

    def __init__(self, folder: Path, name: str, now_s: int) -> None:
        """Raises OSError: the folder cannot be written."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / name
        self.first = max(now_s, self._read() + MARGIN)  # for the new instance
        assert self.first < 1 << EPOCH_BITS
        self._noted = -1
        self.note(self.first)

    def note(self, epoch: int) -> None:
        """Call it after each turn with the epoch that is current."""
        if epoch == self._noted:
            return
        new = self._path.with_suffix(".new")
        new.write_text(f"{epoch}\n")
        new.replace(self._path)  # never half of it
        self._noted = epoch

    def _read(self) -> int:
        with contextlib.suppress(FileNotFoundError, ValueError):
            noted = int(self._path.read_text())
            if noted < (1 << EPOCH_BITS) - MARGIN:  # or it is damaged
                return noted
        return -MARGIN
