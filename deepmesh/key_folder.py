"""Makes and replaces the keys of a mesh: `deepmesh keys --mesh FOLDER`."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import zmq

from deepmesh.errors import UserError
from deepmesh.wire.keys import KeyFile, KeysError, ServiceName, key_path, read_key_file

Public = dict[ServiceName, list[str]]  # newest first
SERVICES: tuple[ServiceName, ...] = get_args(ServiceName)


class KeyFolderError(UserError):
    """The folder cannot be used; the text says why."""


def make_keys(
    folder: Path, *, rotate: Iterable[ServiceName] = (), retire: bool = False
) -> list[str]:
    """Complete the folder, and replace keys if asked; returns the services with a new pair.

    What is there stays: asked twice, nothing changes the second time.

    Args:
        rotate: services that get a new pair; the public keys of the old one stay listed.
        retire: list the newest key of each service only.

    Raises:
        KeyFolderError: not writable, or a file in it is damaged.
    """
    rotate = set(rotate)
    try:
        found = [read_key_file(folder, name) for name in SERVICES if _is_there(folder, name)]
        public = _listed(found)
        made: list[str] = []
        secrets = {file.service: file.secret for file in found}
        for name in SERVICES:
            if name in secrets and name not in rotate:
                continue
            new_public, secret = (key.decode() for key in zmq.curve_keypair())
            public[name] = [new_public, *public.get(name, [])]
            secrets[name] = secret
            made.append(name)
        if retire:
            for keys in public.values():
                del keys[1:]
        for name in SERVICES:
            file = KeyFile(name, secrets[name], public)
            if file not in found:
                _write(key_path(folder, name), file)
    except KeysError as error:
        raise KeyFolderError(str(error)) from error
    except OSError as error:
        raise KeyFolderError(f"{error.filename or folder}: {error.strerror}") from error
    return made


def _is_there(folder: Path, service: str) -> bool:
    return key_path(folder, service).exists()


def _listed(files: Iterable[KeyFile]) -> Public:
    """The lists of all files agree unless one was copied in from elsewhere.

    Raises:
        KeyFolderError: they do not.
    """
    public: Public = {}
    for file in files:
        if public and file.public != public:
            raise KeyFolderError(
                f"the public keys in {file.service}/keys.toml differ from the others': "
                "bring back the folder as it was made, or begin with an empty one"
            )
        for name, keys in file.public.items():
            public[name] = list(keys)
    return public


def _write(path: Path, file: KeyFile) -> None:
    """In one go, and never readable by others."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write(f"# The secret of the {file.service}: for hosts that run one, for nobody else.\n")
        out.write(f'service = "{file.service}"\nsecret = "{file.secret}"\n\n[public]\n')
        for name, keys in file.public.items():
            quoted = ", ".join(f'"{key}"' for key in keys)
            out.write(f"{name} = [{quoted}]\n")
    new.replace(path)
