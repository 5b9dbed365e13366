"""A mesh whose group is one of devices: windows between processes, a killed rank, moving experts.

On a host, and on two GPUs where there are so many.
"""

import time
from pathlib import Path

import pytest
import torch

from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from tests.e2e.rank_mesh import Bits, Client, mixed, start
from tests.e2e.test_expert_moves import start_moving

pytestmark = [pytest.mark.timeout(300)]
FEW = [1, 4, 8, 9, 13, 21]  # of the requests: kernels of any shape take their time
KILL_AFTER = 12  # tokens of all requests


class Watching(Client):
    """Also knows when tokens came."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self._times: list[float] = []  # of tokens, from the kill on

    def _take_row(self, row: m.TokenRow) -> m.AckRow:
        if self._times and row.ids:
            self._times.append(time.monotonic())
        return super()._take_row(row)

    @property
    def recovered_s(self) -> float:
        """From the kill to the first token behind the longest silence."""
        gaps = [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
        return self._times[gaps.index(max(gaps)) + 1] - self._times[0]

    def kill(self, mesh: Mesh, name: str, after: int) -> None:
        """Once so many tokens more have come."""

        def act() -> None:
            mesh.kill(name)
            self._times = [time.monotonic()]

        self.later = (self.num_tokens + after, act)


def bits(mesh: Mesh, marker: int, kill: str = "") -> Bits:
    """What the requests get; one executor is killed among their tokens."""
    client = Watching(mesh)
    client.wait_stats(lambda s: s.ready, 120)
    if kill:
        client.kill(mesh, kill, KILL_AFTER)
    try:
        requests = mixed(marker)
        return client.bits([requests[at] for at in FEW])
    finally:
        client.close()


@pytest.mark.long
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


def differing(found: Bits, expected: Bits) -> list[int]:
    """Requests whose ids, log-probabilities or ends are others."""
    pairs = zip(found, expected, strict=True)
    return [at for at, (ours, wanted) in enumerate(pairs) if ours != wanted]


@pytest.mark.gpu
def test_two_gpus_give_the_bits_of_one_while_experts_move_and_a_rank_dies(
    tmp_path: Path,
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with start(tmp_path, 1, "cuda") as mesh:
        client = Watching(mesh)
        client.wait_stats(lambda s: s.ready, 120)
        expected = client.bits(mixed(0))
        client.close()
    folder = tmp_path / "two"
    folder.mkdir()
    with start_moving(folder, 2, "cuda") as mesh:
        client = Watching(mesh)
        client.wait_stats(lambda s: s.ready, 120)
        assert differing(client.bits(mixed(1)), expected) == []
        assert differing(client.bits(mixed(2)), expected) == []
        before = client.wait_stats(lambda s: s.experts.placements > 0, 60).experts
        assert before.moves > 0
        for marker, name in ((3, "executor-0-1"), (4, "executor-0-0")):
            pids = dict(mesh.pids)
            client.kill(mesh, name, KILL_AFTER)
            found = client.bits(mixed(marker))
            print(f"{name} killed: tokens again after {client.recovered_s:.2f} s")
            assert differing(found, expected) == []
            mesh.wait_restarted(name, pids[name])
        assert differing(client.bits(mixed(5)), expected) == []
        client.close()
