"""An EP group of several executors gives the bits of one, also when a rank dies on the way."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from deepmesh.wire.packed import pack_ids
from tests.e2e.wire_client import Answer, WireClient

MODEL = Path(__file__).parents[2] / "models" / "tiny"
VOCAB = json.loads((MODEL / "config.json").read_text())["text_config"]["vocab_size"]
NUM_REQUESTS = 24
KILL_AFTER = 60  # tokens of all requests
Bits = list[tuple[list[int], bytes, str]]  # ids, logprobs and end of each request
CONFIG = """
[mesh]
name = "ranks"
run_dir = "{run_dir}"
model = "{model}"
[gateway]
port = 0
[scheduler]
max_rows = 10
step_tokens = 512
audit = true
[executor]
ranks = {ranks}
[supervisor]
backoff_s = 0.1
"""


class Client(WireClient):
    """Does something once, when so many tokens have come."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh.config.scheduler_address(0))
        self.later: tuple[int, Callable[[], object]] | None = None
        self.num_tokens = 0

    def _take_row(self, row: m.TokenRow) -> m.AckRow:
        self.num_tokens += len(row.ids) // 4
        if self.later is not None and self.num_tokens >= self.later[0]:
            (_, act), self.later = self.later, None
            act()
        return super()._take_row(row)

    def bits(self, requests: list[m.Generate]) -> Bits:
        """Ids, logprob bits and end of each request."""
        got = self.run(requests)
        self.settle()
        after = self.wait_stats(lambda s: s.ready and s.running == 0 and s.inflight_tokens == 0)
        unused = [f + c for f, c in zip(after.free_blocks, after.cached_blocks, strict=True)]
        assert unused == list(after.total_blocks), "blocks leaked"
        return [outcome(got[request.rid]) for request in requests]


def outcome(answer: Answer) -> tuple[list[int], bytes, str]:
    assert len(answer.ends) == 1
    end = answer.ends[0]
    assert isinstance(end, m.Finished), end
    return answer.ids, answer.logprobs, end.reason.name


def mixed(marker: int) -> list[m.Generate]:
    """The same requests for every marker, under other ids: all but the marker is drawn alike."""
    rng = random.Random(5)
    shared = [0, *(rng.randrange(20, VOCAB) for _ in range(199))]
    requests: list[m.Generate] = []
    for n in range(NUM_REQUESTS):
        length = rng.choice([3, 63, 64, 65, 127, 128, 129, 250, 600])
        ids = [0, *(rng.randrange(20, VOCAB) for _ in range(length - 1))]
        if n % 4 == 0:
            ids = shared + ids[1:20]
        requests.append(
            m.Generate(
                rid=bytes([marker]) + rng.randbytes(15),
                attempt=1,
                reply_to="tokenizer-test",
                prompt_ids=pack_ids(ids),
                prompt_len=len(ids),
                sampling=m.SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), top_p=0.95),
                seed=n,
                max_tokens=rng.choice([1, 2, 12, 30]),
                stop_ids=pack_ids(rng.sample(range(VOCAB), 20)),
                n_logprobs=rng.choice([0, 0, 3]),
            )
        )
    return requests


def start(folder: Path, ranks: int) -> Mesh:
    path = folder / "mesh.toml"
    path.write_text(CONFIG.format(run_dir=folder / "run", model=MODEL, ranks=ranks))
    return Mesh(path)


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
