"""python -m services.tokenizer --config mesh.toml --index 0"""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

import uvloop

from deepmesh import garbage, grammar_judge, log, telemetry
from deepmesh.addresses import NoIndex, own_index
from deepmesh.config import ConfigError, load_config
from deepmesh.wire.keys import load_keyring
from services.tokenizer.prepare import Preparer
from services.tokenizer.service import Service
from services.tokenizer.vocabulary import ModelError


def main() -> int:
    """Run one tokenizer until SIGTERM."""
    parser = argparse.ArgumentParser(prog="tokenizer", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="mesh.toml")
    parser.add_argument(
        "--index", default="0", help="which tokenizer this is, or NAME-{index} of this host"
    )
    arguments = parser.parse_args()
    name = "tokenizer"
    try:
        index = own_index(arguments.index)
        name = f"tokenizer-{index}"
        config = load_config(arguments.config)
        log.setup(name, config.mesh.log_level, config.mesh.log_format)
        Path(config.mesh.run_dir).mkdir(mode=0o700, parents=True, exist_ok=True)
        load_keyring(config, "tokenizer")
        preparer = Preparer(config)
    except (NoIndex, ConfigError, ModelError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    tracer = telemetry.setup("tokenizer", name, config)

    async def run() -> None:
        service = Service(config, index, preparer, tracer)
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, service.stop)
        logging.getLogger("services.tokenizer").info("listening at %s", service.address)
        grammar_judge.start()
        garbage.settle()
        await service.run()

    try:
        uvloop.run(run())
    finally:
        tracer.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
