"""How a peer's process gets its work (JSON, on the command line) and answers (JSON lines)."""

import json
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Job:
    """What to time."""

    op: str
    batches: list[int]
    shape: dict[str, int] = field(default_factory=dict)  # of the model, by name
    zipfs: list[float] = field(default_factory=lambda: [0.0])

    def line(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Answer:
    """One time; `batch` and `zipf` say of which case."""

    name: str
    batch: int
    us: float
    zipf: float = 0.0
    error: float | None = None  # relative, of the norm, against float32


def run(work: Callable[[Job], Iterable[Answer]]) -> int:
    """The body of a peer's main: prints each answer as it comes."""
    try:
        for answer in work(Job(**json.loads(sys.argv[1]))):
            print(json.dumps(asdict(answer)), flush=True)
    except Exception:  # whatever a library does: the parent reports it by name
        traceback.print_exc()
        return 1
    return 0
