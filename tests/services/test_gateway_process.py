"""The gateway as a process: start, address, SIGTERM, what it imports."""

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from deepmesh.config import Config
from deepmesh.run_dir import dump_toml
from deepmesh.wire.messages import Cancel, Submit
from tests.services.gateway_harness import PATIENCE_S, FakeTokenizer, make_config, until


@contextmanager
def gateway_process(config: Config) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The process and its port."""
    run_dir = Path(config.mesh.run_dir)
    path = run_dir / "mesh.toml"
    path.write_text(dump_toml(config))
    command = [sys.executable, "-m", "services.gateway", "--config", str(path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        address = run_dir / "gateway.address"
        until(lambda: address.exists() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        yield process, int(address.read_text().rpartition(":")[2])
    finally:
        process.kill()
        process.communicate()


def request(port: int) -> http.client.HTTPConnection:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    client.request("POST", "/v1/chat/completions", b"{}")
    return client


def test_sigterm_lets_open_streams_end_and_tells_new_ones_to_come_again(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    tokenizer = FakeTokenizer(config)
    try:
        with gateway_process(config) as (process, port):
            tokenizer.linked()
            client = request(port)
            submit = tokenizer.expect(Submit)
            tokenizer.events(submit, 0, b"data: 0\n\n")
            response = client.getresponse()
            response.read(9)

            process.send_signal(signal.SIGTERM)
            until(lambda: status_of(port, "/ready") == 503)
            refused = request(port).getresponse()
            assert (refused.status, refused.getheader("retry-after")) == (503, "1")
            assert json.loads(refused.read())["error"]["code"] == "draining"
            assert status_of(port, "/health") == 200
            assert process.poll() is None
            tokenizer.finish(submit, 1, b"data: 1\n\n")

            assert response.read() == b"data: 1\n\n"
            assert process.wait(PATIENCE_S) == 0
            assert not (tmp_path / "gateway.address").exists()
    finally:
        tokenizer.kill()


def status_of(port: int, path: str) -> int:
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        client.request("GET", path)
        return client.getresponse().status
    finally:
        client.close()


def test_asked_to_end_twice_it_waits_for_nobody(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    tokenizer = FakeTokenizer(config)
    try:
        with gateway_process(config) as (process, port):
            tokenizer.linked()
            client = request(port)
            tokenizer.expect(Submit)
            process.send_signal(signal.SIGTERM)
            until(lambda: status_of(port, "/ready") == 503)
            process.send_signal(signal.SIGTERM)
            client.close()
            assert process.wait(PATIENCE_S) == 0
    finally:
        tokenizer.kill()


def test_what_still_runs_when_the_grace_is_over_ends_with_an_error(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    short = msgspec.structs.replace(config.supervisor, stop_timeout_s=1.0)
    config = msgspec.structs.replace(config, supervisor=short)
    tokenizer = FakeTokenizer(config)
    try:
        with gateway_process(config) as (process, port):
            tokenizer.linked()
            client = request(port)
            submit = tokenizer.expect(Submit)
            tokenizer.events(submit, 0, b"data: 0\n\n")
            response = client.getresponse()
            process.send_signal(signal.SIGTERM)

            assert b"shutting down" in response.read()
            assert tokenizer.expect(Cancel).rid == submit.rid
            assert process.wait(PATIENCE_S) == 0
    finally:
        tokenizer.kill()


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with gateway_process(config) as (_, port):
        settings = msgspec.structs.replace(config.gateway, port=port)
        other = tmp_path / "other.toml"
        other.write_text(dump_toml(msgspec.structs.replace(config, gateway=settings)))
        result = subprocess.run(
            [sys.executable, "-m", "services.gateway", "--config", str(other)],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    assert result.returncode == 2
    assert result.stderr == (
        f"gateway-0: gateway.port: 127.0.0.1:{port}: Address already in use; choose another\n"
    )


def test_neither_torch_nor_the_recipe_is_imported() -> None:
    code = (
        "import sys, services.gateway.__main__;"
        "print({'torch', 'deepseek_recipe', 'numpy', 'tokenizers'} & set(sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    )

    assert result.stdout.strip() == "set()"
