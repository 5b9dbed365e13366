"""`deepmesh pause` and `deepmesh resume`: hold a scheduler between two group steps, and go on."""

from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ConfigOption

if TYPE_CHECKING:
    from deepmesh.config import Config
    from deepmesh.wire.messages import Pause, Resume

IndexOption = Annotated[
    int, typer.Option(min=-1, help="Number of the scheduler; without it, all.", show_default=False)
]
TimeoutOption = Annotated[float, typer.Option(min=0.1, help="Seconds to wait for each.")]


def pause(
    config: ConfigOption = None, index: IndexOption = -1, timeout: TimeoutOption = 30
) -> None:
    """Let the steps in flight end and start no more; requests wait, and nothing of them is lost."""
    from deepmesh.wire.messages import Pause

    _order(config_of(config), Pause(), index=index, timeout_s=timeout)


def resume(
    config: ConfigOption = None, index: IndexOption = -1, timeout: TimeoutOption = 30
) -> None:
    """Go on after `deepmesh pause`."""
    from deepmesh.wire.messages import Resume

    _order(config_of(config), Resume(), index=index, timeout_s=timeout)


def config_of(path: ConfigOption) -> "Config":
    """The configuration as the mesh resolved it."""
    from deepmesh.config import load_config

    return load_config(path)


def _order(config: "Config", order: "Pause | Resume", *, index: int, timeout_s: float) -> None:
    from deepmesh.operator_link import give_order

    indices = range(config.scheduler.count) if index < 0 else [index]
    failed = False
    for each in indices:
        trouble = give_order(config, each, order, timeout_s=timeout_s)
        print(f"scheduler-{each}: {trouble or type(order).__name__.lower() + 'd'}")
        failed |= bool(trouble)
    if failed:
        raise typer.Exit(1)
