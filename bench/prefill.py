"""How fast a prompt is computed on the CPU: a share of torch's bfloat16 product, and others' time.

`deepmesh bench prefill --json`. One prompt from position 0 through the executor's engine, whole or
in chunks. Its work is 2 x active weights x tokens and the attention over the rows really attended.
The peak is the best rate of torch's bfloat16 product in the same run with as many threads, over the
model's own shapes and a square; `share_of_shapes` compares with the time that torch takes for all
of the model's products. Prompts, numbers of threads and peers take turns.
"""

import argparse
import statistics
import sys
from dataclasses import dataclass, field

from bench.accounting import linear_shapes, prefill_flops
from bench.checkpoints import Checkpoint, add_options, open_checkpoint
from bench.floor import SQUARE, Peace, matmul_seconds, seconds
from bench.gpu.options import main as gpu_main
from bench.gpu.options import prefill_options, wants_gpu
from bench.offline import Offline, random_rows, use_threads
from bench.peers.link import Peer
from bench.peers.running import Turns, attempt, peer_figures, started
from bench.peers.running import add_options as add_peer_options
from bench.tables import bar, show
from deepmesh.report import Json, publish, report
from services.executor.model_config import ModelConfig

COLUMNS = ("preset", "tokens", "threads", "ours_tokens_per_s=tokens/s", "ours_gflops=GFLOP/s")
COLUMNS += ("torch_peak_gflops=torch", "share_of_peak", "share_of_shapes")
COLUMNS += ("ratio_to_best_peer=to best peer",)
MAX_COPIES = 8  # weights of a shape that torch multiplies with in turn


@dataclass
class Case:
    """A prompt, and what was measured of it by number of threads."""

    tokens: int
    samples: dict[int, list[float]] = field(default_factory=dict)  # seconds, by run
    peaks: dict[int, list[float]] = field(default_factory=dict)  # torch, FLOP/s, by run
    products: dict[int, list[float]] = field(default_factory=dict)  # torch, seconds, by run
    turns: dict[str, Turns] = field(default_factory=dict)


