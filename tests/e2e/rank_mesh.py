"""A mesh whose executors are an EP group, and requests whose bits must not depend on that."""

import json
import random
from collections.abc import Callable
from pathlib import Path

from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from deepmesh.wire.packed import pack_ids
from tests.e2e.wire_client import Answer, WireClient

MODEL = Path(__file__).parents[2] / "models" / "tiny"
VOCAB = json.loads((MODEL / "config.json").read_text())["text_config"]["vocab_size"]
NUM_REQUESTS = 24
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
device = "{device}"
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


def start(folder: Path, ranks: int, device: str = "cpu") -> Mesh:
    folder.mkdir(exist_ok=True)
    path = folder / "mesh.toml"
    text = CONFIG.format(run_dir=folder / "run", model=MODEL, ranks=ranks, device=device)
    path.write_text(text)
    return Mesh(path)
