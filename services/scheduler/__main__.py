"""`python -m services.scheduler --config mesh.toml --index N`: one scheduler process."""

import argparse
import signal
import sys
from pathlib import Path

from deepmesh import log, telemetry
from deepmesh.config import ConfigError, load_config

from .service import SchedulerService


def main() -> int:
    """Run until SIGTERM or SIGINT (drains; a second one ends at once); 0 after an orderly end."""
    parser = argparse.ArgumentParser(prog="python -m services.scheduler", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="mesh.toml")
    parser.add_argument("--index", type=int, default=0, help="of the replica")
    arguments = parser.parse_args()
    name = f"scheduler-{arguments.index}"
    try:
        config = load_config(arguments.config)
        log.setup(name, config.mesh.log_level, config.mesh.log_format)
        tracer = telemetry.setup("scheduler", name, config)
        service = SchedulerService(config, index=arguments.index, tracer=tracer)
    except (ConfigError, ValueError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    try:
        service.run()
    finally:
        tracer.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
