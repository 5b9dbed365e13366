"""Whether one process can work: a file that it keeps fresh, and who looks at it.

Containers ask with `python -m deepmesh.health NAME`, every few seconds each: nothing heavy is
imported here.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepmesh.config import Config

FRESH_S = 10.0  # a process that has not said for so long that it is ready hangs, or is gone
_LOOK_S = 0.5


def ready_path(run_dir: str | Path, name: str) -> Path:
    """There while the process is ready, and touched by its loop."""
    return Path(run_dir) / f"{name}.ready"


class Readiness:
    """Kept by a service: call `look` in every turn of the loop."""

    def __init__(self, run_dir: str | Path, name: str, is_ready: Callable[[], bool]) -> None:
        self._path = ready_path(run_dir, name)
        self._is_ready = is_ready
        self._next_look = 0.0

    def look(self) -> None:
        """Show what `is_ready` says, twice a second at most."""
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + _LOOK_S
        if self._is_ready():
            with contextlib.suppress(FileNotFoundError):  # no run folder: nobody asks
                self._path.touch(mode=0o600)
        else:
            self.close()

    def close(self) -> None:
        """Not ready any more."""
        self._path.unlink(missing_ok=True)


def problem_of(name: str, config: "Config") -> str:
    """Why the process of that name on this machine is not ready; empty: it is.

    Args:
        name: such as "scheduler-0"; "tokenizer": the one that runs here, whatever its number. A
            gateway is asked itself.
    """
    if name.partition("-")[0] == "gateway":
        from deepmesh.gateway_address import gateway_problem, gateway_url

        return gateway_problem(gateway_url(config))
    path = ready_path(config.mesh.run_dir, name)
    if "-" not in name:
        path = next(path.parent.glob(f"{name}-*.ready"), path)
    try:
        age_s = time.time() - path.stat().st_mtime
    except OSError as error:
        return f"not ready ({path}: {error.strerror})"
    return f"hangs: was ready {age_s:.0f} s ago" if age_s > FRESH_S else ""


def main(argv: list[str]) -> int:
    """NAME [mesh.toml]; 0: ready, 1: not, with the reason on standard output."""
    from deepmesh.config import ConfigError, load_config

    if len(argv) not in (1, 2):
        print("usage: python -m deepmesh.health NAME [mesh.toml]", file=sys.stderr)
        return 2
    try:
        config = load_config(Path(argv[1]) if len(argv) == 2 else None)
    except ConfigError as error:
        print(error)
        return 1
    problem = problem_of(argv[0], config)
    print(problem or "ready")
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
