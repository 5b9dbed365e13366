"""Command lines of the benchmarks with `--device`: what a GPU is asked for differs from a CPU."""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from bench.gpu.peer_runs import PEERS
from deepmesh.report import Json, publish

Run = Callable[[argparse.Namespace], dict[str, Json]]


def wants_gpu(arguments: Sequence[str]) -> bool:
    """Whether `--device cuda` is among them."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--device", default="cpu")
    return parser.parse_known_args(arguments)[0].device == "cuda"


def main(command: str, doc: str | None, run: Run, options: Callable[..., None]) -> int:
    """One benchmark of a GPU; 1 without one.

    Args:
        options: adds what this command takes to its parser.
    """
    parser = argparse.ArgumentParser(prog=f"deepmesh bench {command}", description=doc)
    parser.add_argument("--device", choices=("cuda",), required=True)
    options(parser)
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device is here: use --device cpu", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    found = run(arguments)
    publish(found, name=command, as_json=arguments.json, store=not arguments.no_store)
    return 0


def slice_options(parser: argparse.ArgumentParser) -> None:
    """--preset, --layers, --zipf."""
    parser.add_argument("--preset", default="v41-flash", help="shapes")
    parser.add_argument("--layers", type=int, default=8, help="of the slice")
    parser.add_argument(
        "--zipf", type=float, nargs="+", default=[0.0, 1.0], help="exponents of expert popularity"
    )


def ranks_options(parser: argparse.ArgumentParser) -> None:
    """--ranks, --limit."""
    parser.add_argument(
        "--ranks",
        type=int,
        default=1,
        help="more than one: the slice on one GPU and on a group of so many, in one run",
    )
    parser.add_argument("--limit", type=float, default=400.0, help="seconds, of a group's run")


def decode_options(parser: argparse.ArgumentParser) -> None:
    """Of `bench decode`."""
    slice_options(parser)
    ranks_options(parser)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--context", type=int, nargs=1, default=[8192])


def prefill_options(parser: argparse.ArgumentParser) -> None:
    """Of `bench prefill`."""
    slice_options(parser)
    ranks_options(parser)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])


def kernel_options(parser: argparse.ArgumentParser) -> None:
    """Of `bench kernels`."""
    parser.add_argument("--op", nargs="+", help="only these families; default: all")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=8192, help="of a prompt")
    parser.add_argument("--variants", action="store_true", help="every division into blocks")
    parser.add_argument("--peer", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--peer-seconds", type=float, default=60.0, help="for each peer")
