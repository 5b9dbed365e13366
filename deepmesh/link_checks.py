"""What `deepmesh doctor` says of links between hosts: keys, names, who listens."""

import errno
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from deepmesh.addresses import is_loopback, split_tcp
from deepmesh.checks import Check
from deepmesh.config import Config
from deepmesh.wire.keys import DIALS, KeysError, key_path, read_key_file

CONNECT_S = 1.0
NUM_SHOWN = 8  # addresses that are tried


def check_links(config: Config) -> Iterator[Check]:
    """Everything about links that leave this machine; nothing to say when none does."""
    yield from check_keys(config)
    yield from check_addresses(config)
    if config.gateway.host not in ("127.0.0.1", "::1", "localhost") and not config.gateway.api_keys:
        found = f"{config.gateway.host}:{config.gateway.port} is open to anyone who reaches it"
        yield Check("gateway", "warn", found, "`deepmesh keys`, gateway.api_keys; or a proxy")


def check_keys(config: Config) -> Iterator[Check]:
    """The files of the services that have one on this machine."""
    if not config.links.keys:
        return
    folder = Path(config.links.keys)
    there = [name for name in DIALS if key_path(folder, name).exists()]
    if not there:
        step = f"deepmesh keys --mesh {folder}, or copy a service's folder from where it was made"
        yield Check("keys", "fail", f"{folder}: no keys of any service", step)
        return
    problems: list[str] = []
    replaced: set[str] = set()
    for name in there:
        try:
            public = read_key_file(folder, name).public
            replaced.update(owner for owner, keys in public.items() if len(keys) > 1)
        except KeysError as error:
            problems.append(str(error))
    if problems:
        yield Check("keys", "fail", "; ".join(problems), "correct or copy that file")
        return
    yield Check("keys", "ok", f"{folder}: {', '.join(there)}")
    if replaced:
        found = f"old keys are still listed: {', '.join(sorted(replaced))}"
        step = "once all run with new ones: deepmesh keys --mesh FOLDER --retire, and copy"
        yield Check("keys", "warn", found, step)


def check_addresses(config: Config) -> Iterator[Check]:
    """Whether the tcp addresses of mesh.toml mean something here, and somebody listens there."""
    tcp = [
        (address, service)
        for address, service in config.services_by_address().items()
        if address.startswith("tcp://")
    ]
    for address, service in tcp[:NUM_SHOWN]:
        yield _check_address(address, service)
    if config.executor.group_address:
        host, _ = split_tcp(config.group_address(0))
        try:
            found = f"{config.group_address(0)} ({socket.gethostbyname(host)})"
        except OSError:
            step = "correct executor.group_address: it names the host of rank 0"
            yield Check("executors' group", "fail", f"{host}: unknown host", step)
        else:
            state = "ok" if is_loopback(host) else "warn"
            step = "" if state == "ok" else "not encrypted: keep that network private"
            yield Check("executors' group", state, found, step)


def _check_address(address: str, service: str) -> Check:
    host, port = split_tcp(address)
    began, key = time.monotonic(), f"{service}.address"
    if service == "executor":
        key = "executor.handover_address"
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S):
            took_ms = 1000 * (time.monotonic() - began)
        return Check(service, "ok", f"{address} answers ({took_ms:.0f} ms)")
    except socket.gaierror:
        step = f"correct {key}, or the resolver of this machine"
        return Check(service, "fail", f"{address}: unknown host", step)
    except OSError as error:
        why = error.strerror or "no answer"
        refused = error.errno == errno.ECONNREFUSED
        step = f"deepmesh serve {service}" if refused else "is a firewall between?"
        return Check(service, "warn", f"{address}: {why}", step)
