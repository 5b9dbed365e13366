"""A mesh whose group is one of devices, on a host: windows between processes, and a killed rank."""

from pathlib import Path

import pytest

from deepmesh.supervisor import Mesh
from tests.e2e.rank_mesh import Bits, Client, mixed, start

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
FEW = [1, 4, 8, 9, 13, 21]  # of the requests: kernels of any shape take their time
KILL_AFTER = 12  # tokens of all requests


def bits(mesh: Mesh, marker: int, kill: str = "") -> Bits:
    """What the requests get; one executor is killed among their tokens."""
    client = Client(mesh)
    client.wait_stats(lambda s: s.ready, 120)
    if kill:
        client.later = (KILL_AFTER, lambda: mesh.kill(kill))
    try:
        requests = mixed(marker)
        return client.bits([requests[at] for at in FEW])
    finally:
        client.close()


def test_a_group_of_devices_gives_the_bits_of_one_cpu_also_when_a_rank_dies(tmp_path: Path) -> None:
    with start(tmp_path / "one", 1) as mesh:
        expected = bits(mesh, 0)
    with start(tmp_path / "two", 2, "host") as mesh:
        assert bits(mesh, 1) == expected
        before = dict(mesh.pids)
        assert bits(mesh, 2, kill="executor-0-1") == expected
        mesh.wait_restarted("executor-0-1", before["executor-0-1"])
        assert mesh.pids["executor-0-0"] == before["executor-0-0"], "the other rank stays"
        assert bits(mesh, 3) == expected
        assert not list(mesh.run_dir.glob("group-*")), "a rendezvous was left behind"
