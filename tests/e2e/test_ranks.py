"""An EP group of several executors gives the bits of one, also when a rank dies on the way."""

from collections.abc import Iterator

import pytest

from deepmesh.supervisor import Mesh
from tests.e2e.rank_mesh import Bits, Client, mixed, start

KILL_AFTER = 60  # tokens of all requests


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    with start(tmp_path_factory.mktemp("r"), 1) as mesh:
        client = Client(mesh)
        client.wait_stats(lambda s: s.ready, 60)
        bits = client.bits(mixed(0))
        client.close()
    return bits


@pytest.fixture(scope="module", params=[2, 3, 4])
def group(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    expected: Bits,  # made first: a client that nobody pumps loses its link
) -> Iterator[tuple[Mesh, Client]]:
    with start(tmp_path_factory.mktemp("r"), request.param) as mesh:
        client = Client(mesh)
        client.wait_stats(lambda s: s.ready, 60)
        yield mesh, client
        client.close()


def loads(mesh: Mesh, name: str) -> int:
    """How often an executor was told to load; once if it has kept its link and weights."""
    log = (mesh.run_dir / "logs" / f"{name}.log").read_text()
    return log.count(f"{name} loading /")


@pytest.mark.timeout(240)
def test_ids_and_logprobs_are_those_of_one_rank(group: tuple[Mesh, Client], expected: Bits) -> None:
    mesh, client = group
    assert client.bits(mixed(1)) == expected
    alone = mixed(2)[5]  # the other ranks have nothing to do
    assert client.bits([alone]) == [expected[5]]
    assert not list(mesh.run_dir.glob("group-*")), "a rendezvous was left behind"


@pytest.mark.timeout(240)
def test_a_rank_that_dies_changes_no_bit(group: tuple[Mesh, Client], expected: Bits) -> None:
    mesh, client = group
    rank = {2: 0, 3: 2, 4: 1}[mesh.config.executor.ranks]  # the first, the last, one between
    name = f"executor-0-{rank}"
    before, epochs = dict(mesh.pids), {n: loads(mesh, n) for n in mesh.pids if "executor" in n}
    killed: list[int] = []
    client.later = (client.num_tokens + KILL_AFTER, lambda: killed.append(mesh.kill(name)))
    assert client.bits(mixed(3)) == expected
    assert killed == [before[name]]
    mesh.wait_restarted(name, killed[0])
    survivors = [other for other in mesh.pids if other != name]
    assert {n: mesh.pids[n] for n in survivors} == {n: before[n] for n in survivors}
    for other in survivors:
        if "executor" in other:
            assert loads(mesh, other) == epochs[other], "it loaded again"
    assert not list(mesh.run_dir.glob("group-*"))
