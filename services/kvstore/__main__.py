"""`python -m services.kvstore --config mesh.toml --index N`: one kvstore process."""

import argparse
import signal
import sys
from pathlib import Path
from types import FrameType

from deepmesh import log, telemetry
from deepmesh.config import ConfigError, load_config
from deepmesh.wire.keys import load_keyring

from .files import InUse
from .service import KvStoreService


def main() -> int:
    """Run until SIGTERM or SIGINT; 0 after an orderly end."""
    parser = argparse.ArgumentParser(prog="python -m services.kvstore", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="mesh.toml")
    parser.add_argument("--index", type=int, default=0, help="of the store")
    arguments = parser.parse_args()
    name = f"kvstore-{arguments.index}"
    try:
        config = load_config(arguments.config)
        log.setup(name, config.mesh.log_level, config.mesh.log_format)
        load_keyring(config, "kvstore")  # before any file is made
        tracer = telemetry.setup("kvstore", name, config)
        service = KvStoreService(config, index=arguments.index, tracer=tracer)
    except (ConfigError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except InUse as error:  # perhaps of one that is about to end: trying again may help
        print(f"{name}: {error}", file=sys.stderr)
        return 1

    def on_signal(number: int, frame: FrameType | None) -> None:
        service.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        service.run()
    finally:
        tracer.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
