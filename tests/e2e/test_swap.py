"""A service with an address of its own is not started, and the mesh works with what is there."""

import subprocess
import sys
from pathlib import Path

from deepmesh.client import Client
from deepmesh.supervisor import Mesh

ROOT = Path(__file__).resolve().parents[2]


def test_a_tokenizer_served_alone_takes_the_place_of_the_mesh_s_own(tmp_path: Path) -> None:
    path = tmp_path / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "swap"\nrun_dir = "{tmp_path}/run"\nmodel = "{ROOT}/models/tiny"\n'
        f'[gateway]\nport = 0\n[tokenizer]\naddress = "ipc://{tmp_path}/mine.sock"\n'
        '[executor]\nkind = "fake"\n'
    )
    argv = [sys.executable, "-m", "deepmesh.cli", "serve", "tokenizer", "--config", str(path)]
    log = (tmp_path / "mine.log").open("wb")
    with log, subprocess.Popen(argv, stdout=log, stderr=log) as mine:
        try:
            with Mesh(path) as mesh, Client(mesh.url, timeout_s=30) as client:
                assert sorted(mesh.pids) == ["executor-0-0", "gateway-0", "scheduler-0"]
                messages: list[dict[str, object]] = [{"role": "user", "content": "Hello"}]
                fields: dict[str, object] = {"model": "tiny", "max_tokens": 5, "ignore_eos": True}
                events = list(client.stream_chat(messages, fields))
            assert (events[-1].kind, events[-1].text) == ("finish", "length")
        finally:
            mine.terminate()
    assert mine.returncode == 0, (tmp_path / "mine.log").read_text()
