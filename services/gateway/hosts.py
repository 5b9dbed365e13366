"""Under which names a gateway without keys answers: a page must not reach it by a name of its own.

A browser lets a page ask the host that it came from. Whoever owns a name can have it lead to
127.0.0.1 once the page is loaded (DNS rebinding); the Host header still says the name then.
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from deepmesh.addresses import is_loopback
from deepmesh.config import GatewayConfig
from services.gateway.cors import ANY

_NUMBERS = re.compile(r"\[[0-9a-f:.]+\]|\d{1,3}(\.\d{1,3}){3}")  # nobody else's page has these


class Hosts:
    """The names that are ours. All are, where a key is asked for or others may connect."""

    def __init__(self, settings: GatewayConfig, *, asks_for_keys: bool) -> None:
        self._is_checked = not asks_for_keys and is_loopback(settings.host)
        if ANY in settings.allowed_origins:
            self._is_checked = False
        self._known = {urlsplit(origin).hostname or "" for origin in settings.allowed_origins}

    def problem(self, headers: Mapping[bytes, bytes]) -> str:
        """Why a request with these headers gets no answer; empty if it does."""
        if not self._is_checked or b"host" not in headers:
            return ""
        name = re.sub(r":\d*$", "", headers[b"host"].decode("latin-1").strip().lower())
        is_local = "." not in name or name.endswith(".localhost")  # no stranger can own it
        if is_local or name in self._known or _NUMBERS.fullmatch(name):
            return ""
        return (
            f"this gateway asks for no key and is not called {name[:100]!r}: set gateway.api_keys, "
            "or add the name's origin to gateway.allowed_origins"
        )
