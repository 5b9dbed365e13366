"""python -m services.tokenizer --config mesh.toml --index 0"""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from deepmesh import garbage, log, telemetry
from deepmesh.config import ConfigError, load_config
from deepmesh.wire.keys import load_keyring
from services.tokenizer.prepare import Preparer
from services.tokenizer.service import Service
from services.tokenizer.vocabulary import ModelError


def main() -> int:
    """Run one tokenizer until SIGTERM."""
    parser = argparse.ArgumentParser(prog="tokenizer", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="mesh.toml")
    parser.add_argument("--index", type=int, default=0, help="which tokenizer this is")
    arguments = parser.parse_args()
    name = f"tokenizer-{arguments.index}"
    try:
        config = load_config(arguments.config)
        log.setup(name, config.mesh.log_level)
        Path(config.mesh.run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        load_keyring(config, "tokenizer")
        preparer = Preparer(config)
    except (ConfigError, ModelError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    tracer = telemetry.setup("tokenizer", name, config)

    async def run() -> None:
        service = Service(config, arguments.index, preparer, tracer)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, service.stop)
        logging.getLogger("services.tokenizer").info("listening at %s", service.address)
        garbage.settle()
        await service.run()

    try:
        uvloop.run(run())
    finally:
        tracer.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
