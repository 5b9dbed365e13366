"""What `docker compose config` makes of the files that CI cannot start: GPUs, secrets, observe."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deepmesh.config import load_config
from tests.system.containers import COMPOSE
from tests.system.engine import ROOT

pytestmark = pytest.mark.system

FOLDER = ROOT / "compose"
TASKS = {"keys", "check", "gpus"}  # they end


def configured(*files: str, folder: Path = FOLDER, **environment: str) -> dict[str, Any]:
    """compose.yaml with these laid over it."""
    argv = [part for file in ("compose.yaml", *files) for part in ("-f", str(folder / file))]
    done = subprocess.run(
        [str(COMPOSE), *argv, "config", "--format", "json"],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "HOME": "/", **environment},
    )
    assert done.returncode == 0, done.stderr
    assert "warn" not in done.stderr.lower(), done.stderr
    return json.loads(done.stdout)


def devices(service: dict[str, Any]) -> list[str]:
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    return device["device_ids"]


def made(folder: Path, *arguments: str) -> Path:
    """A copy of the folder, written anew for another number of GPUs."""
    shutil.copytree(FOLDER, folder / "compose")
    argv = [sys.executable, str(folder / "compose/gpus.py"), *arguments]
    subprocess.run(argv, check=True, timeout=60, capture_output=True)
    return folder / "compose"


def test_what_the_repository_has_is_what_its_program_makes(tmp_path: Path) -> None:
    folder = made(tmp_path)
    for name in ("compose.gpu.yaml", "mesh.gpu.toml"):
        assert (folder / name).read_text() == (FOLDER / name).read_text()


@pytest.mark.parametrize(
    ("replicas", "ranks"), [(2, 1), (1, 1), (4, 1), (8, 1), (1, 4), (3, 2), (2, 4)]
)
def test_any_number_of_executors_has_a_gpu_each(tmp_path: Path, replicas: int, ranks: int) -> None:
    folder = made(tmp_path, "--replicas", str(replicas), "--ranks", str(ranks))
    whole = configured("compose.gpu.yaml", folder=folder)
    services = whole["services"]
    names = [f"executor-{index}-{rank}" for index in range(replicas) for rank in range(ranks)]
    assert {name for name in services if name.startswith("executor")} == set(names)
    assert [devices(services[name]) for name in names] == [[str(n)] for n in range(len(names))]
    schedulers = {f"scheduler-{index}" for index in range(replicas)}
    assert {name for name in services if name.startswith("scheduler")} == schedulers
    assert services["gpus"]["entrypoint"][-1] == str(replicas * ranks)
    assert services["check"]["depends_on"]["gpus"]["condition"] == "service_completed_successfully"
    for name in names:
        service = services[name]
        _, index, rank = name.split("-")
        assert service["command"][2:] == ["--index", index, "--rank", rank]
        assert name in service["healthcheck"]["test"]
        assert service["ipc"] == "host"
        assert int(service["shm_size"]) == 16 << 30
        assert service["ulimits"]["memlock"] == -1
        assert service["depends_on"]["check"]["condition"] == "service_completed_successfully"
        assert (service["read_only"], service["cap_drop"]) == (True, ["ALL"])
        assert service["image"].startswith("deepmesh/executor-gpu:")
        if ranks > 1:
            assert f"group-{index}" in service["networks"]
            aliases = (service["networks"][f"group-{index}"] or {}).get("aliases") or []
            assert aliases == ([f"group-{index}"] if rank == "0" else [])
    for name in schedulers:
        assert services[name]["command"][3] == name.rpartition("-")[2]
        assert name in services[name]["healthcheck"]["test"]
    config = load_config(folder / "mesh.gpu.toml")
    assert (config.executor.device, config.executor.ranks) == ("cuda", ranks)
    assert config.scheduler.count == replicas
    assert bool(config.executor.group_address) is (ranks > 1)


def test_every_service_reads_the_configuration_for_gpus() -> None:
    for name, service in configured("compose.gpu.yaml")["services"].items():
        for volume in service.get("volumes", ()):
            if volume["target"] == "/etc/deepmesh/mesh.toml":
                assert Path(volume["source"]).name == "mesh.gpu.toml", name


def test_gpus_can_be_named() -> None:
    services = configured("compose.gpu.yaml", GPU_0="GPU-5a1b", GPU_1="7")["services"]
    assert devices(services["executor-0-0"]) == ["GPU-5a1b"]
    assert devices(services["executor-1-0"]) == ["7"]


def test_keys_of_links_as_secrets(tmp_path: Path) -> None:
    services = configured("compose.secrets.yaml", DEEPMESH_KEYS=str(tmp_path))["services"]
    plain = configured()["services"]
    for name, service in services.items():
        kind = name.partition("-")[0]
        keys = [each for each in service.get("secrets", ()) if "keys" in each["target"]]
        targets = [] if name in (*TASKS, "redis") else [f"/keys/{kind}/keys.toml"]
        assert [each["target"] for each in keys if each["source"] != "api_keys"] == targets
        mounts = {volume["target"] for volume in service.get("volumes", ())}
        assert mounts == {
            volume["target"]
            for volume in plain[name].get("volumes", ())
            if not volume["target"].startswith("/keys/")
        }


def test_nothing_waits_for_what_cannot_be_ready() -> None:
    """The order of the start: each waits for the health of what it cannot work without."""
    services = configured()["services"]
    waits = {
        name: {other for other, how in service.get("depends_on", {}).items()
               if how["condition"] == "service_healthy"}
        for name, service in services.items()
    }  # fmt: skip
    assert waits["kvstore-0"] == {"redis"}
    assert waits["executor-0-0"] == waits["scheduler-1"] == waits["router-0"] == {"kvstore-0"}
    assert waits["tokenizer"] == set()
    assert waits["gateway-0"] == {"tokenizer"}
    for name, service in services.items():
        if name not in TASKS:
            assert "healthcheck" in service, name
        if name.startswith("executor"):
            assert service["healthcheck"]["start_period"] == "1h0m0s"


def test_the_profile_that_observes(tmp_path: Path) -> None:
    services = configured(COMPOSE_PROFILES="observe")["services"]
    assert {"traces", "prometheus", "grafana"} <= set(services)
    assert not {"traces", "prometheus", "grafana"} & set(configured()["services"])
    for name in ("traces", "grafana"):
        (port,) = services[name]["ports"]
        assert port["host_ip"] == "127.0.0.1"
    for name in ("prometheus", "grafana"):
        for volume in services[name]["volumes"]:
            assert volume["type"] == "volume" or Path(volume["source"]).is_file(), volume
    with_traces = configured(DEEPMESH_OTLP="http://traces:4318")["services"]
    endpoints = {
        with_traces[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        for name in with_traces
        if name not in (*TASKS, "redis")
    }
    assert endpoints == {"http://traces:4318"}


def test_grafana_finds_our_dashboard_and_prometheus_our_gateway() -> None:
    observe = FOLDER / "observe"
    scraped = yaml.safe_load((observe / "prometheus.yaml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == ["gateway-0:8000"]
    sources = yaml.safe_load((observe / "datasources.yaml").read_text())["datasources"]
    urls = {each["type"]: each["url"] for each in sources}
    assert urls == {"prometheus": "http://prometheus:9090", "jaeger": "http://traces:16686"}
    (provider,) = yaml.safe_load((observe / "dashboards.yaml").read_text())["providers"]
    grafana = configured(COMPOSE_PROFILES="observe")["services"]["grafana"]
    targets = [volume["target"] for volume in grafana["volumes"]]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home in targets
    assert home.startswith(provider["options"]["path"])
    variables = json.loads((observe / "dashboard.json").read_text())["templating"]["list"]
    assert any(each["type"] == "datasource" for each in variables)
