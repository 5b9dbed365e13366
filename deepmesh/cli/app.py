"""All commands, by name."""

from typing import Annotated

import typer

from deepmesh import __version__
from deepmesh.cli import cache as caches
from deepmesh.cli.batch import batch
from deepmesh.cli.bench import bench
from deepmesh.cli.chat import chat
from deepmesh.cli.check import check
from deepmesh.cli.demo import demo
from deepmesh.cli.doctor import doctor
from deepmesh.cli.keys import keys
from deepmesh.cli.model import inspect
from deepmesh.cli.model_memory import memory
from deepmesh.cli.model_random import random
from deepmesh.cli.pause import pause, resume
from deepmesh.cli.restart import reload, restart
from deepmesh.cli.serve import serve
from deepmesh.cli.simulate import simulate
from deepmesh.cli.status import status
from deepmesh.cli.timeline import timeline
from deepmesh.cli.top import top
from deepmesh.cli.trace import trace
from deepmesh.cli.up import up

app = typer.Typer(
    help="Serve DeepSeek-V4.1-class models as a mesh of small processes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.command()(up)
app.command()(serve)
app.command()(status)
app.command()(chat)
app.command()(batch)
app.command()(demo)
app.command()(doctor)
app.command()(trace)
app.command()(timeline)
app.command()(top)
app.command()(restart)
app.command()(reload)
app.command()(pause)
app.command()(resume)
app.command()(keys)
app.command()(simulate)
for passes_options_on in (bench, check):
    app.command(
        context_settings=dict[str, bool | list[str]](
            allow_extra_args=True, ignore_unknown_options=True, help_option_names=[]
        )
    )(passes_options_on)

model = typer.Typer(help="Look at checkpoints, or make one.", no_args_is_help=True)
model.command()(inspect)
model.command()(memory)
model.command()(random)
app.add_typer(model, name="model")

cache = typer.Typer(help="Look at the caches of a mesh, empty or fill them.", no_args_is_help=True)
cache.command()(caches.stats)
cache.command()(caches.flush)
cache.command()(caches.warm)
app.add_typer(cache, name="cache")


def _version(asked: bool) -> None:
    if asked:
        print(f"deepmesh {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options before the command."""
