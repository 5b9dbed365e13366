"""The kvstore as a process: starts without torch, survives SIGKILL, leaves nothing behind."""

import ast
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepmesh.config import load_config
from deepmesh.wire.messages import Hits, KvStatus, KvTier, Lookup, Shutdown
from services.kvstore.files import InUse
from services.kvstore.memory import SharedFolder
from tests.services.kvstore_harness import Client, block, make_config, point, process

ROOT = Path(__file__).parents[2]
PURE = [
    "shared_asks",
    "shared_orders",
    "store",
    "eviction",
    "pages",
    "transfers",
    "records",
    "orders",
    "record_orders",
    "tier",
]


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "Shutdown"])
def test_an_orderly_end_leaves_no_shared_file(tmp_path: Path, how: str) -> None:
    config = make_config(tmp_path)
    with process(config) as child, Client(config) as client:
        client.put(block(1))
        assert sorted(p.name for p in (tmp_path / "shared").iterdir()) == [
            "kvstore-0.lock",
            "kvstore-0.pool",
        ]
        if how == "Shutdown":
            client.send(Shutdown())
        else:
            child.send_signal(signal.Signals[how])
        assert child.wait(60) == 0
    assert not (tmp_path / "shared").exists()


def test_a_killed_store_comes_back_with_all_that_it_acknowledged(tmp_path: Path) -> None:
    config = make_config(tmp_path, memory_bytes=1 << 20, disk_bytes=16 << 20)
    things = [block(number, 40_000) for number in range(12)] + [point(11)]
    for attempt in range(2):
        with process(config) as child, Client(config) as client:
            client.see_shared_file()
            if attempt == 0:
                for thing in things:
                    assert client.put_shared(thing)[1].stored == bytes([KvTier.DISK])
            chain = b"".join(number.to_bytes(16, "big") for number in range(12))
            hits = client.ask(Lookup(1, chain), Hits)
            assert (hits.num_blocks, hits.num_point_blocks) == (12, 12)
            assert client.get(*(i for i, _ in things))[1] == [payload for _, payload in things]
            if attempt == 0:
                child.kill()
                child.wait()
                assert (tmp_path / "shared" / "kvstore-0.pool").exists()  # for the next to remove
            else:
                child.send_signal(signal.SIGTERM)
                assert child.wait(60) == 0
    assert not (tmp_path / "shared").exists()


def test_a_client_gets_over_a_restart_by_itself(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with process(config) as child, Client(config) as client:
        client.put(block(1))
        first = client.link.peer
        assert first is not None
        child.kill()
        child.wait()
        with process(config):
            client._wait(
                lambda: client.link.peer is not None and client.link.peer.key != first.key,
                "no new link",
            )
            answer, payloads = client.get(block(1)[0])  # gone with the memory: a miss, not an error
            assert (answer.status, payloads) == (KvStatus.MISS, [None])
            assert client.put(block(1)).status is KvStatus.OK


def test_two_stores_do_not_share_their_files(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with process(config) as child, Client(config) as client:
        client.put(block(1))
        with process(config) as second:
            assert second.wait(60) == 1
        assert client.get(block(1)[0])[1] == [block(1)[1]]
        child.terminate()
        assert child.wait(60) == 0


def test_stores_of_one_mesh_share_the_folder(tmp_path: Path) -> None:
    first, second = (SharedFolder(tmp_path / "s", f"kvstore-{i}") for i in range(2))
    with pytest.raises(InUse):
        SharedFolder(tmp_path / "s", "kvstore-0")
    first.close()
    assert (tmp_path / "s").exists()
    second.close()
    assert not (tmp_path / "s").exists()


def test_a_wrong_configuration_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text("[kvstore]\ndisk_bytes = 1000\n")
    run = subprocess.run(
        [sys.executable, "-m", "services.kvstore", "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert run.returncode == 2
    assert "kvstore.disk_bytes" in run.stderr


def test_addresses_and_folders_are_the_meshs_own(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text('[mesh]\nrun_dir = "/tmp/x"\n[kvstore]\ncount = 2\ndisk_dir = "cache"\n')
    config = load_config(path)
    assert config.kvstore_address(1) == "ipc:///tmp/x/kvstore-1.sock"
    assert config.kvstore_disk_dir(1) == tmp_path / "cache" / "1"
    assert config.shared_dir is not None
    assert config.shared_dir.parent == Path("/dev/shm")
    path.write_text('[mesh]\nrun_dir = "/tmp/y"\n')
    assert load_config(path).shared_dir != config.shared_dir


def test_it_starts_without_torch() -> None:
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import services.kvstore.__main__"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=True,
    )
    modules = {line.rsplit("|", 1)[-1].strip() for line in run.stderr.splitlines()}
    assert "services.kvstore.__main__" in modules
    assert modules & {"torch", "numpy", "tokenizers", "starlette", "redis"} <= {"numpy"}


@pytest.mark.parametrize("name", PURE)
def test_what_decides_does_no_io(name: str) -> None:
    tree = ast.parse((ROOT / f"services/kvstore/{name}.py").read_text())
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module or "").split(".")[0])
    banned = {"torch", "zmq", "asyncio", "socket", "threading", "time", "os", "mmap", "subprocess"}
    assert names & banned == set()
