"""`deepmesh batch`: many requests from a file, their answers into another one."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ApiKeyOption, ConfigOption, JsonOption, UrlOption

if TYPE_CHECKING:
    from deepmesh.batch import Output, Totals


def batch(
    source: Annotated[Path, typer.Argument(help="Requests, one JSON object a line.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Answers; a batch that was killed goes on.")
    ],
    config: ConfigOption = None,
    url: UrlOption = "",
    api_key: ApiKeyOption = "",
    concurrency: Annotated[int, typer.Option(min=1, help="Requests open at once.")] = 32,
    as_json: JsonOption = False,
) -> None:
    """Answer a file of requests in the format of OpenAI's batches; without a running mesh, one is
    started for it. Run again, it asks what has no answer yet; exit 1 while a line has failed."""
    from deepmesh.batch import Output, check_lines

    check_lines(source)
    answers = Output(output)
    try:
        totals = _run(source, answers, config, url, api_key=api_key, concurrency=concurrency)
    finally:
        answers.close()
    _tell(totals, output, as_json=as_json)
    if totals.failed:
        raise typer.Exit(1)


def _run(
    source: Path,
    answers: "Output",
    config: Path | None,
    url: str,
    *,
    api_key: str,
    concurrency: int,
) -> "Totals":
    import asyncio

    from rich import progress as bars
    from rich.console import Console

    from deepmesh.async_client import AsyncClient
    from deepmesh.batch import Totals, run_batch
    from deepmesh.cli.options import mesh_url
    from deepmesh.config import load_config
    from deepmesh.gateway_address import gateway_is_ready
    from deepmesh.offline import Engine

    settings = load_config(config)
    known = url or mesh_url("", settings)
    running = bool(url) or gateway_is_ready(known)
    with (
        Engine(settings, url=known if running else "") as engine,
        bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            transient=True,
            console=Console(stderr=True),
        ) as progress,
    ):
        task = progress.add_task("requests", total=None)

        def show(totals: Totals) -> None:
            failed = f", {totals.failed} failed" if totals.failed else ""
            progress.update(
                task,
                total=totals.lines,
                completed=totals.done,
                description=f"requests{failed}",
            )

        async def run() -> Totals:
            async with AsyncClient(engine.url, api_key=api_key, concurrency=concurrency) as client:
                return await run_batch(
                    source, answers, client, concurrency=concurrency, on_progress=show
                )

        return asyncio.run(run())


def _tell(totals: "Totals", output: Path, *, as_json: bool) -> None:
    import msgspec

    if as_json:
        print(msgspec.json.encode(totals).decode())
        return
    resumed = f", {totals.resumed} of an earlier run" if totals.resumed else ""
    print(f"{output}: {totals.succeeded} answered, {totals.failed} failed{resumed}")
    if totals.failed:
        print("its lines say why; the same command asks those again that were not wrong themselves")
