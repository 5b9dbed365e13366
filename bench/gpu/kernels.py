"""How near the kernels of a GPU come to what memory and tensor cores allow, and how peers do.

`deepmesh bench kernels --device cuda --json`. Shapes of V4.1-Flash. Each timing replays a CUDA
graph over several sets of inputs. The floor is the larger of two times: bytes over the rate of a
read-only sum, products over the rate of a large bfloat16 product, both of this run; experts count
if they are really touched. Peers run in processes of their own, on the same routings.
"""

import argparse
import sys
import traceback
from collections.abc import Callable, Iterator

import torch

from bench.gpu import cases_attention, cases_experts, cases_linear, cases_sampling
from bench.gpu.peer_runs import PeerRuns
from bench.gpu.peers.job import Answer, Job
from bench.gpu.timing import Rates, empty_us, speed_up
from bench.tables import show
from deepmesh.report import Json, report

COLUMNS = ("op", "shape", "ours_us", "floor_us", "share_of_floor", "gbps", "tflops")
COLUMNS += ("ratio_to_best_peer=to best peer",)
KEYS = 8192  # of each row of a decode step
Cases = Iterator[dict[str, Json]]


def families(rates: Rates, arguments: argparse.Namespace) -> dict[str, Callable[[], Cases]]:
    """Cases by what `--op` names."""
    batches, tokens, variants = arguments.batch, arguments.tokens, arguments.variants
    keys = [(batch, KEYS) for batch in batches] + [(1, 131_072), (16, 32_768)]
    return {
        "experts": lambda: cases_experts.decode_cases(rates, batches),
        "experts_prefill": lambda: cases_experts.prefill_cases(rates, tokens),
        "linear": lambda: cases_linear.decode_cases(rates, batches),
        "linear_prefill": lambda: cases_linear.prefill_cases(rates, tokens),
        "attention": lambda: cases_attention.attention_cases(rates, batches, variants=variants),
        "attention_prefill": lambda: cases_attention.attention_cases(
            rates, [tokens], variants=False, with_peer=False
        ),
        "index": lambda: cases_attention.index_cases(rates, keys),
        "seam": lambda: cases_attention.seam_cases(rates, batches, variants=variants),
        "seam_prefill": lambda: cases_attention.seam_cases(rates, [tokens], variants=False),
        "small": lambda: cases_attention.small_cases(rates, batches),
        "sample": lambda: cases_sampling.sample_cases(rates, batches),
    }


def collect(name: str, family: Callable[[], Cases]) -> list[dict[str, Json]]:
    """Its cases; one that fails keeps those before it, and is itself an entry with the error."""
    found: list[dict[str, Json]] = []
    try:
        for case in family():
            print(case, file=sys.stderr, flush=True)
            found.append(case)
    except Exception as error:  # the others are still worth measuring
        traceback.print_exc()
        found.append({"device": "cuda", "op": name, "shape": "", "error": repr(error)})
    torch.cuda.empty_cache()
    return found


def jobs(batches: list[int]) -> dict[str, tuple[Job, str, str]]:
    """What peers are asked, by family: the job, our operation, and the shape of its cases."""
    attention = {"heads": 64, "dim": 512, "window": 128, "top_k": 512}
    index = {"heads": 32, "dim": 128, "keys": KEYS}
    shape, zipfs = dict(cases_experts.SHAPE), list(cases_experts.ZIPFS)
    experts = Job("experts", batches, shape, zipfs)
    return {
        "experts": (experts, "experts_decode", "B={batch} zipf={zipf:g}"),
        "attention": (Job("attention", batches, attention), "sparse_decode", "B={batch}"),
        "index": (Job("index", batches, index), "index_scores", f"B={{batch}} keys={KEYS}"),
    }


def add_peers(cases: list[dict[str, Json]], answers: list[Answer], op: str, shape: str) -> None:
    """Put times of peers beside ours of the same batch and routing."""
    for answer in answers:
        wanted = shape.format(batch=answer.batch, zipf=answer.zipf)
        for case in cases:
            if case["shape"] == wanted and case["op"] == op:
                peers, errors = case["peers"], case.setdefault("peer_errors", {})
                assert isinstance(peers, dict)
                assert isinstance(errors, dict)
                peers[answer.name] = round(answer.us, 2)
                errors[answer.name] = answer.error


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole benchmark; arguments of `bench kernels`."""
    rates = Rates()
    known = families(rates, arguments)
    wanted = arguments.op or list(known)
    if unknown := set(wanted) - set(known):
        raise SystemExit(f"--op: no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    found: list[dict[str, Json]] = []
    for name in wanted:
        found += collect(name, known[name])
    peers = PeerRuns(arguments.peer, arguments.peer_seconds)
    for name, (job, op, shape) in jobs(arguments.batch).items():
        if name in wanted:
            add_peers(found, peers.ask(job), op, shape)
    for case in found:
        if "peers" in case:
            speed_up(case)
    config: dict[str, Json] = {
        "preset": "v41-flash",
        "numerics": "bf16",
        "empty_node_us": round(empty_us(), 2),
        "peers": peers.state,
        **rates.config(),
    }
    show("kernels on the GPU", COLUMNS, found)
    ok = peers.all_ran and not any("error" in case for case in found)
    name = torch.cuda.get_device_name()
    return report("bench kernels", config=config, cases=found, ok=ok, gpu=name)
