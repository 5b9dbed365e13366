"""`deepmesh pause` and `resume` over real sockets: an operator's link beside those of the mesh."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepmesh.cli.app import app
from deepmesh.config import Config
from deepmesh.operator_link import give_order
from deepmesh.run_dir import dump_toml
from deepmesh.wire.messages import Pause, Resume
from tests.core.driver import VOCAB, words
from tests.services.test_scheduler_service import Mesh, config

__all__ = ["config"]  # a fixture


@pytest.fixture
def mesh(config: Config) -> Iterator[Mesh]:
    mesh = Mesh(config)
    yield mesh
    mesh.close()


def order(mesh: Mesh, message: Pause | Resume, *, timeout_s: float = 20.0) -> str:
    """Give an order as the command does, while the fakes go on."""
    said: list[str] = []
    thread = threading.Thread(
        target=lambda: said.append(give_order(mesh.config, 0, message, timeout_s=timeout_s))
    )
    thread.start()
    mesh.pump(lambda: not thread.is_alive())
    thread.join()
    return said[0]


def test_a_paused_scheduler_runs_no_step_takes_requests_and_goes_on_when_resumed(
    mesh: Mesh,
) -> None:
    mesh.wait_ready()
    first = mesh.tokenizer.ask(1, words(20), 400)
    mesh.pump(lambda: len(first.output) > 3)
    assert order(mesh, Pause()) == ""
    steps = mesh.executor.num_steps
    second = mesh.tokenizer.ask(2, words(30), 5)

    def queued() -> bool:
        assert mesh.tokenizer.link.peer is not None
        (stats,) = mesh.tokenizer.link.peer.stats.replicas
        return stats.waiting == 1 and stats.paused

    mesh.pump(queued)
    output = len(first.output)  # its link is in order: what came before the pause is here
    assert order(mesh, Pause()) == ""  # again: nothing changes
    assert (len(first.output), mesh.executor.num_steps) == (output, steps)
    assert order(mesh, Resume()) == ""
    mesh.pump(lambda: bool(first.terminals and second.terminals))
    for request in (first, second):
        request.verify(VOCAB)


def test_a_pause_waits_for_the_steps_in_flight_and_says_when_they_do_not_end(mesh: Mesh) -> None:
    mesh.wait_ready()
    mesh.executor.hold = True
    mesh.tokenizer.ask(1, words(20), 40)
    assert "have not ended" in order(mesh, Pause(), timeout_s=0.5)


def test_without_a_scheduler_the_order_fails_in_time(config: Config) -> None:
    assert "nothing answers" in give_order(config, 0, Pause(), timeout_s=0.2)


def test_the_commands_say_what_holds_and_fail_if_it_does_not(mesh: Mesh, tmp_path: Path) -> None:
    mesh.wait_ready()
    path = tmp_path / "mesh.toml"
    path.write_text(dump_toml(mesh.config))
    runner = CliRunner()

    def run(*words: str) -> tuple[int, str]:
        done: list[tuple[int, str]] = []

        def invoke() -> None:
            result = runner.invoke(app, [*words, "--config", str(path), "--timeout", "20"])
            done.append((result.exit_code, result.output))

        thread = threading.Thread(target=invoke)
        thread.start()
        mesh.pump(lambda: not thread.is_alive())
        thread.join()
        return done[0]

    assert run("pause") == (0, "scheduler-0: paused\n")
    assert run("resume", "--index", "0") == (0, "scheduler-0: resumed\n")
    result = runner.invoke(
        app, ["pause", "--config", str(path), "--index", "7", "--timeout", "0.2"]
    )
    assert result.exit_code == 1
    assert "scheduler-7: nothing answers" in result.output
