"""`deepmesh serve NAME`: one service in the foreground."""

from enum import StrEnum
from typing import Annotated

import typer

from deepmesh.cli.options import ConfigOption


class Service(StrEnum):
    """The services of a mesh."""

    gateway = "gateway"
    tokenizer = "tokenizer"
    router = "router"
    scheduler = "scheduler"
    executor = "executor"
    kvstore = "kvstore"


def serve(
    name: Annotated[Service, typer.Argument(help="Which service.")],
    config: ConfigOption = None,
    index: Annotated[int, typer.Option(min=0, help="Number among its kind.")] = 0,
    rank: Annotated[int, typer.Option(min=0, help="Executor: rank in its group.")] = 0,
) -> None:
    """Run one service alone, in the foreground; the others may run anywhere."""
    import runpy
    import sys
    from pathlib import Path

    from deepmesh.config import load_config
    from deepmesh.run_dir import dump_toml

    settings = load_config(config)  # errors are shown here, before the service starts
    run_dir = Path(settings.mesh.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    if config is None:
        # Peers must agree on the configuration: services started one by one share this file.
        config = run_dir / "mesh.toml"
        if not config.exists():
            config.write_text(dump_toml(settings))
    sys.argv = [f"services.{name}", "--config", str(config)]
    if name is not Service.router:
        sys.argv += ["--index", str(index)]
    elif index:
        raise typer.BadParameter("there is one router", param_hint="--index")
    if name is Service.executor:
        sys.argv += ["--rank", str(rank)]
    runpy.run_module(f"services.{name}", run_name="__main__", alter_sys=True)
