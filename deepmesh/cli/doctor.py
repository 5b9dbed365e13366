"""`deepmesh doctor`: what this machine and this mesh lack, and what to do about it."""

from typing import TYPE_CHECKING

import typer

from deepmesh.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from rich.console import Console

    from deepmesh.checks import Check
    from deepmesh.config import Config


def doctor(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Check the installation, the configuration and the running mesh; exit 1 if something fails."""
    import msgspec
    from rich.console import Console

    from deepmesh.checks import all_checks

    # The one place where doctor reaches into a service: what fits on a GPU is the executor's.
    from services.executor.memory_checks import check_gpus

    checks = [*all_checks(config), *_configured(config, check_gpus)]
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(checks), indent=2).decode())
    else:
        console = Console(highlight=False, markup=False, soft_wrap=True)
        for check in checks:
            _print(console, check)
    if any(check.state == "fail" for check in checks):
        raise typer.Exit(1)


def _configured(path: "Path | None", look: "Callable[[Config], Iterator[Check]]") -> "list[Check]":
    """What it finds; nothing where the configuration is at fault, which another check says."""
    from deepmesh.config import ConfigError, load_config

    try:
        return list(look(load_config(path)))
    except ConfigError:
        return []


def _print(console: "Console", check: "Check") -> None:
    mark, style = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}[
        check.state
    ]
    console.print(mark, style=style, end="  ")
    console.print(f"{check.name}: {check.found}")
    if check.next_step:
        console.print(f"      → {check.next_step}", style="dim")
