"""What is said of a host that lacks something, before anything starts; lacks are made or played."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deepmesh.config import Config, ExecutorConfig, KvstoreConfig, MeshConfig
from deepmesh.start_checks import driver_problem, problem_of

TINY = Path(__file__).parents[2] / "models/tiny"


def on_gpu(model: Path = TINY) -> Config:
    return Config(mesh=MeshConfig(model=str(model)), executor=ExecutorConfig(device="cuda"))


def test_memory_that_is_too_small_for_the_kvstore() -> None:
    """A tmpfs has a size; one that is larger than any is asked for."""
    there = KvstoreConfig(count=1, memory_bytes=1 << 45, shared_dir="/dev/shm/mesh")
    words = problem_of(Config(kvstore=there), "kvstore")
    assert words.startswith("kvstore.memory_bytes asks for 33554432 MiB")
    assert "--shm-size 33554496m" in words
    assert "\n" not in words
    small = KvstoreConfig(count=1, memory_bytes=1 << 20, shared_dir="/dev/shm/mesh")
    assert problem_of(Config(kvstore=small), "kvstore") == ""


def test_a_host_without_a_gpu(tmp_path: Path) -> None:
    words = problem_of(on_gpu(), "executor", smi=str(tmp_path / "nvidia-smi"))
    assert "sees no GPU" in words
    assert "NVIDIA Container Toolkit" in words
    assert "\n" not in words
    assert problem_of(Config(mesh=MeshConfig(model=str(TINY))), "executor") == ""


@pytest.mark.parametrize(
    ("driver", "cuda", "is_fine"),
    [
        ("580.95.05", "13.0", True),
        ("575.57.08", "13.0", False),
        ("535.183.01", "12.8", True),
        ("470.256.02", "12.8", False),
        ("535.183.01", "", True),  # torch for CPUs
    ],
)
def test_drivers(driver: str, cuda: str, is_fine: bool) -> None:
    words = driver_problem(driver, cuda)
    assert (words == "") is is_fine
    assert is_fine or driver in words


def test_weights_that_are_not_there(tmp_path: Path) -> None:
    assert "No such file" in problem_of(on_gpu(tmp_path / "none"), "executor")
    assert "no *.safetensors" in problem_of(on_gpu(tmp_path), "executor")


def test_weights_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """A link into nowhere: for root, nothing else is unreadable."""
    shutil.copytree(TINY, tmp_path / "model", copy_function=lambda a, b: Path(b).symlink_to(a))
    weights = next((tmp_path / "model").glob("*.safetensors"))
    weights.unlink()
    weights.symlink_to(tmp_path / "elsewhere")
    words = problem_of(on_gpu(tmp_path / "model"), "executor")
    assert str(weights) in words
    assert "cannot read it" in words
    path = tmp_path / "mesh.toml"
    path.write_text(f'[mesh]\nmodel = "{tmp_path / "model"}"\nrun_dir = "{tmp_path / "run"}"\n')
    argv = [sys.executable, "-m", "services.executor", "--config", str(path)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr
    assert "cannot read it" in done.stderr
