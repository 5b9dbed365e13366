"""`deepmesh top`: live figures of a running mesh in a terminal."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ApiKeyOption, ConfigOption, JsonOption, UrlOption

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from deepmesh.live_client import State

COLOURS = {
    "up": "green",
    "starting": "yellow",
    "restarted": "red",
    "down": "red",
    "unknown": "dim",
}
STATES = {"running": "cyan", "done": "", "failed": "red", "gone": "yellow"}
NUM_REQUESTS = 12
NUM_NEWS = 5


def top(
    config: ConfigOption = None,
    url: UrlOption = "",
    api_key: ApiKeyOption = "",
    interval: Annotated[float, typer.Option(min=0.25, max=10, help="Seconds.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show throughput, latencies, KV, processes and requests as they change; Ctrl-C ends it."""
    import contextlib

    import msgspec
    from rich.console import Console
    from rich.live import Live

    from deepmesh.cli.options import mesh_url
    from deepmesh.config import load_config
    from deepmesh.live_client import LiveClient

    console = Console(highlight=False)
    with LiveClient(mesh_url(url, load_config(config)), api_key=api_key) as client:
        states = client.states(interval)
        if as_json or once or not console.is_terminal:
            state = next(states)
            if as_json:
                print(msgspec.json.format(msgspec.json.encode(state), indent=2).decode())
            else:
                console.print(picture(state))
            return
        with contextlib.suppress(KeyboardInterrupt), Live(console=console, screen=True) as live:
            for state in states:
                live.update(picture(state), refresh=True)


def picture(state: "State") -> "Group":
    """All of it, from above."""
    from rich.console import Group
    from rich.text import Text

    head = Text(f"deepmesh {state.version} · {state.model}", style="bold")
    return Group(
        head,
        Text(figures_line(state)),
        processes_table(state),
        replicas_table(state),
        *([devices_table(state)] if state.devices else []),
        requests_table(state),
        news_lines(state),
    )


def figures_line(state: "State") -> str:
    """What the mesh does at present."""
    figures = state.figures
    if figures is None:
        return "no figures yet"
    parts = [
        f"{figures.output_tokens_per_s:.0f} tokens/s out",
        f"{figures.prompt_tokens_per_s:.0f} in",
        f"{figures.requests_per_s:.1f} requests/s",
        f"{figures.running} running, {figures.waiting} waiting",
        f"KV {figures.kv_usage:.0%}",
    ]
    for name, found in (("TTFT", figures.ttft_ms), ("ITL", figures.itl_ms)):
        if found:
            parts.append(f"{name} p50 {found['p50']:.1f} p99 {found['p99']:.1f} ms")
    if figures.mfu is not None:
        parts.append(f"MFU {figures.mfu:.1%}")
    if figures.bandwidth_share is not None:
        parts.append(f"bandwidth {figures.bandwidth_share:.1%}")
    return " · ".join(parts)


def processes_table(state: "State") -> "Table":
    """Health and load of each process, and the messages that pass it."""
    from rich.text import Text

    table = _table("process", "state", "restarts", "requests", "messages/s")
    for process in state.processes:
        name = process.name
        flow = sum(
            link.sent_per_s + link.received_per_s
            for link in state.links
            if name in (link.sender, link.receiver)
        )
        shown = Text(process.state, style=COLOURS.get(process.state, ""))
        table.add_row(
            name, shown, str(process.restarts or "-"), str(process.requests), f"{flow:.0f}"
        )
    return table


def replicas_table(state: "State") -> "Table":
    """Queues and KV of each group."""
    table = _table("group", "role", "running", "waiting", "tokens waiting", "KV", "steps")
    for replica in state.replicas:
        flags = [word for word in ("paused", "draining") if getattr(replica, word)]
        table.add_row(
            " ".join([replica.name, *flags]),
            replica.role,
            str(replica.running),
            str(replica.waiting),
            str(replica.waiting_tokens),
            f"{replica.kv_usage:.1%}",
            str(replica.steps),
        )
    return table


def devices_table(state: "State") -> "Table":
    """How near each rank's steps of the last seconds came to what its device can do."""
    table = _table("device", "MFU", "bandwidth")
    for device in state.devices:
        shares = (device.mfu, device.bandwidth_share)
        shown = ["-" if share is None else f"{share:.1%}" for share in shares]
        table.add_row(f"{device.replica} rank {device.rank}", *shown)
    return table


def requests_table(state: "State") -> "Table":
    """The newest requests of this gateway."""
    from rich.text import Text

    table = _table("request", "route", "state", "s", "TTFT ms", "prompt", "cached", "output")
    for seen in state.requests[:NUM_REQUESTS]:
        table.add_row(
            seen.id[:12],
            seen.route,
            Text(seen.error[:40] or seen.state, style=STATES.get(seen.state, "")),
            f"{seen.duration_ms / 1e3:.2f}",
            f"{seen.ttft_ms:.0f}" if seen.ttft_ms else "-",
            str(seen.prompt_tokens),
            str(seen.cached_tokens),
            str(seen.output_tokens),
        )
    return table


def news_lines(state: "State") -> "Text":
    """Processes that came and went, the last first."""
    from rich.text import Text

    lines = Text()
    for news in reversed(state.news[-NUM_NEWS:]):
        lines.append(f"{time.strftime('%H:%M:%S', time.localtime(news.at_ms / 1e3))} ", "dim")
        lines.append(f"{news.process} {news.was} → ")
        lines.append(f"{news.state}\n", COLOURS.get(news.state, ""))
    return lines


def _table(*headings: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    left = ("process", "state", "group", "role", "device", "request", "route")
    for heading in headings:
        table.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    return table
