"""`python -m services.gateway --config mesh.toml`: one gateway process."""

import argparse
import logging
import signal
import sys
from pathlib import Path
from types import FrameType

import msgspec
import uvloop

from deepmesh import garbage, log
from deepmesh.config import Config, ConfigError, load_config
from services.gateway.auth import read_digests
from services.gateway.server import BindError, Gateway


def main() -> int:
    """Run until SIGTERM or SIGINT; 0 after an orderly end."""
    parser = argparse.ArgumentParser(prog="python -m services.gateway", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="mesh.toml")
    parser.add_argument("--index", type=int, default=0, help="port + index, when there are several")
    arguments = parser.parse_args()
    name = f"gateway-{arguments.index}"
    try:
        config = _for_index(_with_keys(load_config(arguments.config)), arguments.index)
        log.setup(name, config.mesh.log_level, config.mesh.log_format)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _already_drained)
        Path(config.mesh.run_dir).mkdir(parents=True, exist_ok=True, mode=0o700)
        gateway = Gateway(config, name)
    except (ConfigError, BindError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    garbage.settle()
    uvloop.run(gateway.run())
    return 0


def _with_keys(config: Config) -> Config:
    """With the API keys of the file that only gateways read."""
    if not config.gateway.api_keys_file:
        return config
    keys = [*config.gateway.api_keys, *read_digests(config.gateway.api_keys_file)]
    return msgspec.structs.replace(
        config, gateway=msgspec.structs.replace(config.gateway, api_keys=keys)
    )


def _for_index(config: Config, index: int) -> Config:
    port = config.gateway.port
    if not index or not port:
        return config
    admin = config.gateway.admin_port
    settings = msgspec.structs.replace(
        config.gateway, port=port + index, admin_port=admin + index if admin > 0 else admin
    )
    return msgspec.structs.replace(config, gateway=settings)


def _already_drained(number: int, frame: FrameType | None) -> None:
    """uvicorn raises the signal again once it has drained; the end is near anyway."""


if __name__ == "__main__":
    sys.exit(main())
