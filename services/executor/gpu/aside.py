"""Work beside the chain of a step: a second stream, which graphs capture as a branch."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


class Aside:
    """A stream of a GPU; on a host, and for a device of None, everything runs in line.

    What was made aside may be used behind `join`. Memory is reused safely as long as whatever
    began aside is joined before its inputs are forgotten.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        is_gpu = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._has_begun = False  # since the last join: a graph knows nothing of what was before

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Within, launches depend on what the current stream has so far, and run aside."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._has_begun = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What comes in the current stream waits for all that began aside."""
        if self._stream is not None and self._has_begun:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._has_begun = False


IN_LINE = Aside()


@dataclass(frozen=True)
class Asides:
    """What a step has beside its chain."""

    mixes: Aside  # how hyper-connections mix
    experts: Aside  # shared experts; Engram
    rows: Aside  # compressed rows and index keys

    @staticmethod
    def of(device: torch.device) -> "Asides":
        """Streams of a GPU; all in line on a host."""
        return Asides(Aside(device), Aside(device), Aside(device))


NONE_ASIDE = Asides(IN_LINE, IN_LINE, IN_LINE)
