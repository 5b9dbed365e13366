"""Containers on a host that lacks something: one clear sentence, and an end that says no."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.system.engine import ROOT, TAG, Engine

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

IMAGE = f"deepmesh/executor:{TAG}"
CONFIG = """
[mesh]
model = "/model"
run_dir = "/run/deepmesh"
[executor]
device = "{device}"
[kvstore]
count = 1
memory_bytes = {memory_bytes}
"""
SMI = "#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771, 143200, 550.54.15'\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What user 10001 may read; pytest's own folders are not open to others."""
    folder = Path("/var/tmp") / f"deepmesh-{tmp_path.name}-{tmp_path.parent.name}"
    shutil.copytree(ROOT / "models/tiny", folder / "model")
    subprocess.run(["chmod", "-R", "a+rX", str(folder)], check=True)
    return folder


@pytest.fixture(autouse=True)
def removed(folder: Path) -> object:
    yield
    shutil.rmtree(folder)


def said(
    engine: Engine,
    folder: Path,
    *argv: str,
    device: str = "cpu",
    memory_bytes: int = 0,
    options: tuple[str, ...] = (),
) -> tuple[int, str]:
    """Exit status and output of the executor's image with a mesh.toml of its own."""
    (folder / "mesh.toml").write_text(CONFIG.format(device=device, memory_bytes=memory_bytes))
    mounts = [f"{folder}/mesh.toml:/mesh.toml:ro", f"{folder}/model:/model:ro"]
    command = ["docker", "run", "--rm", "--read-only", "--cap-drop", "ALL", "--network", "none"]
    command += [part for mount in mounts for part in ("-v", mount)]
    command += ["--tmpfs", "/run/deepmesh:uid=10001", *options, "--entrypoint", "python3", IMAGE]
    done = subprocess.run(
        [*command, "-m", *argv], env=engine.env, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def checked(engine: Engine, folder: Path, service: str, **how: object) -> tuple[int, str]:
    argv = ("deepmesh.start_checks", "-c", "/mesh.toml", service)
    return said(engine, folder, *argv, **how)  # type: ignore[arg-type]


def test_a_host_that_has_everything(engine: Engine, folder: Path) -> None:
    for service in ("kvstore", "executor"):
        status, words = checked(engine, folder, service, memory_bytes=32 << 20)
        assert (status, words) == (0, "this host has what the mesh needs\n")


def test_the_64_mb_of_shared_memory_that_engines_give(engine: Engine, folder: Path) -> None:
    status, words = checked(engine, folder, "kvstore", memory_bytes=1 << 30)
    assert status == 1
    assert words.startswith("kvstore.memory_bytes asks for 1024 MiB")
    assert "/dev/shm holds 64 MiB in all" in words
    assert "`--shm-size 1088m`" in words
    assert words.count("\n") == 1
    enough = ("--shm-size", "1088m")
    status, words = checked(engine, folder, "kvstore", memory_bytes=1 << 30, options=enough)
    assert (status, words) == (0, "this host has what the mesh needs\n")


def test_a_container_without_gpus(engine: Engine, folder: Path) -> None:
    status, words = checked(engine, folder, "executor", device="cuda")
    assert status == 1
    assert "this process sees no GPU" in words
    assert "NVIDIA Container Toolkit" in words
    assert words.count("\n") == 1


def test_a_driver_that_is_too_old(engine: Engine, folder: Path) -> None:
    """The driver's program and torch are played: neither is in the images of CI."""
    (folder / "nvidia-smi").write_text(SMI)
    (folder / "nvidia-smi").chmod(0o755)
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text("")
    (folder / "torch/version.py").write_text("cuda: str | None = '13.0'\n")
    options = ("-v", f"{folder}:/played:ro", "-e", "PYTHONPATH=/opt/deepmesh:/played")
    options += ("-v", f"{folder}/nvidia-smi:/usr/local/bin/nvidia-smi:ro")
    status, words = checked(engine, folder, "executor", device="cuda", options=options)
    assert status == 1
    assert "the NVIDIA driver of this host is 550.54.15" in words
    assert "torch with CUDA 13.0 needs 580 or later" in words
    assert words.count("\n") == 1


def test_weights_that_the_user_of_the_containers_cannot_read(engine: Engine, folder: Path) -> None:
    weights = next((folder / "model").glob("*.safetensors"))
    weights.chmod(0o600)
    status, words = checked(engine, folder, "executor")
    assert status == 1
    assert f"/model/{weights.name}: user 10001 cannot read it (Permission denied)" in words
    assert "chmod -R a+rX" in words
    assert words.count("\n") == 1
    # An executor that is started without the check says the same, and ends as one that no
    # restart helps.
    argv = ("services.executor", "--config", "/mesh.toml")
    status, own_words = said(engine, folder, *argv)
    assert status == 2
    assert own_words == f"executor-0-0: {words}"
