"""Where the foreign programs lie and how each is started: examples for users, and stubs."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
STUBS = Path(__file__).parent / "stubs"
PROGRAMS = {
    "scheduler": EXAMPLES / "echo_engine.py",  # with its executors
    "kvstore": EXAMPLES / "redis_kvstore.py",
    **{name: STUBS / f"{name}.py" for name in ("gateway", "tokenizer", "router", "executor")},
}


def command(service: str, listen: str, dials: Sequence[str] = (), redis_url: str = "") -> list[str]:
    """The command line; an empty `listen`: it only dials."""
    argv = [sys.executable, str(PROGRAMS[service])]
    argv += ["--listen", listen] if listen else []
    argv += ["--redis", redis_url] if service == "kvstore" else []
    return argv + [word for address in dials for word in ("--dial", address)]


def environment() -> dict[str, str]:
    """Stubs use the links of the examples."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES)}
