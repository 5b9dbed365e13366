"""Which names a gateway without keys answers to."""

import pytest

from deepmesh.config import GatewayConfig
from services.gateway.hosts import Hosts


def refused(host: str, /, *, keys: bool = False, **settings: object) -> bool:
    config = GatewayConfig(**settings)  # type: ignore[arg-type]
    return bool(Hosts(config, asks_for_keys=keys).problem({b"host": host.encode()}))


@pytest.mark.parametrize(
    "name",
    ["localhost:8000", "127.0.0.1", "127.0.0.1:9", "[::1]:8000", "gateway:8000", "a.localhost"],
)
def test_names_that_no_stranger_can_own_are_answered(name: str) -> None:
    assert not refused(name)


@pytest.mark.parametrize(
    "name", ["evil.example", "EVIL.example:8000", "127.0.0.1.evil.example", "1.2"]
)
def test_names_of_strangers_are_not(name: str) -> None:
    assert refused(name)


def test_a_key_an_open_address_or_an_allowed_origin_makes_them_ours() -> None:
    assert not refused("chat.example", keys=True)
    assert not refused("chat.example", host="0.0.0.0")
    assert not refused("chat.example", allowed_origins=["https://chat.example"])
    assert not refused("chat.example", allowed_origins=["*"])
    assert refused("other.example", allowed_origins=["https://chat.example"])


def test_without_a_host_there_is_no_page() -> None:
    assert Hosts(GatewayConfig(), asks_for_keys=False).problem({}) == ""
