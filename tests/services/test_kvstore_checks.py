"""What doctor says of kvstores."""

import time
from pathlib import Path

from deepmesh.kvstore_checks import check_kvstores
from tests.redis_server import redis_server
from tests.services.kvstore_harness import (
    WAIT_S,
    Client,
    Running,
    block,
    damage,
    make_config,
    process,
    running,
)


def found(config: object) -> dict[str, tuple[str, str]]:
    return {c.name: (c.state, c.found) for c in check_kvstores(config)}  # pyright: ignore


def test_nothing_is_said_where_none_is_configured(tmp_path: Path) -> None:
    assert found(make_config(tmp_path, count=0)) == {}


def test_room_for_the_tiers_is_looked_at_before_the_start(tmp_path: Path) -> None:
    roomy = found(make_config(tmp_path, memory_bytes=1 << 20, disk_bytes=16 << 20))
    assert {state for state, _ in roomy.values()} == {"ok"}
    assert set(roomy) == {"kvstore memory", "kvstore disk"}
    greedy = found(make_config(tmp_path, memory_bytes=1 << 46, disk_bytes=1 << 50))
    assert {state for state, _ in greedy.values()} == {"warn"}
    assert found(make_config(tmp_path, shared_dir="off"))["kvstore memory"][0] == "warn"
    assert found(make_config(tmp_path, memory_bytes=0)) == {}


def test_a_running_store_says_what_it_has(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config) as store, Client(config) as client:
        client.put(block(1), block(2))
        state, text = found(config)["kvstore-0"]
        assert state == "ok"
        assert text.startswith("2 items")
        damage(store, block(1)[0])
        client.get(block(1)[0])
        state, text = found(config)["kvstore-0"]
        assert state == "warn"
        assert "1 damaged" in text


def test_a_store_that_hangs_or_was_killed_is_named(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with process(config) as child:
        with Client(config):
            pass
        child.kill()
        child.wait()
        assert found(config)["kvstore-0"][0] == "warn"


def test_redis_is_looked_at_before_and_while_it_is_used(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", "--maxmemory", "8mb") as server:
        fits = make_config(tmp_path, redis_url=server.url, redis_max_bytes=1 << 20)
        assert found(fits)["kvstore Redis"][0] == "ok"
        state, text = found(make_config(tmp_path, redis_url=server.url))["kvstore Redis"]
        assert (state, "maxmemory is 8 MiB" in text) == ("warn", True)
        with running(fits) as store, Client(fits):
            until_up(store)
            assert found(fits)["kvstore-0"][0] == "ok"
            server.kill()
            assert found(fits)["kvstore Redis"][0] == "warn"
            until_up(store, up=False)
            assert "Redis does not answer" in found(fits)["kvstore-0"][1]
    secret = make_config(tmp_path, redis_url="redis://me:secret@127.0.0.1:1/0")
    state, text = found(secret)["kvstore Redis"]
    assert (state, "secret" in text) == ("warn", False)


def until_up(store: Running, *, up: bool = True) -> None:
    shared, deadline = store.service.shared, time.monotonic() + WAIT_S
    assert shared is not None
    while shared.is_up is not up:
        assert time.monotonic() < deadline
