"""A long prompt that an EP group computes together: the bits of one rank, whatever fails."""

import random
from pathlib import Path

import pytest

from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from deepmesh.wire.packed import pack_ids
from tests.e2e.rank_mesh import CONFIG, MODEL, VOCAB, Bits, Client

LENGTHS = (900, 1300, 515, 1024)


def mesh_of(folder: Path, ranks: int, least: int) -> Mesh:
    path = folder / "mesh.toml"
    text = CONFIG.format(run_dir=folder / "run", model=MODEL, ranks=ranks, device="cpu")
    path.write_text(
        text.replace("audit = true", f"audit = true\ncontext_parallel_tokens = {least}")
    )
    return Mesh(path)


def long_prompts(marker: int) -> list[m.Generate]:
    """The second begins like the first, the last asks for the log-probabilities of its prompt."""
    rng = random.Random(17)
    first = [0, *(rng.randrange(20, VOCAB) for _ in range(2000))]
    requests: list[m.Generate] = []
    for n, length in enumerate(LENGTHS):
        shared = 640 if n == 1 else 0
        ids = first[:shared] + [rng.randrange(20, VOCAB) for _ in range(length - shared)]
        requests.append(
            m.Generate(
                rid=bytes([marker]) + rng.randbytes(15),
                attempt=1,
                reply_to="tokenizer-test",
                prompt_ids=pack_ids(first[:length] if n == 0 else ids),
                prompt_len=length,
                sampling=m.SamplingParams(temperature=0.7 if n == 2 else 0.0),
                seed=n,
                max_tokens=12,
                n_logprobs=2,
                n_prompt_logprobs=0 if n == 3 else -1,
            )
        )
    return requests


def one_by_one(client: Client, marker: int) -> Bits:
    return [client.bits([request])[0] for request in long_prompts(marker)]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    with mesh_of(tmp_path_factory.mktemp("r"), 1, 0) as mesh:
        client = Client(mesh)
        client.wait_stats(lambda s: s.ready, 60)
        bits = one_by_one(client, 0)
        client.close()
    return bits


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_bits_are_those_of_one_rank_also_when_a_rank_dies(
    ranks: int, tmp_path: Path, expected: Bits
) -> None:
    with mesh_of(tmp_path, ranks, 128) as mesh:
        client = Client(mesh)
        client.wait_stats(lambda s: s.ready, 60)
        assert one_by_one(client, 1) == expected
        # How much is shared depends on how prompts are cut, which is by time. Heartbeats are late.
        client.wait_stats(lambda s: s.shared_prompt_tokens >= 512)
        before = mesh.pids["executor-0-0"]
        both = [long_prompts(2)[0], long_prompts(2)[2]]
        client.later = (client.num_tokens + 3, lambda: mesh.kill("executor-0-0"))
        assert client.bits(both[:1]) == expected[:1]
        mesh.wait_restarted("executor-0-0", before)
        client.wait_stats(lambda s: s.ready, 60)
        assert client.bits(both[1:]) == expected[2:3]
        client.close()
