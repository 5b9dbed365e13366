"""The supervisor with small real child processes: restarts, order of stopping, no leftovers."""

import os
import select
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import msgspec
import pytest

from deepmesh.config import Config, ConfigError, load_config
from deepmesh.gateway_address import PortError, check_port, gateway_url
from deepmesh.processes import Child, Command, mesh_addresses, mesh_commands
from deepmesh.run_dir import RunDirError, dump_toml, read_record, tail
from deepmesh.supervisor import Mesh, MeshError

SMALL_CHILD = str(Path(__file__).with_name("small_child.py"))


def config_in(folder: Path, text: str = "") -> Config:
    path = folder / "test.toml"
    head = f'[mesh]\nrun_dir = "{folder}/run"\n[gateway]\nport = 0\n'
    path.write_text(head + (text or "[supervisor]\nbackoff_s = 0.01\nstop_timeout_s = 5.0\n"))
    return load_config(path)


def small_mesh(folder: Path, config: Config | None = None, **modes: str) -> Mesh:
    """A mesh of small children: service name -> mode."""
    commands = [
        Command(
            f"{service}-0",
            service,
            [sys.executable, SMALL_CHILD, mode, str(folder), f"{service}-0"],
        )
        for service, mode in modes.items()
    ]

    def is_ready() -> bool:
        return all((folder / f"{command.name}.up").exists() for command in commands)

    return Mesh(config or config_in(folder), commands=commands, is_ready=is_ready)


