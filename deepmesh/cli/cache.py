"""`deepmesh cache`: what kvstores hold and find, forget it, or fill them before the first user."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ApiKeyOption, ConfigOption, JsonOption, UrlOption

if TYPE_CHECKING:
    from rich.table import Table

    from deepmesh.warming import Prompt, Warmed
    from deepmesh.wire.messages import StoreStats

_MIB = 1 << 20


def stats(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show what each kvstore holds, how much of what was asked for it had, and how much it could
    have had; exit 1 if one does not answer."""
    import msgspec
    from rich.console import Console

    from deepmesh.config import load_config
    from deepmesh.store_operator import ask_stats

    settings = load_config(config)
    found = {
        f"kvstore-{index}": ask_stats(settings, index) for index in range(settings.kvstore.count)
    }
    if as_json:
        plain = {name: _plain(each) for name, each in found.items() if each is not None}
        print(msgspec.json.encode(plain).decode())
    elif not found:
        typer.echo("no kvstore is configured (kvstore.count)", err=True)
    else:
        console = Console(highlight=False)
        for name, each in found.items():
            if each is not None:
                console.print(stats_table(name, each))
    silent = [name for name, each in found.items() if each is None]
    for name in silent:
        typer.echo(f"{name}: no answer", err=True)
    if silent or not found:
        raise typer.Exit(1)


def flush(
    config: ConfigOption = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="In Redis, too: for all kvstores that share it.")
    ] = False,
    device: Annotated[
        bool, typer.Option("--device", help="The prefixes that devices keep, too.")
    ] = False,
) -> None:
    """Have all kvstores forget all blocks and points; records stay. Exit 1 if one does not."""
    from deepmesh.config import load_config
    from deepmesh.store_operator import flush_device, flush_store
    from deepmesh.wire.messages import KvStatus

    settings, failed = load_config(config), False
    for index in range(settings.kvstore.count):
        answer = flush_store(settings, index, shared=shared and index == 0)
        if answer is None:
            print(f"kvstore-{index}: no answer")
        else:
            in_redis = f", {answer.num_shared} keys in Redis" if answer.num_shared else ""
            problem = f"; {answer.detail}" if answer.detail else ""
            print(f"kvstore-{index}: {answer.num_items} blocks and points{in_redis}{problem}")
        failed |= answer is None or answer.status is not KvStatus.OK
    for index in range(settings.scheduler.count if device else 0):
        told = flush_device(settings, index)
        print(f"scheduler-{index}: {'told' if told else 'no answer'}")
        failed |= not told
    if failed:
        raise typer.Exit(1)


def warm(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="A prompt a line: a JSON string, a request with messages, prompt or input, or a "
            "line of a batch.",
        ),
    ],
    config: ConfigOption = None,
    url: UrlOption = "",
    api_key: ApiKeyOption = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Prompts at once.")] = 4,
    as_json: JsonOption = False,
) -> None:
    """Compute the prompts of a file once, or fetch them from disk or Redis, so that requests that
    begin with them find them; exit 1 while a prompt has failed. Caches are by API key."""
    import msgspec

    from deepmesh.cli.options import mesh_url
    from deepmesh.config import load_config
    from deepmesh.warming import read_prompts

    prompts = read_prompts(source)
    totals = _warm(prompts, mesh_url(url, load_config(config)), api_key, concurrency)
    if as_json:
        print(msgspec.json.encode(totals).decode())
    else:
        print(
            f"{totals.done - totals.failed} of {totals.prompts} prompts, {totals.prompt_tokens} "
            f"tokens, {totals.cached_tokens} of them were there"
        )
        if totals.error:
            typer.echo(f"{totals.failed} failed; the first: {totals.error}", err=True)
    if totals.failed:
        raise typer.Exit(1)


def _warm(prompts: "list[Prompt]", url: str, api_key: str, concurrency: int) -> "Warmed":
    import asyncio

    from rich import progress as bars
    from rich.console import Console

    from deepmesh.async_client import AsyncClient
    from deepmesh.warming import Warmed, warm

    with bars.Progress(
        bars.TextColumn("prompts"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TimeRemainingColumn(),
        transient=True,
        console=Console(stderr=True),
    ) as progress:
        task = progress.add_task("prompts", total=len(prompts))

        def show(totals: Warmed) -> None:
            progress.update(task, completed=totals.done)

        async def run() -> Warmed:
            async with AsyncClient(url, api_key=api_key, concurrency=concurrency) as client:
                return await warm(prompts, client, concurrency=concurrency, on_progress=show)

        return asyncio.run(run())


def stats_table(name: str, stats: "StoreStats") -> "Table":
    """One line a tier."""
    from rich import box
    from rich.table import Table

    values = dict(stats.values)
    asked = values.get("lookup_blocks", 0)
    hits = sum(values.get(f"{tier}_hit_blocks", 0) for tier in ("memory", "disk", "shared"))
    ideal = values.get("ideal_blocks", 0)
    title = (
        f"{name}: {hits} of {asked} blocks of prompts were there"
        f"{_share(hits, asked)}, at most {ideal}{_share(ideal, asked)}; "
        f"{values.get('records', 0)} records"
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    headings = ("tier", "items", "MiB", "of MiB", "hits", "fetched MiB", "evicted", "get", "put")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "tier" else "right")
    for tier in ("memory", "disk", "shared"):
        if not values.get(f"{tier}_items") and not values.get(f"{tier}_max_bytes"):
            continue
        most = values.get(f"{tier}_max_bytes")
        table.add_row(
            {"shared": "Redis"}.get(tier, tier),
            str(values.get(f"{tier}_items", 0)),
            str(values.get(f"{tier}_bytes", 0) // _MIB),
            str(most // _MIB) if most else "-",
            str(values.get(f"{tier}_hit_blocks", 0)),
            str(values.get(f"{tier}_get_bytes", 0) // _MIB),
            str(values.get(f"{tier}_evictions", 0)),
            _mean(stats, tier, "get"),
            _mean(stats, tier, "put"),
        )
    for holder, items in stats.holders:
        table.caption = f"{table.caption or 'share Redis:'} {holder} ({items})"
    return table


def _share(part: int, whole: int) -> str:
    return f" ({part / whole:.0%})" if whole else ""


def _mean(stats: "StoreStats", tier: str, op: str) -> str:
    for found in stats.histograms:
        if (found.tier, found.op) == (tier, op) and sum(found.counts):
            return f"{1e3 * found.sum_s / sum(found.counts):.2f} ms"
    return "-"


def _plain(stats: "StoreStats") -> dict[str, object]:
    import msgspec

    return {
        "values": dict(stats.values),
        "histograms": [msgspec.to_builtins(each) for each in stats.histograms],
        "holders": dict(stats.holders),
    }
