"""`deepmesh status`: the processes of a running mesh, and how often each was started again."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from deepmesh.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from deepmesh.run_dir import MeshRecord, ProcessRecord


def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show what the supervisor of a mesh says of its processes; exit 1 if no mesh runs."""
    import msgspec
    from rich.console import Console

    from deepmesh.checks import is_alive
    from deepmesh.config import load_config
    from deepmesh.gateway_address import gateway_problem
    from deepmesh.run_dir import read_record

    run_dir = Path(load_config(config).mesh.run_dir)
    record = read_record(run_dir)
    if record is None or not is_alive(record.supervisor_pid):
        typer.echo(f"no mesh runs in {run_dir}", err=True)
        raise typer.Exit(1)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(record), indent=2).decode())
        return
    console = Console(highlight=False)
    problem = gateway_problem(record.url)
    console.print(f"{record.name} at {record.url}: {problem or 'ready'}", style="bold")
    console.print(processes_table(record, run_dir, time.time()))


def processes_table(record: "MeshRecord", run_dir: Path, now_s: float) -> "Table":
    """One line a process."""
    from rich import box
    from rich.table import Table

    from deepmesh.health import FRESH_S, ready_path
    from deepmesh.loading import LOG_LINES, loading_of
    from deepmesh.run_dir import tail

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("process", "pid", "state", "restarts", "last end"):
        table.add_column(heading, justify="right" if heading in ("pid", "restarts") else "left")
    for name, process in record.processes.items():
        state = state_of(process, now_s)
        if process.pid and not _is_fresh(ready_path(run_dir, name), now_s - FRESH_S):
            loading = loading_of(tail(Path(process.log), LOG_LINES))
            state = f"{state}, {loading.words if loading else 'not ready'}"
        table.add_row(
            name,
            str(process.pid or "-"),
            state,
            str(process.restarts),
            process.last_end,
        )
    return table


def state_of(process: "ProcessRecord", now_s: float) -> str:
    """Since when it runs, or when it will again."""
    match process.state:
        case "running":
            return f"running for {_span(now_s - process.since_s)}"
        case "waiting":
            return f"starts again in {max(0.0, process.since_s - now_s):.1f} s"
        case other:
            return other


def _is_fresh(ready: Path, since_s: float) -> bool:
    """Whether a process has said since then that it can work."""
    try:
        return ready.stat().st_mtime >= since_s
    except OSError:
        return False


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"
