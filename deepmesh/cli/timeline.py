"""`deepmesh timeline`: what every process did in the last seconds, for Perfetto."""

import re
from pathlib import Path
from typing import Annotated

import typer

from deepmesh.cli.options import ApiKeyOption, ConfigOption, UrlOption

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m)?")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}


def timeline(
    config: ConfigOption = None,
    url: UrlOption = "",
    api_key: ApiKeyOption = "",
    last: Annotated[str, typer.Option(help="How far back: 5s, 500ms; at most 1m.")] = "5s",
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to.")] = Path("trace.json"),
) -> None:
    """Write a trace of all processes on one clock; open it in ui.perfetto.dev or chrome://tracing.

    It shows planning, the way to each rank, device, collectives, read-back and detokenisation of
    each group step, and which requests were in it.
    """
    from deepmesh.cli.options import mesh_url
    from deepmesh.config import load_config
    from deepmesh.live_client import LiveClient

    last_s = seconds(last)
    with LiveClient(mesh_url(url, load_config(config)), api_key=api_key) as live:
        data = live.trace(last_s)
    output.write_bytes(data)
    pieces, processes = data.count(b'"ph":"X"'), data.count(b'"process_name"')
    print(f"{output}: {pieces} slices of {processes} processes, {len(data) / 1e3:.0f} kB")


def seconds(text: str) -> float:
    """Of "5s", "500ms", "1m" or "5".

    Raises:
        typer.BadParameter: it is none of these.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(
            f"{text!r} is no duration; 5s, 500ms and 1m are", param_hint="last"
        )
    return float(match[1]) * _UNITS[match[2]]
