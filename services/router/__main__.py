"""`python -m services.router --config mesh.toml`: the router process."""

import argparse
import signal
import sys
from pathlib import Path

from deepmesh import log, telemetry
from deepmesh.config import ConfigError, load_config
from services.router.service import RouterService


def main() -> int:
    """Run until SIGTERM or SIGINT; 0 after an orderly end."""
    parser = argparse.ArgumentParser(prog="python -m services.router", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="mesh.toml")
    arguments = parser.parse_args()
    try:
        config = load_config(arguments.config)
        if not config.router_address:
            raise ConfigError("router.count is 0: set it to 1, or router.address")
        log.setup("router-0", config.mesh.log_level, config.mesh.log_format)
        Path(config.mesh.run_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        tracer = telemetry.setup("router", "router-0", config)
        service = RouterService(config, tracer=tracer)
    except (ConfigError, ValueError) as error:
        print(f"router-0: {error}", file=sys.stderr)
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
