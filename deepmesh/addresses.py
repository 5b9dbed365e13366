"""Addresses of links: which may be plain, and where a listener binds."""

import re
import socket

MAX_SOCKET_PATH_BYTES = 107
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^/:\s\[\]]+):(\d{1,5}|\*)")


def split_tcp(address: str) -> tuple[str, str]:
    """Host (brackets kept) and port of tcp://HOST:PORT.

    Raises:
        ValueError: it is none.
    """
    match = _TCP.fullmatch(address)
    if match is None:
        raise ValueError(f"{address}: not tcp://HOST:PORT")
    return match[1], match[2]


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine get there."""
    return host in ("localhost", "[::1]") or re.fullmatch(r"127(\.\d{1,3}){3}", host) is not None


def check_address(address: str, *, encrypted: bool) -> None:
    """Refuse what no link can use, and plain text between hosts.

    Raises:
        ValueError: neither ipc://PATH nor tcp://HOST:PORT, a path that is too long, or tcp beyond
            this machine without keys.
    """
    if address.startswith("ipc://"):
        if len(address.removeprefix("ipc://").encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"{address}: a unix socket path has at most 107 bytes")
        return
    if not address.startswith("tcp://"):
        raise ValueError(f"{address!r}: use ipc://PATH or tcp://HOST:PORT")
    host, _ = split_tcp(address)
    if not encrypted and not is_loopback(host):
        raise ValueError(
            f"{address}: plain tcp is allowed on loopback only; "
            "set links.keys (`deepmesh keys --mesh`), or use 127.0.0.1 or ipc://"
        )


def bind_address(address: str, bind: str) -> str:
    """What a listener binds whose peers dial `address`: numbers, as ZeroMQ binds no names.

    Args:
        bind: links.bind; empty: the host of the address.

    Raises:
        ValueError: the host has no address.
    """
    if address.startswith("ipc://"):
        return address
    host, port = split_tcp(address)
    if bind and not is_loopback(host):
        return f"tcp://{bind}:{port}"
    if host == "*" or host.startswith("[") or re.fullmatch(r"[\d.]+", host):
        return address
    try:
        number = socket.gethostbyname(host)
    except OSError as error:
        raise ValueError(f"{address}: cannot bind there: {error.strerror}") from error
    return f"tcp://{number}:{port}"
