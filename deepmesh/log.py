"""Log lines of a service: UTC time, level, process, text; on stderr, which `up` puts in a file."""

import logging
import sys
import time
from typing import Literal, get_args

Level = Literal["debug", "info", "warning", "error"]

_FORMAT = "%(asctime)s.%(msecs)03dZ %(levelname)-7s {name} %(message)s"


def setup(name: str, level: Level) -> None:
    """Send all log records of this process to stderr; `name` is "gateway-0"."""
    formatter = logging.Formatter(_FORMAT.format(name=name), datefmt="%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpcore", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_level(level: str) -> None:
    """Change what is logged from here on; an unknown level changes nothing."""
    if level in get_args(Level):
        logging.getLogger().setLevel(level.upper())
