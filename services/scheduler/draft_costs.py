"""What was learned of drafts outlives the process: kept by engine, for a time."""

import contextlib
import logging
import time
from collections.abc import Callable
from math import isfinite
from pathlib import Path

import msgspec

_log = logging.getLogger(__name__)
EVERY_S = 60.0
KEPT = 16  # engines


class _Entry(msgspec.Struct, frozen=True):
    at_s: float  # wall clock, when it was true
    learned: list[float]


class DraftCosts:
    """A file in the run folder, written now and then. Lost or damaged it costs a start some steps
    in which costs are learned anew, so nobody waits for it and nothing fails with it."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s`: older entries are forgotten; 0: nothing is kept."""
        self._path, self._ttl_s, self._clock = folder / name, ttl_s, clock
        self._entries = self._read()
        self._due_s = clock() + EVERY_S

    def learned(self) -> dict[str, list[float]]:
        """By engine, what is not too old."""
        return {key: entry.learned for key, entry in self._entries.items()}

    def look(self, learned: Callable[[], dict[str, list[float]]]) -> None:
        """Call it after each turn: most calls cost nothing."""
        if self._ttl_s and self._clock() >= self._due_s:
            self.keep(learned())

    def keep(self, learned: dict[str, list[float]]) -> None:
        """Write it down now."""
        now_s = self._clock()
        self._due_s = now_s + EVERY_S
        changed = {
            key: _Entry(now_s, values)
            for key, values in learned.items()
            if key not in self._entries or self._entries[key].learned != values
        }
        if not self._ttl_s or not changed:
            return
        self._entries = self._fresh({**self._entries, **changed})
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            new = self._path.with_suffix(".new")
            new.write_bytes(msgspec.json.encode(self._entries))
            new.replace(self._path)  # never half of it
        except OSError as error:
            _log.warning("what was learned of drafts is not kept: %s", error)

    def _read(self) -> dict[str, _Entry]:
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            found = msgspec.json.decode(self._path.read_bytes(), type=dict[str, _Entry])
            return self._fresh(found)
        return {}

    def _fresh(self, entries: dict[str, _Entry]) -> dict[str, _Entry]:
        now_s = self._clock()
        young = {
            key: entry
            for key, entry in entries.items()
            if -EVERY_S < now_s - entry.at_s < self._ttl_s and all(map(isfinite, entry.learned))
        }
        newest = sorted(young, key=lambda key: young[key].at_s)[-KEPT:]
        return {key: young[key] for key in newest}
