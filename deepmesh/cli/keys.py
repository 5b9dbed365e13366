"""`deepmesh keys`: an API key for clients, or the keys of a mesh's own links."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class KeyOwner(StrEnum):
    """Who has a key pair: the services, and whoever gives orders with `deepmesh pause`."""

    gateway = "gateway"
    tokenizer = "tokenizer"
    router = "router"
    scheduler = "scheduler"
    executor = "executor"
    kvstore = "kvstore"
    operator = "operator"


def keys(
    mesh: Annotated[
        Path | None,
        typer.Option(help="Make or complete this folder of keys for links between hosts."),
    ] = None,
    rotate: Annotated[
        list[KeyOwner] | None,
        typer.Option(help="With --mesh: give this service a new pair; the old one stays listed."),
    ] = None,
    retire: Annotated[
        bool, typer.Option("--retire", help="With --mesh: list nobody's old keys any longer.")
    ] = False,
) -> None:
    """Make an API key and its digest for mesh.toml; with --mesh, keys of the services."""
    if mesh is not None:
        _mesh_keys(mesh, rotate or [], retire=retire)
    elif rotate or retire:
        raise typer.BadParameter("--rotate and --retire need --mesh FOLDER")
    else:
        _api_key()


def _api_key() -> None:
    import hashlib
    import secrets

    key = f"dm-{secrets.token_urlsafe(32)}"
    print(f"key (give it to the client, it is stored nowhere):  {key}")
    print("mesh.toml, [gateway]:")
    print(f'api_keys = ["{hashlib.sha256(key.encode()).hexdigest()}"]')


def _mesh_keys(folder: Path, rotate: list[KeyOwner], *, retire: bool) -> None:
    from deepmesh.key_folder import make_keys

    made = make_keys(folder, rotate=[owner.value for owner in rotate], retire=retire)
    print(f"{folder}: {'new keys of ' + ', '.join(made) if made else 'no new key'}")
    print("mesh.toml, [links]:")
    print(f'keys = "{folder.resolve()}"')
    print("A host needs the folders of the services that it runs, no other.")
