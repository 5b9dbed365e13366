"""Where the gateway of a mesh is found on this machine, and whether it can serve."""

import contextlib
import http.client
import socket
from urllib.parse import urlsplit

import msgspec

from deepmesh.config import Config
from deepmesh.errors import UserError

_TRIES = 32  # for ports in a row


class PortError(UserError):
    """The gateway's port cannot be had."""


def gateway_url(config: Config) -> str:
    """The address that a client on this machine uses."""
    if config.gateway.address:
        return config.gateway.address.rstrip("/")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.gateway.host, config.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.gateway.port}"


def gateway_is_ready(url: str, timeout_s: float = 2.0) -> bool:
    """Whether GET /ready answers 200: every service behind the gateway can work."""
    return not gateway_problem(url, timeout_s)


def gateway_problem(url: str, timeout_s: float = 2.0) -> str:
    """Why GET /ready does not answer 200, as far as the gateway knows; empty: it does."""
    return gateway_fault(url, timeout_s).message


class Fault(msgspec.Struct):
    """Why a gateway cannot serve; without a message it can."""

    message: str = ""
    code: str = ""  # "draining": an operator's order; empty: it does not say


def gateway_fault(url: str, timeout_s: float = 2.0) -> Fault:
    """What GET /ready says."""
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = make(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        if response.status == 200:
            return Fault()
        return msgspec.json.decode(response.read(), type=_Problem).error
    except msgspec.DecodeError:
        return Fault(f"{url}/ready does not say 200")
    except (OSError, http.client.HTTPException) as error:
        return Fault(f"{url}: {error}")
    finally:
        connection.close()


class _Problem(msgspec.Struct):
    error: Fault


def with_free_port(config: Config) -> Config:
    """A free port instead of 0: a restarted gateway must come back at the same address.

    Raises:
        PortError: there are no `gateway.count` free ports in a row.
    """
    if config.gateway.port or config.gateway.address:
        return config
    for _ in range(_TRIES):
        with _bind(config.gateway.host, 0) as probe:
            port = min(probe.getsockname()[1], 65536 - config.gateway.count)
        gateway = msgspec.structs.replace(config.gateway, port=port)
        found = msgspec.structs.replace(config, gateway=gateway)
        with contextlib.suppress(PortError):
            check_port(found)
            return found
    raise PortError(f"gateway.port: no {config.gateway.count} free ports in a row; choose them")


def check_port(config: Config) -> None:
    """Raise PortError unless each gateway could bind its port now."""
    for index in range(0 if config.gateway.address else config.gateway.count):
        port = config.gateway.port
        _bind(config.gateway.host, port + index if port else 0).close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateway does
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        why = error.strerror or error
        raise PortError(f"gateway.port: {host}:{port}: {why}; choose another (--port)") from error
    return probe
