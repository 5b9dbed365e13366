"""`deepmesh trace`: the waterfall of one request over all processes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ConfigOption, JsonOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deepmesh.waterfall import Span, Waterfall

BAR_WIDTH = 40
MAX_GAPS = 5
MAX_HOPS_DRAWN = 3  # of one message type in a row; a stream has hundreds


def trace(
    wanted: Annotated[
        str, typer.Argument(help="`last`, a trace id or its beginning, a request id, or step:N.")
    ] = "last",
    config: ConfigOption = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Run folder; without it, that of --config.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show where the time of a request went: spans, stages, messages."""
    import msgspec
    from rich.console import Console

    from deepmesh.config import load_config
    from deepmesh.waterfall import build, find_trace, read_spans

    folder = run_dir if run_dir is not None else Path(load_config(config).mesh.run_dir)
    waterfall = build(find_trace(read_spans(folder / "traces"), wanted))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(waterfall), indent=2).decode())
    else:
        draw(Console(highlight=False), waterfall)


def draw(console: "Console", waterfall: "Waterfall") -> None:
    """The bars, then the sums."""
    console.print(f"trace {waterfall.trace_id}  {waterfall.duration_ms:.2f} ms", style="bold")
    console.print(_bars(waterfall))
    console.print(stages_table(waterfall))
    if waterfall.hops:
        console.print(_hops_table(waterfall))
    draw_coverage(console, waterfall)


def draw_coverage(console: "Console", waterfall: "Waterfall") -> None:
    """How much of the request its spans explain, and where the rest lies."""
    lost_ms = (1 - waterfall.explained) * waterfall.duration_ms
    console.print(
        f"named spans cover {waterfall.covered:.1%} of the request; "
        f"without those that wait for others {waterfall.explained:.1%}"
    )
    console.print(f"the rest: {lost_ms:.2f} ms", style="dim")
    for gap in waterfall.gaps[:MAX_GAPS]:
        where = f"{gap.after or 'the start'} → {gap.before or 'the end'}"
        console.print(f"  {gap.ms:8.3f} ms at {gap.at_ms:.2f}, {where}", style="dim")
    if num_more := len(waterfall.gaps[MAX_GAPS:]):
        rest_ms = sum(gap.ms for gap in waterfall.gaps[MAX_GAPS:])
        console.print(f"  {rest_ms:8.3f} ms in {num_more} shorter ones", style="dim")


def _bars(waterfall: "Waterfall") -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from deepmesh.waterfall import depths

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, least in (("span", 24), ("process", 11)):
        table.add_column(heading, no_wrap=True, min_width=least)
    for heading in ("at ms", "ms"):  # on a narrow terminal the bars give way, not the numbers
        table.add_column(heading, justify="right", no_wrap=True, min_width=8)
    table.add_column("", no_wrap=True, overflow="crop")
    depth = depths(waterfall.spans)
    for span, num_more in drawn(waterfall.spans):
        indent = "  " * depth[span.span_id]
        if num_more:
            table.add_row(Text(f"{indent}… {num_more} more {_title(span)}", style="dim"))
            continue
        table.add_row(
            Text(indent + _title(span), style="red" if span.status == "error" else ""),
            Text(span.process, style="dim"),
            f"{(span.start_ns - waterfall.start_ns) / 1e6:.2f}",
            f"{(span.end_ns - span.start_ns) / 1e6:.2f}",
            Text(bar(span, waterfall), style="cyan"),
        )
    return table


def _title(span: "Span") -> str:
    from deepmesh.waterfall import title

    return f"{title(span)}: {span.error}" if span.error else title(span)


def drawn(spans: "list[Span]") -> "list[tuple[Span, int]]":
    """The spans to draw; of like siblings only the first, then one entry with how many more."""
    counts: dict[tuple[str, str, str], int] = {}
    place: dict[tuple[str, str, str], int] = {}  # of the "… n more" entry
    result: list[tuple[Span, int]] = []
    for span in spans:
        key = (span.parent_id, _title(span), span.process)
        counts[key] = count = counts.get(key, 0) + 1
        num_more = max(0, count - MAX_HOPS_DRAWN)
        if num_more > 1:
            result[place[key]] = (span, num_more)
        else:
            place[key] = len(result)
            result.append((span, num_more))
    return result


def bar(span: "Span", waterfall: "Waterfall") -> str:
    """Where the span lies in the request; at least a sliver."""
    per_ns = BAR_WIDTH / (waterfall.duration_ms * 1e6)
    start = min(BAR_WIDTH - 1, max(0, int((span.start_ns - waterfall.start_ns) * per_ns)))
    width = int((span.end_ns - span.start_ns) * per_ns)
    width = max(0, min(width, BAR_WIDTH - start))
    return " " * start + ("█" * width or "▏")


def stages_table(waterfall: "Waterfall") -> "Table":
    """Time by stage, as a share of the request."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("stage")
    for heading in ("spans", "ms", "share"):
        table.add_column(heading, justify="right")
    for stage in waterfall.stages:
        table.add_row(stage.name, str(stage.count), f"{stage.ms:.2f}", f"{stage.share:.1%}")
    return table


def _hops_table(waterfall: "Waterfall") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("message")
    table.add_column("way")
    for heading in ("count", "mean µs", "max µs"):
        table.add_column(heading, justify="right")
    for hop in waterfall.hops:
        way = f"{hop.sender} → {hop.receiver}"
        table.add_row(hop.message, way, str(hop.count), f"{hop.mean_us:.0f}", f"{hop.max_us:.0f}")
    return table
