"""How near the native CPU kernels come to what memory allows, and how torch does.

`deepmesh bench kernels --json`. The floor of a case is the bytes that it must read, weights and KV
in their stored formats, at the rate of a read-only sum measured in the same run with as many
threads. Weights are changed between repetitions where they are large enough to come from memory; a
share above 1 means that they lay in the cache. Ours and peers take turns.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch

from bench.checkpoints import TINY
from bench.floor import Memory, Peace, seconds
from bench.gpu.options import kernel_options, wants_gpu
from bench.gpu.options import main as gpu_main
from bench.kernel_cases import Case, cases
from bench.offline import use_threads
from bench.tables import bar, show
from deepmesh.report import Json, publish, report
from kernels import native
from services.executor.model_config import ModelConfig, load_config, parse_config
from services.executor.presets import PRESETS, preset_config

ROWS = (1, 16, 512)
SLICES = {"v41-flash": 4}  # shapes of a layer need no more layers
BURST_S = 2e-3  # a repetition runs a kernel as often as fits into this
COLUMNS = ("op", "shape", "threads", "ours_us", "floor_us", "share_of_floor", "gbps", "tflops")
COLUMNS += ("peers.torch",)


def shapes(name: str) -> ModelConfig:
    """Configuration whose shapes are measured."""
    if name == "tiny":
        return load_config(TINY)
    raw = preset_config(name, layers=SLICES.get(name))
    raw["text_config"]["engram_compressed_vocab_size"] = 1
    return parse_config(raw)


def measure(case: Case, rate: float, threads: int, runs: int) -> dict[str, Json]:
    """Medians of interleaved repetitions."""
    kernels = {"ours": case.ours} | ({"torch": case.peer} if case.peer else {})
    once = min(seconds(lambda: case.ours(0)) for _ in range(2))
    count = max(1, min(200, int(BURST_S / max(once, 1e-6)))) * case.copies
    samples: dict[str, list[float]] = {name: [] for name in kernels}
    for _ in range(runs):
        for name, kernel in kernels.items():
            took = seconds(lambda kernel=kernel: [kernel(i % case.copies) for i in range(count)])
            samples[name].append(1e6 * took / count)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    ours, floor = medians.pop("ours"), 1e6 * case.read_bytes / rate
    return {
        "device": "cpu",
        "op": case.op,
        "shape": case.shape,
        "threads": threads,
        "ours_us": round(ours, 2),
        "floor_us": round(floor, 2),
        "share_of_floor": round(floor / ours, 4),
        "gbps": round(case.read_bytes / ours / 1e3, 2),
        "tflops": round(case.flops / ours / 1e6, 4),
        "peers": {name: round(value, 2) for name, value in medians.items()},
        "max_error": _error(case),
        "samples_us": [round(value, 2) for value in samples["ours"]],
    }


def _error(case: Case) -> float | None:
    """The greatest difference from the peer, by the greatest value; None without a peer."""
    if case.peer is None:
        return None
    found, wanted = case.ours(0).double(), case.peer(0).double()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp_min(1e-30))


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark."""
    native.use(arguments.level)
    torch.manual_seed(0)
    memory, peace = Memory(), Peace()
    found: list[dict[str, Json]] = []
    rates: dict[str, Json] = {}
    with torch.inference_mode(), bar() as progress:
        task = progress.add_task("kernels", total=None)
        for name in arguments.shapes:
            for case in cases(shapes(name), tuple(arguments.rows)):
                if arguments.op and case.op not in arguments.op:
                    continue
                progress.update(task, description=f"{name}: {case.op} {case.shape}")
                for threads in arguments.threads:
                    use_threads(threads)
                    rate = memory.read_rate()
                    rates.setdefault(str(threads), round(rate / 1e9, 2))
                    one = measure(case, rate, threads, arguments.runs)
                    found.append({"preset": name, **one})
    quiet = peace.end()
    show("kernels on the CPU", COLUMNS, found)
    config: dict[str, Json] = {
        "level": arguments.level or native.supported_levels()[0],
        "runs": arguments.runs,
        "read_gbps_first": rates,
        **{key: value for key, value in quiet.items() if key != "valid"},
    }
    whole = report("bench kernels", config=config, cases=found, ok=bool(found))
    return whole | {"valid": quiet["valid"]}


def main() -> int:
    """Command line; with `--device cuda` that of bench/gpu/kernels.py."""
    if wants_gpu(sys.argv[1:]):
        from bench.gpu import kernels as gpu

        return gpu_main("kernels", gpu.__doc__, gpu.run, kernel_options)
    parser = argparse.ArgumentParser(prog="deepmesh bench kernels", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    names: Sequence[str] = ["tiny", *PRESETS]
    parser.add_argument("--shapes", nargs="+", choices=names, default=["tiny", "v41-medium"])
    parser.add_argument("--op", nargs="+", help="only these kernels")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--level", default="", choices=["", *native.supported_levels()])
    parser.add_argument("--runs", type=int, default=9, help="of each case")
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    publish(run(arguments), name="kernels", as_json=arguments.json, store=not arguments.no_store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
