"""How far a process is with its model, as its log says."""

import re
from typing import NamedTuple

LOG_LINES = 20  # of a log, in which a loading process has said how far it is
_SAID = re.compile(r"loading: (.+) (\d+) of (\d+)$")


class Loading(NamedTuple):
    """One stage of it."""

    what: str
    done: int
    total: int

    @property
    def words(self) -> str:
        """For people."""
        return f"loading {self.what} {100 * self.done // max(self.total, 1)} %"


def loading_of(lines: list[str]) -> Loading | None:
    """What the last lines of a log say; None: it is not at it."""
    found = None
    for line in lines:
        if " loaded in " in line:
            found = None
        elif said := _SAID.search(line):
            found = Loading(said[1], int(said[2]), int(said[3]))
    return found