def torch_products(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """The best rate of torch, FLOP/s, and its seconds for all products of a prefill."""
    square = 2 * SQUARE**3 / matmul_seconds(SQUARE, SQUARE, SQUARE)
    rates, whole = [square], 0.0
    for rows, inner, outer, count in linear_shapes(config, tokens):
        copies = min(count, MAX_COPIES)
        each = matmul_seconds(rows, inner, outer, count=copies) / copies
        rates.append(2 * rows * inner * outer / each)
        whole += count * each
    return max(rates), whole


def measure(
    offline: Offline, cases: list[Case], peers: dict[str, Peer], arguments: argparse.Namespace
) -> None:
    """All runs, taking turns."""
    most = max(arguments.tokens)
    ids = random_rows(1, 0, most + 1, offline.config.vocab_size)
    offline.begin(ids, 0)
    for case in cases:
        case.turns = {name: Turns(arguments.peer_seconds) for name in peers}
    with bar() as progress:
        task = progress.add_task("prefill", total=len(cases) * (arguments.runs + 1))
        for run in range(arguments.runs + 1):  # the first warms up
            for case in cases:
                progress.update(task, description=f"{case.tokens} tokens")
                for threads in arguments.threads:
                    _prompt(offline, min(case.tokens, 16), 0)  # the engine sets its own number once
                    use_threads(threads)
                    took = seconds(lambda c=case: _prompt(offline, c.tokens, arguments.chunk))
                    peak, products = torch_products(offline.config, case.tokens)
                    if run:
                        case.samples.setdefault(threads, []).append(took)
                        case.peaks.setdefault(threads, []).append(peak)
                        case.products.setdefault(threads, []).append(products)
                for name in list(case.turns):
                    _take_turn(case, peers[name], ids[0, : case.tokens].tolist())
                progress.advance(task)


def _take_turn(case: Case, peer: Peer, prompt: list[int]) -> None:
    """A peer that fails is out."""
    turns = case.turns[peer.name]
    if not attempt(peer, lambda: turns.take(lambda: peer.prefill(prompt))):
        del case.turns[peer.name]


def _prompt(offline: Offline, tokens: int, chunk: int) -> None:
    for start in range(0, tokens, chunk or tokens):
        offline.prefill(start, min(tokens, start + (chunk or tokens)))


def figures(
    checkpoint: Checkpoint, case: Case, threads: int, *, with_peers: bool
) -> dict[str, Json]:
    """Medians of one case at one number of threads."""
    took = statistics.median(case.samples[threads])
    flops = prefill_flops(checkpoint.config, case.tokens)
    peak = statistics.median(case.peaks[threads])
    products = statistics.median(case.products[threads])
    turns = case.turns if with_peers else {}
    peers = {n: case.tokens / t.median_s if t.median_s else None for n, t in turns.items()}
    return {
        "device": "cpu",
        "preset": checkpoint.name,
        "layers": checkpoint.config.num_hidden_layers,
        "tokens": case.tokens,
        "threads": threads,
        "ours_tokens_per_s": round(case.tokens / took, 1),
        "ours_gflops": round(flops / took / 1e9, 2),
        "torch_peak_gflops": round(peak / 1e9, 2),
        "share_of_peak": round(flops / took / peak, 4),
        "share_of_shapes": round(products / took, 4),
        **peer_figures(peers, case.tokens / took),
        "flops": flops,
        "samples_ms": [round(1e3 * s, 2) for s in case.samples[threads]],
        "peer_samples_ms": {n: [round(1e3 * s, 1) for s in t.samples] for n, t in turns.items()},
    }


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark."""
    checkpoint = open_checkpoint(arguments)
    most, length = max(arguments.threads), max(arguments.tokens) + 1
    if length >= checkpoint.config.max_model_len:
        raise SystemExit(f"the model has {checkpoint.config.max_model_len} positions only")
    with bar() as progress:
        task = progress.add_task(f"loading {checkpoint.name}", total=None)
        offline = Offline(
            checkpoint.folder,
            rows=1,
            max_len=length,
            on_progress=lambda stage, done, total: progress.update(
                task, description=f"loading {checkpoint.name}: {stage}", completed=done, total=total
            ),
        )
    cases = [Case(tokens) for tokens in arguments.tokens]
    with started(arguments.peer, checkpoint, arguments, most) as peers:
        peace = Peace({name: peer.pid for name, peer in peers.items()})
        measure(offline, cases, peers, arguments)
        quiet = peace.end()
        remarks = {name: peer.remark for name, peer in peers.items()}
    offline.close()
    found = [
        figures(checkpoint, case, threads, with_peers=threads == most)
        for case in cases
        for threads in arguments.threads
    ]
    ok = all(
        name in case.turns and case.turns[name].samples for case in cases for name in arguments.peer
    )
    config: dict[str, Json] = {
        "model": checkpoint.name,
        "numerics": "bf16",
        "runs": arguments.runs,
        "chunk": arguments.chunk,
        "peers": remarks,
        "peer_seconds": arguments.peer_seconds,
        **{key: value for key, value in quiet.items() if key != "valid"},
    }
    show("prefill on the CPU", [*COLUMNS, *(f"peers.{name}" for name in arguments.peer)], found)
    whole = report("bench prefill", config=config, cases=found, ok=ok)
    return whole | {"valid": quiet["valid"]}


def main() -> int:
    """Command line; with `--device cuda` that of bench/gpu/prefill.py."""
    if wants_gpu(sys.argv[1:]):
        from bench.gpu import prefill as gpu

        return gpu_main("prefill", gpu.__doc__, gpu.run, prefill_options)
    parser = argparse.ArgumentParser(prog="deepmesh bench prefill", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_options(parser)
    add_peer_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512, 2048])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--runs", type=int, default=3, help="of each case, and one to warm up")
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a step; 0: all")
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    publish(run(arguments), name="prefill", as_json=arguments.json, store=not arguments.no_store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
