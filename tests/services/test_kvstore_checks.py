"""What doctor says of kvstores."""

from pathlib import Path

from deepmesh.kvstore_checks import check_kvstores
from tests.services.kvstore_harness import Client, block, damage, make_config, process, running


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
