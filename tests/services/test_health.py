"""Readiness files, and what is said of keys and addresses."""

import os
import socket
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from deepmesh.config import Config, load_config
from deepmesh.health import FRESH_S, Readiness, main, problem_of, ready_path
from deepmesh.key_folder import make_keys
from deepmesh.link_checks import check_links
from deepmesh.supervisor import Mesh

ROOT = Path(__file__).parents[2]


def write(folder: Path, text: str = "") -> Path:
    path = folder / "mesh.toml"
    path.write_text(f'[mesh]\nrun_dir = "{folder}/run"\n{text}')
    (folder / "run").mkdir(exist_ok=True)
    return path


def config_of(folder: Path, text: str = "") -> Config:
    return load_config(write(folder, text))


def test_ready_is_what_the_service_says(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert "not ready" in problem_of("router-0", config)
    ready = Readiness(config.mesh.run_dir, "router-0", lambda: True)
    ready.look()
    assert problem_of("router-0", config) == ""
    assert "not ready" in problem_of("scheduler-0", config)
    ready.close()
    assert "not ready" in problem_of("router-0", config)
    Readiness(config.mesh.run_dir, "router-0", lambda: False).look()
    assert "not ready" in problem_of("router-0", config)
    assert list((tmp_path / "run").iterdir()) == []


def test_a_process_that_stops_saying_so_hangs(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    Readiness(config.mesh.run_dir, "router-0", lambda: True).look()
    path = ready_path(config.mesh.run_dir, "router-0")
    then = path.stat().st_mtime - FRESH_S - 1
    os.utime(path, (then, then))
    assert "hangs" in problem_of("router-0", config)


def test_without_a_run_folder_nothing_is_left_behind(tmp_path: Path) -> None:
    Readiness(tmp_path / "absent", "router-0", lambda: True).look()
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, '[executor]\nkind = "fake"\n')
    assert main(["router-0", str(path)]) == 1
    assert "not ready" in capsys.readouterr().out
    path.write_text("[nonsense]")
    assert main(["router-0", str(path)]) == 1
    assert "nonsense" in capsys.readouterr().out
    assert main([]) == 2


def test_every_process_of_a_mesh_gets_ready_and_takes_it_back(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        f'model = "{ROOT}/models/tiny"\n[gateway]\nport = 0\n[executor]\nkind = "fake"\n'
        "[router]\ncount = 1\n[kvstore]\ncount = 1\nmemory_bytes = 1048576\n",
    )
    with Mesh(path) as mesh:
        for name in mesh.pids:
            is_ready = partial(_is_ready, name, mesh.config)
            assert any(mesh.wait_for(is_ready, 0.05) for _ in range(1200)), name
        out = subprocess.run(
            [sys.executable, "-m", "deepmesh.health", "executor-0-0", f"{mesh.run_dir}/mesh.toml"],
            capture_output=True,
            text=True,
            timeout=30,
            cwd=ROOT,
        )
        assert (out.returncode, out.stdout) == (0, "ready\n")
    assert list((tmp_path / "run").glob("*.ready")) == []


def _is_ready(name: str, config: Config) -> bool:
    return problem_of(name, config) == ""


# ---------------------------------------------------------------- doctor


def found(config: Config) -> dict[str, tuple[str, str, str]]:
    return {c.name: (c.state, c.found, c.next_step) for c in check_links(config)}


def test_a_mesh_on_one_machine_needs_no_advice(tmp_path: Path) -> None:
    assert found(config_of(tmp_path)) == {}


def test_keys_that_are_missing_damaged_or_old_are_named(tmp_path: Path) -> None:
    config = config_of(tmp_path, '[links]\nkeys = "keys"\n')
    state, text, step = found(config)["keys"]
    assert (state, "no keys of any service" in text) == ("fail", True)
    assert "deepmesh keys --mesh" in step
    make_keys(tmp_path / "keys")
    assert found(config)["keys"][0] == "ok"
    make_keys(tmp_path / "keys", rotate=["router"])
    assert found(config)["keys"][:2] == ("warn", "old keys are still listed: router")
    (tmp_path / "keys" / "router" / "keys.toml").chmod(0o644)
    state, text, _ = found(config)["keys"]
    assert state == "fail"
    assert "router/keys.toml: others can read it" in text


def test_addresses_are_tried(tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        port = server.getsockname()[1]
        config = config_of(
            tmp_path,
            f'[scheduler]\naddress = "tcp://127.0.0.1:{port}"\n'
            '[tokenizer]\naddress = "tcp://no-such-host.invalid:7000"\n'
            '[links]\nkeys = "keys"\n',
        )
        checks = found(config)
        assert checks["scheduler"][0] == "ok"
        state, text, step = checks["tokenizer"]
        assert (state, text) == ("fail", "tcp://no-such-host.invalid:7000: unknown host")
        assert "tokenizer.address" in step
    state, text, _ = found(config)["scheduler"]
    assert state == "warn"
    assert "refused" in text


def test_an_open_gateway_and_an_open_group_are_pointed_out(tmp_path: Path) -> None:
    text = '[gateway]\nhost = "0.0.0.0"\n[executor]\ngroup_address = "tcp://localhost:7400"\n'
    checks = found(config_of(tmp_path, text))
    assert checks["gateway"][0] == "warn"
    assert checks["executors' group"][0] == "ok"


def test_the_mesh_of_compose_is_a_configuration_whose_links_are_encrypted() -> None:
    config = load_config(ROOT / "compose" / "mesh.cpu.toml")
    addresses = config.services_by_address()
    assert all(address.startswith("tcp://") for address in addresses)
    assert sorted(addresses.values()) == [
        *("kvstore", "router", "scheduler", "scheduler", "tokenizer")
    ]
    assert config.links.keys == "/keys"
