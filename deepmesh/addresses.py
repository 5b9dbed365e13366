"""Addresses of links: which may be plain, and where a listener binds."""

import re
import socket
import time
from collections.abc import Callable

MAX_SOCKET_PATH_BYTES = 107
MAX_INDEX = 256
MAX_UNKNOWN = 16
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^/:\s\[\]]+):(\d{1,5}|\*)")


class NoIndex(ValueError):
    """It cannot be told which of several a process is."""


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


def is_name(address: str) -> bool:
    """Whether it is tcp to another host, given by its name rather than in numbers."""
    if not address.startswith("tcp://"):
        return False
    host, _ = split_tcp(address)
    return not (is_loopback(host) or host.startswith("[") or re.fullmatch(r"[\d.]+", host))


def own_index(
    pattern: str, wait_s: float = 15.0, resolve: Callable[[str], list[str]] | None = None
) -> int:
    """Which of several this process is: the number whose name leads to this host.

    Args:
        pattern: a number, or a name of hosts with {index}, such as "deepmesh-tokenizer-{index}".
        wait_s: a name server may learn of a host a little later than the host starts.
        resolve: gives the IPv4 addresses of a host, none if it is not known.

    Raises:
        NoIndex: neither, or no such name leads here.
    """
    if pattern.isdecimal():
        return int(pattern)
    if "{index}" not in pattern:
        raise NoIndex(f"index: {pattern!r} is neither a number nor a name with {{index}}")
    give_up, resolve = time.monotonic() + wait_s, resolve or _numbers
    while True:
        unknown = 0  # names in a row
        for index in range(MAX_INDEX):
            numbers = resolve(pattern.replace("{index}", str(index)))
            if any(_is_own(number) for number in numbers):
                return index
            unknown = 0 if numbers else unknown + 1
            if unknown >= MAX_UNKNOWN:
                break
        if time.monotonic() > give_up:
            raise NoIndex(f"index: no name like {pattern} leads to this host")
        time.sleep(0.2)


def _numbers(host: str) -> list[str]:
    try:
        return socket.gethostbyname_ex(host)[2]
    except OSError:
        return []


def _is_own(number: str) -> bool:
    """Only a host's own addresses can be bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((number, 0))
        except OSError:
            return False
    return True


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