def wait_dead(pid: int, timeout_s: float = 10.0) -> bool:
    """Block until the process has ended (whoever reaps it)."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


def test_starts_everything_and_leaves_nothing_but_logs_and_traces(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with small_mesh(tmp_path, scheduler="binds", gateway="serves") as mesh:
        pids = mesh.pids
        record = read_record(mesh.run_dir)
        assert record is not None
        assert {name: p.pid for name, p in record.processes.items()} == pids
        assert record.url == mesh.url
        assert record.supervisor_pid == os.getpid()
        assert load_config(mesh.run_dir / "mesh.toml") == mesh.config
    assert all(wait_dead(pid, 0) for pid in pids.values())
    assert sorted(entry.name for entry in mesh.run_dir.iterdir()) == ["logs", "traces"]


def test_a_killed_process_comes_back_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_mesh(tmp_path, scheduler="serves", tokenizer="serves") as mesh:
        before = mesh.pids
        old = mesh.kill("tokenizer-0")
        new = mesh.wait_restarted("tokenizer-0", old)
        assert new != old
        assert mesh.pids == {"scheduler-0": before["scheduler-0"], "tokenizer-0": new}
        assert mesh.restarts == {"scheduler-0": 0, "tokenizer-0": 1}
        record = read_record(mesh.run_dir)
        assert record is not None
        assert record.processes["tokenizer-0"].pid == new
    assert "tokenizer-0: killed by SIGKILL; starts again in 0.0 s" in caplog.text


def test_a_killed_process_takes_its_own_children_with_it(tmp_path: Path) -> None:
    with small_mesh(tmp_path, executor="family") as mesh:
        grandchild = int((tmp_path / "executor-0.grandchild").read_text())
        mesh.wait_restarted("executor-0", mesh.kill("executor-0"))
        assert wait_dead(grandchild)


def test_without_restart_a_dead_process_stays_dead(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_in(tmp_path, "[supervisor]\nrestart = false\n")
    with small_mesh(tmp_path, config, scheduler="serves", tokenizer="serves") as mesh:
        mesh.kill("tokenizer-0")
        assert mesh.wait_for(lambda: mesh.pids["tokenizer-0"] == 0, 10.0)
        with pytest.raises(MeshError, match="not restarted within"):
            mesh.wait_restarted("tokenizer-0", 0, timeout_s=0.2)
    assert "supervisor.restart is off" in caplog.text


def test_the_back_off_doubles_up_to_its_limit_and_is_forgotten_after_a_steady_life(
    tmp_path: Path,
) -> None:
    child = Child(Command("x-0", "x", [sys.executable, "-c", "exit(7)"]), tmp_path / "log", 0.2)

    def life(start: float, end: float) -> float:
        child.start(start)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert child.poll(end) == "exit status 7"
        return round(child.next_start - end, 6)

    assert [life(t, t + 1) for t in range(7)] == [0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert life(100, 200) == 0.2


def test_a_process_that_keeps_ending_stops_the_start_and_its_log_is_quoted(tmp_path: Path) -> None:
    mesh = small_mesh(tmp_path, scheduler="serves", tokenizer="fails")
    with (
        pytest.raises(MeshError, match=r"tokenizer-0 keeps ending(.|\n)*flux is not coupled"),
        mesh,
    ):
        pass
    assert set(mesh.pids.values()) == {0}
    assert read_record(mesh.run_dir) is None


def test_a_process_that_cannot_use_its_configuration_stops_the_start_at_once(
    tmp_path: Path,
) -> None:
    mesh = small_mesh(tmp_path, scheduler="serves", gateway="refuses")
    with pytest.raises(MeshError, match=r"gateway-0 cannot start(.|\n)*port: nonsense"), mesh:
        pass
    assert mesh.restarts["gateway-0"] <= 1


def test_a_start_that_takes_too_long_names_the_limit(tmp_path: Path) -> None:
    config = config_in(tmp_path, "[supervisor]\nstart_timeout_s = 0.2\n")
    command = Command(
        "gateway-0", "gateway", [sys.executable, SMALL_CHILD, "serves", str(tmp_path), "g"]
    )
    mesh = Mesh(config, commands=[command], is_ready=lambda: False)
    with pytest.raises(MeshError, match=r"supervisor.start_timeout_s = 0.2 s"), mesh:
        pass
    assert mesh.pids == {"gateway-0": 0}


def test_a_start_that_gets_on_is_given_more_time(tmp_path: Path) -> None:
    config = config_in(tmp_path, "[supervisor]\nstart_timeout_s = 0.2\n")
    log = tmp_path / "run" / "logs" / "executor-0.log"
    began, looks = time.monotonic(), 0

    def is_ready() -> bool:
        nonlocal looks
        looks += 1
        with log.open("a") as file:
            file.write(f"T INFO executor-0 loading: kernels {looks} of 9999\n")
        return time.monotonic() - began > 1.0

    argv = [sys.executable, SMALL_CHILD, "serves", str(tmp_path), "executor-0"]
    with Mesh(config, commands=[Command("executor-0", "executor", argv)], is_ready=is_ready):
        assert looks > 5


def test_stops_against_the_flow_of_requests(tmp_path: Path) -> None:
    order = ("kvstore", "scheduler", "executor", "tokenizer", "gateway")
    with small_mesh(tmp_path, None, **dict.fromkeys(order, "serves")):
        pass
    stopped = (tmp_path / "stopped").read_text().split()
    assert stopped == [
        f"{s}-0" for s in ("gateway", "tokenizer", "scheduler", "executor", "kvstore")
    ]


@pytest.mark.parametrize("hurry", [False, True])
def test_what_ignores_sigterm_is_killed(tmp_path: Path, hurry: bool) -> None:
    seconds = 60.0 if hurry else 0.4  # in a hurry the time-out plays no part
    config = config_in(tmp_path, f"[supervisor]\nstop_timeout_s = {seconds}\n")
    mesh = small_mesh(tmp_path, config, gateway="stubborn", tokenizer="stubborn")
    with mesh:
        pids = mesh.pids
        if hurry:
            mesh.request_stop()
            mesh.request_stop()
    assert all(wait_dead(pid, 0) for pid in pids.values())


def test_a_stopped_process_is_killed_too(tmp_path: Path) -> None:
    config = config_in(tmp_path, "[supervisor]\nstop_timeout_s = 0.4\n")
    with small_mesh(tmp_path, config, scheduler="serves") as mesh:
        pid = mesh.kill("scheduler-0", signal.SIGSTOP)
    assert wait_dead(pid, 0)


def test_a_second_mesh_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with small_mesh(tmp_path, scheduler="serves") as mesh:
        other = small_mesh(tmp_path, scheduler="serves")
        with pytest.raises(RunDirError, match=rf"already running .* by pid {os.getpid()}"):
            other.start()
        assert mesh.restarts == {"scheduler-0": 0}
    with small_mesh(tmp_path, scheduler="serves"):
        pass  # the folder is free again


def test_leftovers_of_a_killed_mesh_are_removed_but_not_other_files(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "traces").mkdir(parents=True)
    (run / "traces" / "gateway-0.jsonl").touch()
    (run / "notes.txt").touch()
    (run / "mesh.json").write_text("{}")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(run / "tokenizer-9.sock"))
    with small_mesh(tmp_path, scheduler="serves"):
        assert not (run / "tokenizer-9.sock").exists()
    assert (run / "notes.txt").exists()
    assert (run / "traces" / "gateway-0.jsonl").exists()


KILLED_SUPERVISOR = """
import sys
import tomllib
from pathlib import Path
from tests.services.test_supervisor import small_mesh
with small_mesh(Path(sys.argv[1]), scheduler="serves", tokenizer="stubborn") as mesh:
    print(*mesh.pids.values(), flush=True)
    mesh.wait_stopped()
