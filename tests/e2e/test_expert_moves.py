"""Experts change their ranks while requests run and ranks die: the bits are those of one rank."""

from pathlib import Path

import pytest

from deepmesh.supervisor import Mesh
from tests.e2e.rank_mesh import CONFIG, MODEL, Bits, Client, mixed, start

# so often that there is hardly a step without a move on its way
OFTEN = """
experts_interval_s = 0.1
experts_record_steps = 2
experts_window = 8
experts_ridge_rows = 0
"""
KILL_AFTER = 60  # tokens of all requests


def start_moving(folder: Path, ranks: int, device: str = "cpu") -> Mesh:
    text = CONFIG.format(run_dir=folder / "run", model=MODEL, ranks=ranks, device=device)
    text = text.replace("[scheduler]", "[scheduler]" + OFTEN)
    text = text.replace("[executor]", f"[executor]\nredundant_experts = {ranks}")
    path = folder / "mesh.toml"
    path.write_text(text)
    return Mesh(path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    with start(tmp_path_factory.mktemp("r"), 1) as mesh:
        client = Client(mesh)
        client.wait_stats(lambda s: s.ready, 60)
        bits = client.bits(mixed(0))
        client.close()
    return bits


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("ranks", [2, 4])
def test_moves_and_a_rank_that_dies_among_them_change_no_bit(
    tmp_path: Path, expected: Bits, ranks: int
) -> None:
    with start_moving(tmp_path, ranks) as mesh:
        client = Client(mesh)
        client.wait_stats(lambda s: s.ready, 60)
        for marker in (1, 2):
            assert client.bits(mixed(marker)) == expected
        before = client.wait_stats(lambda s: s.experts.placements > 0, 60).experts
        assert before.moves > 0
        assert before.busiest_rows > before.mean_rows > 0
        name = f"executor-0-{ranks - 1}"
        client.later = (client.num_tokens + KILL_AFTER, lambda: mesh.kill(name))
        assert client.bits(mixed(3)) == expected
        assert client.bits(mixed(4)) == expected
        after = client.wait_stats(lambda s: s.experts.placements > before.placements, 60).experts
        assert after.moves > before.moves
        log = (mesh.run_dir / "logs" / f"{name}.log").read_text()
        assert log.count(f"{name} loading /") == 2
        assert "placement" in log.split(f"{name} loading /")[-1], "the new process moves none"
        client.close()
