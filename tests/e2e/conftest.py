"""One real mesh with the model that ships, started once for all tests that only talk to it."""

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deepmesh.supervisor import Mesh

MODEL_FOLDER = Path(__file__).parents[2] / "models" / "tiny"
CONFIG = f"""
[mesh]
name = "e2e"
run_dir = "RUN_DIR"
model = "{MODEL_FOLDER}"
[gateway]
port = 0
[scheduler]
audit = true
"""


class Table:
    """Lines that are printed at the end of the run."""

    def __init__(self, *heading: str) -> None:
        self._rows = [heading]

    def row(self, *cells: str) -> None:
        """Add a line."""
        self._rows.append(cells)

    def lines(self) -> list[str]:
        """The table, columns aligned; nothing without rows."""
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in self._rows
        ]
        return lines if len(lines) > 1 else []


@pytest.fixture(scope="session")
def recovery_table(closing_tables: dict[str, list[str]]) -> Iterator[Table]:
    table = Table("killed", "serves again after, s", "longest gap of a stream, s")
    yield table
    closing_tables["recovery of killed processes"] = table.lines()


def until(holds: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Ask again and again, for what only a later heartbeat shows."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"


def store_links(mesh: Mesh) -> Counter[str]:
    """How often each process has linked to the first kvstore, as of its log."""
    log = (mesh.run_dir / "logs" / "kvstore-0.log").read_text()
    return Counter(name for name in re.findall(r"(\S+) is up", log) if name in mesh.pids)


def wait_store_links(mesh: Mesh, before: Counter[str], killed: Collection[str]) -> None:
    """Until those that were killed are linked again; all, if the kvstore was among them."""
    names = [name for name in before if name in killed or "kvstore-0" in killed]
    until(lambda: all(store_links(mesh)[n] > before[n] for n in names), "links to the kvstore")


class RunningMesh:
    """What a test needs of a running mesh."""

    def __init__(self, mesh: Mesh, config_path: Path) -> None:
        self.mesh = mesh
        self.url = mesh.url
        self.model = "tiny"
        self.config_path = config_path

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        """All samples of /metrics by (name, sorted labels)."""
        text = httpx.get(self.url + "/metrics", timeout=30).text
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all its label sets that contain `labels`."""
        found = [
            value
            for (sample, have), value in self.metrics().items()
            if sample == name and set(labels.items()) <= set(have)
        ]
        assert found, f"{name}{labels} is not in /metrics"
        return sum(found)

    def wait_total(self, name: str, value: float, timeout_s: float = 60, **labels: str) -> float:
        """Wait until `total` is `value`; returns how long it took, s."""
        start = time.monotonic()
        while self.total(name, **labels) != value:
            left = start + timeout_s - time.monotonic()
            assert left > 0, f"{name}{labels} is {self.total(name, **labels)}, not {value}"
        return time.monotonic() - start

    def wait_idle(self) -> None:
        """Wait until no request is left and every block is free or evictable."""
        self.wait_total("deepmesh_requests_running", 0)
        self.wait_total("deepmesh_requests_waiting", 0)
        self.wait_total("deepmesh_inflight_tokens", 0)
        deadline = time.monotonic() + 60  # stores to a kvstore may still read some
        while lost := self._lost_blocks():
            assert time.monotonic() < deadline, f"leaked: {lost}"

    def _lost_blocks(self) -> dict[str, float]:
        """Blocks that are neither free nor evictable, by pool; those without any left out."""
        metrics = self.metrics()
        lost: dict[str, float] = {}
        for (name, labels), value in metrics.items():
            if name == "deepmesh_blocks":
                of = dict(labels)
                sign = {"total": 1, "free": -1, "cached": -1}.get(of["state"], 0)
                pool = f"{of['replica']} {of['pool']}"
                lost[pool] = lost.get(pool, 0) + sign * value
        assert lost, "deepmesh_blocks is not in /metrics"
        return {pool: count for pool, count in lost.items() if count}


PAIR = (
    CONFIG
    + """
[tokenizer]
count = 2
[kvstore]
count = 1
"""
)


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    yield from running(CONFIG, tmp_path_factory.mktemp("m"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningMesh]:
    """Two tokenizers, and a kvstore that keeps responses."""
    yield from running(PAIR, tmp_path_factory.mktemp("p"))


def running(config: str, folder: Path) -> Iterator[RunningMesh]:
    """A mesh for as long as a fixture lives."""
    path = folder / "mesh.toml"
    path.write_text(config.replace("RUN_DIR", str(folder / "run")))
    with Mesh(path) as mesh:
        yield RunningMesh(mesh, path)
