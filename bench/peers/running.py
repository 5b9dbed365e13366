"""The peers that a benchmark was asked for: started, given turns within a budget, and ended."""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.checkpoints import Checkpoint
from bench.peers.convert import converted
from bench.peers.link import Peer
from bench.peers.venvs import RECIPES, PeerError, python_of, recipe
from bench.tables import CONSOLE, bar
from deepmesh.report import Json


def add_options(parser: argparse.ArgumentParser) -> None:
    """--peer and --peer-seconds."""
    parser.add_argument(
        "--peer", action="append", default=[], choices=sorted(RECIPES), help="may be repeated"
    )
    parser.add_argument(
        "--peer-seconds", type=float, default=60.0, help="that a peer may take for a case"
    )


@dataclass
class Turns:
    """What one peer took for the runs of one case; the first warms up and costs no budget."""

    budget_s: float
    samples: list[float] = field(default_factory=list)
    spent_s: float = 0.0

    def take(self, run: Callable[[], float]) -> None:
        """One run, if there is time for another as long as the last; the first two always run."""
        if len(self.samples) > 1 and self.spent_s + self.samples[-1] > self.budget_s:
            return
        took = run()
        self.spent_s += took if self.samples else 0.0
        self.samples.append(took)

    @property
    def median_s(self) -> float | None:
        """Of its runs; the first only if there is no other. None: it did not run."""
        if not self.samples:
            return None
        return statistics.median(self.samples[1:] or self.samples)


@contextmanager
def started(
    names: Sequence[str], checkpoint: Checkpoint, arguments: argparse.Namespace, threads: int
) -> Iterator[dict[str, Peer]]:
    """The peers that work; what is wrong with the others is said on stderr."""
    peers: dict[str, Peer] = {}
    try:
        for name in names:
            try:
                python = python_of(name, arguments.cache)
                folder = checkpoint.folder
                if recipe(name).converted:
                    target = arguments.cache / "converted" / checkpoint.name
                    with bar() as progress:
                        task = progress.add_task(f"converting for {name}", total=None)
                        folder = converted(
                            folder,
                            checkpoint.config,
                            target,
                            lambda done, total, p=progress, t=task: p.update(
                                t, completed=done, total=total
                            ),
                        )
                CONSOLE.print(f"peer {name}: loading", style="dim")
                peers[name] = Peer(name, python, folder, threads)
            except PeerError as error:
                CONSOLE.print(f"[red]peer {name} does not run:[/red] {error}", markup=True)
        yield peers
    finally:
        for peer in peers.values():
            peer.close()


def attempt(peer: Peer, run: Callable[[], None]) -> bool:
    """Whether it worked; an error of the peer is printed, not raised."""
    try:
        run()
    except PeerError as error:
        CONSOLE.print(f"{peer.name}: {error}", style="red", markup=False)
        return False
    return True


def peer_figures(rates: dict[str, float | None], ours: float) -> dict[str, Json]:
    """`peers` and `ratio_to_best_peer` of a case, from tokens a second."""
    ran = {name: round(rate, 3) for name, rate in rates.items() if rate is not None}
    best = max(ran.values(), default=0.0)
    return {"peers": dict(ran), "ratio_to_best_peer": round(ours / best, 3) if best else None}
