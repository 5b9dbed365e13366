"""Any rank of a group of four killed at any moment: every stream ends with the same bits."""

import random
import threading
import time

import pytest

from tests.e2e.rank_mesh import Client, mixed, start

RANKS, SEED = 4, 8
SECOND = 0.25  # share of the trials in which another rank dies while the group recovers


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "trials", [pytest.param(5, marks=pytest.mark.long), pytest.param(20, marks=pytest.mark.large)]
)
def test_a_rank_killed_at_any_moment_changes_no_bit(
    trials: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(SEED)
    with start(tmp_path_factory.mktemp("r"), RANKS) as mesh:
        client = Client(mesh)
        client.wait_stats(lambda s: s.ready, 60)
        client.bits(mixed(254))  # kernels are built, caches are as full as they get
        took = float("inf")  # undisturbed, at best
        for marker in (252, 253, 255):
            began = time.monotonic()
            expected = client.bits(mixed(marker))
            took = min(took, time.monotonic() - began)
        amid = 0
        for trial in range(trials):
            victims = [rng.randrange(RANKS)]
            if rng.random() < SECOND:
                victims.append((victims[0] + rng.randrange(1, RANKS)) % RANKS)
            killed: list[tuple[str, int]] = []

            def strike(rank: int, killed: list[tuple[str, int]] = killed) -> None:
                name = f"executor-0-{rank}"
                killed.append((name, mesh.kill(name)))

            delay, timers = 0.0, list[threading.Timer]()
            for rank in victims:
                delay += rng.uniform(0.0, took)
                timers.append(threading.Timer(delay, strike, (rank,)))
            began = time.monotonic()
            for timer in timers:
                timer.start()
            bits = client.bits(mixed(trial))
            amid += bool(killed)
            while any(timer.is_alive() for timer in timers):
                client.settle(0.1)  # unheard for long, a client loses its link
            assert bits == expected, f"seed {SEED}, trial {trial}: ranks {victims}, {delay:.3f} s"
            for name, pid in killed:
                if pid:
                    mesh.wait_restarted(name, pid)
            client.wait_stats(lambda s: s.ready, 60)
        assert amid > trials // 2, "most must strike while something runs"
        assert sum(mesh.restarts.values()) >= trials
        client.close()
