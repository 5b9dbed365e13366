"""Keys of encrypted links: what a process of one service reads from the key folder of its mesh.

FOLDER/SERVICE/keys.toml holds the secret key of that service and the public keys of all. One pair
serves for both directions: a listener shows it, and who dials is known by it.
"""

import re
import struct
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import msgspec
from zmq.utils import z85

from deepmesh.config import Config, ConfigError

# "operator" is no service: `deepmesh pause` and `resume` dial schedulers with its key.
ServiceName = Literal[
    "gateway", "tokenizer", "router", "scheduler", "executor", "kvstore", "operator"
]
KEY_BYTES = 32
_QUOTED = re.compile(r"'.*'|`(?!\$|service`|secret`|public`).*`", re.DOTALL)
SERVICES: tuple[str, ...] = get_args(ServiceName)
DIALS: Mapping[str, tuple[str, ...]] = {
    "gateway": ("tokenizer",),
    "tokenizer": ("router", "scheduler", "kvstore"),
    "router": ("scheduler", "kvstore"),
    "scheduler": ("kvstore", "scheduler"),  # a decode group's, a prefill group's; so executors
    "executor": ("scheduler", "kvstore", "executor"),
    "kvstore": (),
    "operator": ("scheduler",),
}


class KeysError(ConfigError):
    """Keys are missing or damaged; the text names the file."""


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """keys.toml: 32-byte keys in Z85, 40 characters each."""

    service: ServiceName
    secret: str
    public: dict[ServiceName, list[str]]  # newest first; more than one while keys are replaced


@dataclass(frozen=True)
class Keyring:
    """What the links of one process need. Keys are 32 bytes."""

    service: str
    secret: bytes
    public: bytes
    clients: Mapping[bytes, str]  # who may dial in: public key -> service
    servers: Mapping[str, tuple[bytes, ...]]  # keys that may answer at an address, newest first

    def keys_at(self, address: str) -> tuple[bytes, ...]:
        """Keys of the service that listens at an address of mesh.toml.

        Raises:
            KeysError: none does, or not one that this service dials.
        """
        keys = self.servers.get(address, ())
        if not keys:
            what = f"mesh.toml names no service there that a {self.service} dials"
            raise KeysError(f"{address}: {what}")
        return keys


def key_path(folder: Path, service: str) -> Path:
    """The one file that processes of this service read."""
    return folder / service / "keys.toml"


def load_keyring(config: Config, service: str) -> Keyring | None:
    """Keys of a process of this service; None when links.keys is not set.

    Raises:
        KeysError: the file is not there, readable by others, or damaged.
    """
    if not config.links.keys:
        return None
    file = read_key_file(Path(config.links.keys), service)
    public = {name: [_decode(key) for key in keys] for name, keys in file.public.items()}
    clients = {
        key: dialler
        for dialler, dialled in DIALS.items()
        if service in dialled
        for key in public.get(dialler, [])
    }
    servers = {
        address: tuple(public.get(at, ()))
        for address, at in config.services_by_address().items()
        if at in DIALS[service]
    }
    return Keyring(service, _decode(file.secret), public[file.service][0], clients, servers)


def read_key_file(folder: Path, service: str) -> KeyFile:
    """Read and check FOLDER/SERVICE/keys.toml.

    Raises:
        KeysError: see `load_keyring`.
    """
    path = key_path(folder, service)
    try:
        mode = path.stat().st_mode
        text = path.read_text("utf-8")
    except OSError as error:
        step = "`deepmesh keys --mesh` makes it"
        raise KeysError(f"links.keys: {path}: {error.strerror}; {step}") from error
    except UnicodeDecodeError as error:
        raise KeysError(f"links.keys: {path}: no UTF-8 at byte {error.start}") from error
    if mode & 0o007:
        raise KeysError(f"links.keys: {path}: others can read it; chmod 600")
    try:
        file = msgspec.convert(tomllib.loads(text), KeyFile)
        for key in (file.secret, *(key for keys in file.public.values() for key in keys)):
            _decode(key)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        # what it quotes may be a key that a damaged file has in another field
        what = _QUOTED.sub("...", str(error))
        raise KeysError(f"links.keys: {path}: {what}") from None
    if file.service != service or not file.public.get(file.service):
        raise KeysError(f"links.keys: {path}: not the keys of the {service}")
    return file


def _decode(key: str) -> bytes:
    try:
        raw = z85.decode(key)
    except (KeyError, ValueError, struct.error):  # a foreign character; length; above 2**32
        raw = b""
    if len(raw) != KEY_BYTES:
        raise ValueError("a key has 40 characters of Z85")
    return raw