"""


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    argv = [sys.executable, "-c", KILLED_SUPERVISOR, str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=root) as supervisor:
        assert supervisor.stdout is not None
        pids = [int(word) for word in supervisor.stdout.readline().split()]
        supervisor.kill()
    assert len(pids) == 2
    assert all(wait_dead(pid) for pid in pids)
    with small_mesh(tmp_path, scheduler="serves"):
        pass  # its lock died with it


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "m.toml").write_text(
            f'[mesh]\nrun_dir = "{tmp_path}/run"\n[gateway]\nport = {port}\n'
        )
        mesh = Mesh(tmp_path / "m.toml", commands=[])
        with pytest.raises(PortError, match=rf"gateway.port: 127.0.0.1:{port}.*choose another"):
            mesh.start()
    assert not (tmp_path / "run").exists()


def test_several_gateways_have_ports_in_a_row(tmp_path: Path) -> None:
    config = config_in(tmp_path, "count = 3\n")
    mesh = Mesh(config)
    port = mesh.config.gateway.port
    commands = mesh_commands(mesh.config, tmp_path / "m.toml")
    assert [c.name for c in commands if c.service == "gateway"] == [
        "gateway-0",
        "gateway-1",
        "gateway-2",
    ]
    addresses = mesh_addresses(mesh.config, mesh.url)
    assert addresses["gateway-2"] == f"http://127.0.0.1:{port + 2}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port + 2))
        taken.listen()
        with pytest.raises(PortError, match=str(port + 2)):
            check_port(mesh.config)


def test_port_0_becomes_a_free_port_that_stays(tmp_path: Path) -> None:
    mesh = Mesh(config_in(tmp_path))
    assert mesh.config.gateway.port > 0
    assert mesh.url == f"http://127.0.0.1:{mesh.config.gateway.port}"


def names_of(folder: Path, text: str) -> list[str]:
    return [command.name for command in mesh_commands(config_in(folder, text), folder / "m.toml")]


def test_one_command_a_process_in_starting_order(tmp_path: Path) -> None:
    assert names_of(tmp_path, "[executor]\nranks = 2\n[tokenizer]\ncount = 2\n") == [
        "scheduler-0",
        "executor-0-0",
        "executor-0-1",
        "tokenizer-0",
        "tokenizer-1",
        "gateway-0",
    ]
    command = mesh_commands(config_in(tmp_path, "[executor]\nthreads = 3\n"), tmp_path / "m.toml")[
        1
    ]
    assert command.argv[1:] == (
        ["-m", "services.executor", "--config", f"{tmp_path}/m.toml", "--index", "0", "--rank", "0"]
    )
    assert command.env["OMP_NUM_THREADS"] == "3"


def test_kvstores_start_first_and_their_mapped_files_are_removed(tmp_path: Path) -> None:
    text = "[kvstore]\ncount = 2\n"
    assert names_of(tmp_path, text)[:3] == ["kvstore-0", "kvstore-1", "scheduler-0"]
    config = config_in(tmp_path, text)
    assert config.shared_dir is not None
    config.shared_dir.mkdir()
    (config.shared_dir / "pool").touch()  # of a mesh that was killed
    with small_mesh(tmp_path, config, kvstore="serves"):
        assert not config.shared_dir.exists()
        config.shared_dir.mkdir()
    assert not config.shared_dir.exists()


def test_a_folder_of_mapped_files_that_the_user_named_is_left_alone(tmp_path: Path) -> None:
    named = tmp_path / "mine"
    named.mkdir()
    config = config_in(tmp_path, f'[kvstore]\nshared_dir = "{named}"\n')
    with small_mesh(tmp_path, config, kvstore="serves"):
        pass
    assert named.exists()


@pytest.mark.parametrize("service", ["tokenizer", "scheduler", "executor"])
def test_a_service_with_an_address_is_not_started(tmp_path: Path, service: str) -> None:
    names = names_of(tmp_path, f'[{service}]\naddress = "ipc:///somewhere/else.sock"\n')
    assert not [name for name in names if name.startswith(service)]
    assert len(names) == 3


def test_the_written_configuration_reads_back_the_same(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    mesh = msgspec.structs.replace(
        config.mesh, served_model='a "quoted" \\ näme\n', aliases=["x", "y"]
    )
    config = msgspec.structs.replace(config, mesh=mesh)
    (tmp_path / "copy.toml").write_text(dump_toml(config))
    assert load_config(tmp_path / "copy.toml") == config


def test_a_key_that_toml_cannot_hold_is_named(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    mesh = msgspec.structs.replace(config.mesh, served_model="a\x7fb")
    with pytest.raises(ConfigError, match=r"mesh\.served_model"):
        dump_toml(msgspec.structs.replace(config, mesh=mesh))


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ('[gateway]\nhost = "0.0.0.0"\nport = 81\n', "http://127.0.0.1:81"),
        ('[gateway]\nhost = "::"\nport = 82\n', "http://[::1]:82"),
        ('[gateway]\naddress = "https://mesh.example/"\n', "https://mesh.example"),
    ],
)
def test_the_url_is_one_that_a_local_client_can_use(tmp_path: Path, text: str, url: str) -> None:
    (tmp_path / "m.toml").write_text(text)
    assert gateway_url(load_config(tmp_path / "m.toml")) == url


def test_the_tail_of_a_log_counts_carriage_returns_as_line_ends(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_bytes(b"one\ntwo\rloading  40%\rloading  80%\r\n\n")
    assert tail(log, 2) == ["loading  40%", "loading  80%"]
    assert tail(tmp_path / "absent.log", 2) == []


def test_the_example_configuration_shows_every_key_with_its_default(tmp_path: Path) -> None:
    example = Path(__file__).resolve().parents[2] / "mesh.example.toml"
    assert load_config(example) == load_config(None)
    shown = tomllib.loads(example.read_text())
    assert {section: set(table) for section, table in shown.items()} == {
        section: set(table) for section, table in msgspec.to_builtins(Config()).items()
    }
