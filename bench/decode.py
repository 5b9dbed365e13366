"""How near a decode step on the CPU comes to what memory allows, and what other programs take.

`deepmesh bench decode --json`. A step is one token of every row through the executor's engine,
logits and greedy choice included. Its floor is what it must read (weights of the experts that its
router really chose, as the checkpoint stores them; KV rows really attended to, in their packed
formats) at the rate of a read-only sum over 512 MiB, measured in the same run with as many threads.
All rows begin with the same context and go on with ids of their own, the same for every peer.
Batches, numbers of threads and peers take turns.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, field

from bench.accounting import kv_bytes, mean_experts, weight_bytes
from bench.checkpoints import Checkpoint, add_options, open_checkpoint
from bench.floor import Memory, Peace, seconds
from bench.gpu.options import decode_options, wants_gpu
from bench.gpu.options import main as gpu_main
from bench.offline import Offline, random_rows, use_threads
from bench.peers.link import Peer
from bench.peers.running import Turns, attempt, peer_figures, started
from bench.peers.running import add_options as add_peer_options
from bench.tables import bar, show
from deepmesh.report import Json, publish, report

COLUMNS = ("preset", "batch", "context", "threads", "step_ms", "floor_ms", "share_of_floor")
COLUMNS += ("ours_tokens_per_s=tokens/s", "experts_touched=experts", "read_gbps=GB/s")
COLUMNS += ("ratio_to_best_peer=to best peer",)


@dataclass
class Case:
    """Rows at a context, and what was measured of them by number of threads."""

    batch: int
    context: int
    samples: dict[int, list[float]] = field(default_factory=dict)  # seconds of a step, by run
    bytes_read: list[tuple[int, int]] = field(default_factory=list)  # weights, KV; by step
    experts: list[float] = field(default_factory=list)  # of a layer, mean; by run
    turns: dict[str, Turns] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For peers and for the bar."""
        return f"{self.batch} rows at {self.context}"


@dataclass
class Rates:
    """Bytes a second of this machine, by run."""

    read: dict[int, list[float]] = field(default_factory=dict)
    copy: dict[int, list[float]] = field(default_factory=dict)

    def take(self, memory: Memory, threads: int) -> None:
        """Measure once more."""
        self.read.setdefault(threads, []).append(memory.read_rate())
        self.copy.setdefault(threads, []).append(memory.copy_rate())


def measure(
    offline: Offline, cases: list[Case], peers: dict[str, Peer], arguments: argparse.Namespace
) -> Rates:
    """Contexts one after another; of each, every run visits all batches, threads and peers."""
    memory, rates = Memory(), Rates()
    with bar() as progress:
        task = progress.add_task("decode", total=len(cases) * (arguments.runs + 1))
        for context in arguments.context:
            own = [case for case in cases if case.context == context]
            length = context + (arguments.runs + 1) * arguments.steps + 1
            ids = random_rows(max(arguments.batch), context, length, offline.config.vocab_size)
            use_threads(max(arguments.threads))
            offline.begin(ids, context, chunk=arguments.chunk)
            for case in own:
                _begin(case, peers, ids[: case.batch, :context].tolist(), arguments)
            for run in range(arguments.runs + 1):  # the first warms up
                first = context + run * arguments.steps
                positions = range(first, first + arguments.steps)
                for threads in arguments.threads:
                    use_threads(threads)
                    rates.take(memory, threads)
                    for case in own:
                        took = seconds(lambda c=case, at=positions: _steps(offline, c.batch, at))
                        if run:
                            case.samples.setdefault(threads, []).append(took / arguments.steps)
                for case in own:
                    progress.update(task, description=case.name)
                    if run:
                        _account(offline, case, positions)
                    for name in list(case.turns):
                        _take_turn(case, peers[name], ids[: case.batch, positions].tolist())
                    progress.advance(task)
            for case in own:
                for name in case.turns:
                    attempt(peers[name], lambda n=name, c=case: peers[n].end(c.name))
    return rates


def _begin(
    case: Case, peers: dict[str, Peer], contexts: list[list[int]], arguments: argparse.Namespace
) -> None:
    """Peers that can hold the case's rows take part in it."""
    for name, peer in peers.items() if case.batch <= arguments.peer_batch else ():
        if attempt(peer, lambda peer=peer: peer.begin(case.name, contexts)):
            case.turns[name] = Turns(arguments.peer_seconds)


def _take_turn(case: Case, peer: Peer, ids: list[list[int]]) -> None:
    """The same tokens as ours, step by step; a peer that fails is out."""
    turns = case.turns[peer.name]
    for step in zip(*ids, strict=True):
        if not attempt(peer, lambda step=step: turns.take(lambda: peer.step(case.name, step))):
            del case.turns[peer.name]
            return


def _steps(offline: Offline, batch: int, positions: range) -> None:
    for position in positions:
        offline.decode(batch, position)


