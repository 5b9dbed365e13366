"""`deepmesh up`: the whole mesh on this machine, until Ctrl-C."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ConfigOption

if TYPE_CHECKING:
    from rich.console import RenderableType

    from deepmesh.supervisor import Mesh

SIGNAL_POLL_S = 0.05


def up(
    config: ConfigOption = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the gateway; 0: any free one.")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder of the checkpoint, instead of mesh.model.", show_default=False),
    ] = None,
) -> None:
    """Start every service as a process, watch them, and print the address."""
    import logging
    import signal
    import threading
    import time

    import msgspec
    from rich.console import Console
    from rich.live import Live
    from rich.logging import RichHandler

    from deepmesh.config import load_config
    from deepmesh.errors import UserError
    from deepmesh.supervisor import Mesh

    console = Console()
    handler = RichHandler(console=console, show_path=False, markup=False, highlighter=None)
    logging.basicConfig(level="INFO", format="%(message)s", handlers=[handler])
    settings = load_config(config)
    if port is not None:
        gateway = msgspec.structs.replace(settings.gateway, port=port)
        settings = msgspec.structs.replace(settings, gateway=gateway)
    if model is not None:
        if not model.is_dir():
            raise UserError(f"{model}: no such folder")
        if not (model / "config.json").is_file():
            raise UserError(f"{model}: no config.json in it")
        section = msgspec.structs.replace(settings.mesh, model=str(model.resolve()))
        settings = msgspec.structs.replace(settings, mesh=section)
    mesh = Mesh(settings)

    asked: list[int] = []

    def on_signal(number: int, _frame: object) -> None:
        asked.append(number)  # takes no lock: the next signal may interrupt this one

    def pass_on() -> None:
        passed = 0
        while True:
            while passed < len(asked):
                passed += 1
                mesh.request_stop()
            time.sleep(SIGNAL_POLL_S)

    threading.Thread(target=pass_on, name="signals", daemon=True).start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    mesh.start()
    try:
        with Live(console=console, transient=True, refresh_per_second=8) as live:
            mesh.wait_ready(lambda: live.update(progress(mesh)))
        served = settings.served_model
        console.print(f"deepmesh serves [bold]{served}[/bold] at [bold]{mesh.url}[/bold]")
        console.print(f"run folder {mesh.run_dir}: logs, traces; Ctrl-C stops", style="dim")
        mesh.wait_stopped()
    finally:
        mesh.stop()


def progress(mesh: "Mesh") -> "RenderableType":
    """One line a process: what it is about to do, in the last words of its log."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, pid in mesh.pids.items():
        state = f"pid {pid}" if pid else "starts again soon"
        words = last_words(mesh.log_tail(name))
        table.add_row(
            name, Text(state, style="dim"), loading_bar(words) or Text(words, style="dim")
        )
    return table


def last_words(lines: list[str]) -> str:
    """The text of the last log line, without time, level and process."""
    return re.sub(r"^\S+Z +[A-Z]+ +\S+ ", "", lines[-1])[:60] if lines else ""


def loading_bar(words: str) -> "RenderableType | None":
    """A bar, if a process says that it is so far with something."""
    from rich.columns import Columns
    from rich.progress_bar import ProgressBar

    match = re.fullmatch(r"(loading: .+) (\d+) of (\d+)", words)
    if match is None:
        return None
    title, done, total = match.groups()
    bar = ProgressBar(total=max(int(total), 1), completed=int(done), width=24)
    return Columns([bar, f"{title} {done}/{total}"])
