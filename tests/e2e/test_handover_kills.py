"""Processes of a prefill group and a decode group are killed under load: the same bits, no leak."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from deepmesh.health import ready_path
from deepmesh.supervisor import Mesh
from deepmesh.wire import messages as m
from tests.e2e.rank_mesh import Bits, outcome
from tests.e2e.test_handover import PREFILLER, asked, client_of, run, settled, settled_at, start

VICTIMS = ("executor-0-0", "scheduler-0", "executor-1-0")
KILLS = 12


class Killer(threading.Thread):
    """Kills one of the victims after the other, each once all of them work again."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        super().__init__(daemon=True)
        self.killed: list[str] = []
        self.is_over = threading.Event()
        self._mesh, self._draw = mesh, random.Random(seed)

    def run(self) -> None:
        while not self.is_over.wait(self._draw.uniform(0.2, 1.5)):
            name = self._draw.choice(VICTIMS)
            pid = self._mesh.kill(name)
            self.killed.append(name)
            self._mesh.wait_restarted(name, pid)
            ready = [ready_path(self._mesh.run_dir, victim) for victim in VICTIMS]
            while not all(path.exists() for path in ready) and not self.is_over.wait(0.05):
                pass
            if len(self.killed) >= KILLS:
                return


def _prefill_back(mesh: Mesh, killer: Killer) -> None:
    """From here on prompts are handed over."""
    killer.join(60)
    settled_at(mesh, 0)


@pytest.mark.long
@pytest.mark.timeout(420)
def test_kills_of_either_side_change_no_token_and_leak_nothing(tmp_path: Path) -> None:
    with start(tmp_path) as mesh:
        settled_at(mesh, 0)
        with client_of(mesh, 1) as client:
            alone = run(client, asked(0, "")).bits
            killer = Killer(mesh, seed=1)
            killer.start()
            rounds: list[Bits] = []
            until = time.monotonic() + 300
            while killer.is_alive() and time.monotonic() < until:
                client.tell(m.FlushCache())  # or the prompts of the last round are here
                requests = asked(1 + len(rounds), PREFILLER)
                got = client.run(requests)
                rounds.append([outcome(got[request.rid]) for request in requests])
            killer.is_over.set()
            with ThreadPoolExecutor(1) as pool:
                back = pool.submit(_prefill_back, mesh, killer)
                while not back.done():
                    client.settle(0.1)  # unheard for long, a client loses its link
                back.result()
            client.tell(m.FlushCache())
            amid = settled(client).handovers
            rounds.append(run(client, asked(200, PREFILLER)).bits)
            seen = settled(client).handovers
            print(f"{len(killer.killed)} kills, {len(rounds)} rounds, {seen}")
            assert len(killer.killed) >= KILLS
            assert set(killer.killed) == set(VICTIMS)
            assert all(bits == alone for bits in rounds)
            assert amid.loaded >= 5, "none while processes died"
            assert amid.failed >= 1
            assert seen.loaded >= amid.loaded + 5
        assert settled_at(mesh, 0).quarantined_blocks == 0
