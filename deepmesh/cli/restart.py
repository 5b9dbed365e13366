"""`deepmesh restart` and `deepmesh reload`: change what runs, one process after the other."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ConfigOption

if TYPE_CHECKING:
    from deepmesh.rolling import Rolling

TimeoutOption = Annotated[
    float, typer.Option(min=1.0, help="Seconds for one process to drain, end, start and load.")
]


def restart(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Processes or kinds, such as executor-0-0 or tokenizer; none: all."),
    ] = None,
    config: ConfigOption = None,
    timeout: TimeoutOption = 600.0,
) -> None:
    """Replace processes of a running mesh one at a time; requests go on at the others."""
    rolling = _rolling(config, timeout)
    for name in rolling.choose(names or ()):
        rolling.restart(name)


def reload(
    config: ConfigOption = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the new weights; without it, that of before, whose files have changed.",
            show_default=False,
        ),
    ] = None,
    timeout: TimeoutOption = 3600.0,
) -> None:
    """Serve other weights, replica by replica; no answer is of two models."""
    _rolling(config, timeout).reload(model)
    if model is not None:
        typer.echo(f"put mesh.model = {str(model.resolve())!r} into mesh.toml for the next start")


def _rolling(config: Path | None, timeout_s: float) -> "Rolling":
    from deepmesh.config import load_config
    from deepmesh.rolling import Rolling

    return Rolling(Path(load_config(config).mesh.run_dir), timeout_s=timeout_s, say=typer.echo)
