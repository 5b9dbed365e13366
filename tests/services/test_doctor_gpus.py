"""What `deepmesh doctor` and `deepmesh model memory` say of GPUs; a driver is played."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepmesh.checks import Check
from deepmesh.cli.app import app
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.gpus import missing_gpus
from services.executor.memory_checks import check_gpus

TINY = Path(__file__).parents[2] / "models/tiny"
H200 = "NVIDIA H200, 9.0, 143771, 143200, 580.159.04"


def driver(folder: Path, *lines: str, status: int = 0) -> str:
    """A program that answers as nvidia-smi does."""
    path = folder / "nvidia-smi"
    said = "\n".join(lines)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def mesh(model: Path = TINY, ranks: int = 1) -> Config:
    return Config(
        mesh=MeshConfig(model=str(model)),
        scheduler=SchedulerConfig(max_rows=64),
        executor=ExecutorConfig(device="cuda", ranks=ranks),
    )


def found(config: Config, program: str) -> dict[str, Check]:
    return {check.name: check for check in check_gpus(config, program)}


def test_a_card_and_what_fits_on_it(tmp_path: Path) -> None:
    checks = found(mesh(), driver(tmp_path, H200))
    assert checks["GPUs"].state == "ok"
    assert checks["GPUs"].found == "1 x NVIDIA H200, 140.4 GiB, driver 580.159.04"
    assert checks["GPU memory"].state == "ok"
    assert "8192 of one request" in checks["GPU memory"].found


def test_a_host_without_gpus_is_told_what_to_do(tmp_path: Path) -> None:
    absent = found(mesh(), str(tmp_path / "nvidia-smi"))
    assert absent["GPUs"].state == "fail"
    assert "a container without GPUs" in absent["GPUs"].found
    assert "compose.gpu.yaml" in absent["GPUs"].next_step
    broken = driver(tmp_path, "NVIDIA-SMI has failed because it couldn't communicate", status=9)
    assert "couldn't communicate" in found(mesh(), broken)["GPUs"].found
    assert "lists no GPU" in found(mesh(), driver(tmp_path, ""))["GPUs"].found


def test_cards_of_another_kind_are_named(tmp_path: Path) -> None:
    checks = found(mesh(), driver(tmp_path, "NVIDIA B200, 10.0, 183359, 183000, 580.1"))
    assert checks["GPUs"].state == "fail"
    assert "compute capability 10.0" in checks["GPUs"].found


def test_more_executors_than_gpus(tmp_path: Path) -> None:
    checks = found(mesh(ranks=2), driver(tmp_path, H200))
    assert checks["executors"].state == "warn"
    assert checks["executors"].found == "2 for 1 GPUs of this host"


def test_a_model_that_does_not_fit_fails_with_numbers(tmp_path: Path) -> None:
    checks = found(mesh(), driver(tmp_path, "NVIDIA H200, 9.0, 1024, 1000, 580.1"))
    assert checks["GPU memory"].state == "fail"
    assert "1.0 GiB that are free" in checks["GPU memory"].found


def test_nothing_is_said_where_executors_have_no_gpu(tmp_path: Path) -> None:
    assert found(Config(), str(tmp_path / "none")) == {}


@pytest.mark.parametrize(("ranks", "code"), [("2", 1), ("4", 0)])
def test_model_memory_of_a_preset(ranks: str, code: int) -> None:
    arguments = ["model", "memory", "--preset", "v41-flash", "--ranks", ranks, "--host-gb", "256"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == code
    (case,) = json.loads(result.stdout)["cases"]
    assert case["fits"] == (code == 0)
    assert sum(case["weights"].values()) + sum(case["working"].values()) + case[
        "pool_bytes"
    ] == pytest.approx(141e9)
    assert bool(case["refusal"]) == bool(code)


def test_model_memory_as_a_table() -> None:
    arguments = ["model", "memory", "--preset", "v41-flash", "--layers", "8", "--host-gb", "64"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    for text in ("routed experts", "left for KV", "longest request", "8 GPUs"):
        assert text in result.stdout


def test_containers_are_told_why_there_is_no_gpu(tmp_path: Path) -> None:
    assert "has no NVIDIA driver" in missing_gpus(1, tmp_path / "none")
    (tmp_path / "0000:00:01.0").mkdir()
    assert missing_gpus(1, tmp_path) == ""
    words = missing_gpus(2, tmp_path)
    assert "has 1 GPUs where 2 are asked for" in words
    assert "python3 compose/gpus.py --replicas 1" in words