def _account(offline: Offline, case: Case, positions: range) -> None:
    """What the steps just timed had to read."""
    touched = [offline.touched(case.batch, position) for position in positions]
    config = offline.config
    case.bytes_read += [(weight_bytes(config, step), kv_bytes(config, step)) for step in touched]
    case.experts.append(mean_experts(touched))


def figures(
    checkpoint: Checkpoint, case: Case, threads: int, rates: Rates, *, with_peers: bool
) -> dict[str, Json]:
    """Medians of one case at one number of threads."""
    step_s = statistics.median(case.samples[threads])
    weights, kv = (round(statistics.mean(column)) for column in zip(*case.bytes_read, strict=True))
    read = statistics.median(rates.read[threads])
    floor_s, ours = (weights + kv) / read, case.batch / step_s
    turns = case.turns if with_peers else {}
    peers = {n: case.batch / t.median_s if t.median_s else None for n, t in turns.items()}
    return {
        "device": "cpu",
        "preset": checkpoint.name,
        "layers": checkpoint.config.num_hidden_layers,
        "batch": case.batch,
        "context": case.context,
        "threads": threads,
        "ours_tokens_per_s": round(ours, 2),
        "step_ms": round(1e3 * step_s, 4),
        "floor_ms": round(1e3 * floor_s, 4),
        "share_of_floor": round(floor_s / step_s, 4),
        "bytes_read": weights + kv,
        "kv_bytes": kv,
        "experts_touched": round(statistics.mean(case.experts), 2),
        "read_gbps": round(read / 1e9, 2),
        "copy_gbps": round(statistics.median(rates.copy[threads]) / 1e9, 2),
        **peer_figures(peers, ours),
        "samples_ms": [round(1e3 * s, 4) for s in case.samples[threads]],
        "peer_samples_ms": {n: [round(1e3 * s, 2) for s in t.samples] for n, t in turns.items()},
    }


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark."""
    checkpoint = open_checkpoint(arguments)
    most, limit = max(arguments.threads), checkpoint.config.max_model_len
    length = max(arguments.context) + (arguments.runs + 1) * arguments.steps + 1
    if length >= limit:
        raise SystemExit(f"contexts and steps need {length} positions, the model has {limit}")
    with bar() as progress:
        task = progress.add_task(f"loading {checkpoint.name}", total=None)
        offline = Offline(
            checkpoint.folder,
            rows=max(arguments.batch),
            max_len=length,
            on_progress=lambda stage, done, total: progress.update(
                task, description=f"loading {checkpoint.name}: {stage}", completed=done, total=total
            ),
        )
    cases = [Case(batch, context) for context in arguments.context for batch in arguments.batch]
    with started(arguments.peer, checkpoint, arguments, most) as peers:
        peace = Peace({name: peer.pid for name, peer in peers.items()})
        rates = measure(offline, cases, peers, arguments)
        quiet = peace.end()
        remarks = {name: peer.remark for name, peer in peers.items()}
    offline.close()
    found = [
        figures(checkpoint, case, threads, rates, with_peers=threads == most)
        for case in cases
        for threads in arguments.threads
    ]
    asked = [case for case in cases if case.batch <= arguments.peer_batch]
    ok = all(
        name in case.turns and case.turns[name].samples for case in asked for name in arguments.peer
    )
    config: dict[str, Json] = {
        "model": checkpoint.name,
        "numerics": "bf16",
        "invariant": True,
        "runs": arguments.runs,
        "steps": arguments.steps,
        "peers": remarks,
        "peer_batch": arguments.peer_batch,
        "peer_seconds": arguments.peer_seconds,
        **{key: value for key, value in quiet.items() if key != "valid"},
    }
    show("decode on the CPU", [*COLUMNS, *(f"peers.{name}" for name in arguments.peer)], found)
    whole = report("bench decode", config=config, cases=found, ok=ok)
    return whole | {"valid": quiet["valid"]}


def main() -> int:
    """Command line; with `--device cuda` that of bench/gpu/decode.py."""
    if wants_gpu(sys.argv[1:]):
        from bench.gpu import decode as gpu

        return gpu_main("decode", gpu.__doc__, gpu.run, decode_options)
    parser = argparse.ArgumentParser(prog="deepmesh bench decode", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser)
    add_peer_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, nargs="+", default=[512])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=5, help="of each case, and one to warm up")
    parser.add_argument("--steps", type=int, default=8, help="of a run")
    parser.add_argument(
        "--numerics",
        choices=("invariant", "fast"),
        default="invariant",
        help="invariant: a row's bits depend on that row alone; there is no other path on the CPU",
    )
    parser.add_argument("--chunk", type=int, default=512, help="of the prefill before; 0: whole")
    parser.add_argument("--peer-batch", type=int, default=1, help="largest batch for peers")
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.numerics == "fast":
        parser.error(
            "--numerics fast: there is one path on the CPU, and it is invariant "
            "(docs/determinism.md)"
        )
    publish(run(arguments), name="decode", as_json=arguments.json, store=not arguments.no_store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
