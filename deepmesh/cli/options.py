"""Options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from deepmesh.config import Config

ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="The mesh.toml; without it, the defaults.", show_default=False
    ),
]
UrlOption = Annotated[
    str,
    typer.Option(
        help="Address of the gateway; without it, the mesh of --config.", show_default=False
    ),
]
ApiKeyOption = Annotated[
    str, typer.Option(envvar="DEEPMESH_API_KEY", help="API key.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def mesh_url(url: str, config: "Config") -> str:
    """The given address, or that of the mesh that runs with this config, or its default one."""
    from deepmesh.gateway_address import gateway_url
    from deepmesh.run_dir import read_record

    if url:
        return url
    record = read_record(Path(config.mesh.run_dir))
    return record.url if record else gateway_url(config)
