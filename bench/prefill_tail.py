"""What leaving out the upper layers in a prompt saves, and what bounded replay costs in logits.

`deepmesh bench prefill_tail --json`. One prompt from position 0 on the CPU in chunks, as a
scheduler would send it: with every layer everywhere ("full"), with those positions left out that
nothing depends on ("exact", the default: the same bits), and with the last window alone in the
upper layers ("bounded", lossy). They take turns; times are CPU time of the one thread. Errors are
of the logits behind the prompt and behind each token of a continuation that is the same for all:
the largest difference, its share of the logits' standard deviation, and KL(full || this) in nats.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bench.checkpoints import add_options, open_checkpoint
from bench.offline import random_rows
from bench.tables import bar, show
from deepmesh.report import ROOT, Json, publish, report
from services.executor.batch import BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.prefill_tail import bounded_halo, exact_halo
from services.executor.weights import load_model

TAILS = ("full", "exact", "bounded")
COLUMNS = ("preset", "tokens", "tail", "run_upper=upper layers", "prefill_cpu_ms=CPU ms", "saved")
COLUMNS += ("max_error", "error_over_std", "kl_mean", "greedy_mismatches")


@dataclass
class Case:
    """One prompt with one kind of tail."""

    tokens: int
    tail: str
    first: int  # position from which on the upper layers run
    samples: list[float] = field(default_factory=list[float])  # seconds, by run
    logits: Tensor | None = None  # [continuation, vocab]


class Prompt:
    """One request over blocks of its own."""

    def __init__(self, model: DeepseekV41, ids: list[int], packed: bool) -> None:
        self._model, self._ids = model, ids
        num = -(-len(ids) // BLOCK_TOKENS)
        self._blocks = range(num)
        self._cache = KvCache(model.config, num, num, 1, packed=packed)

    def run(self, start: int, end: int, tail: int) -> Tensor:
        """Logits behind position end - 1; positions below `tail` leave out the upper layers."""
        skip = max(0, min(tail, end) - start)
        row = BatchRow(
            ids=self._ids[start:end],
            start=start,
            global_blocks=self._blocks,
            window_blocks=self._blocks,
            state_block=0,
            context=self._ids[max(0, start - 3) : start],
            num_logits=int(skip < end - start),
            skip=skip,
            window_from=tail if start < tail + self._model.config.sliding_window else 0,
        )
        batch = StepBatch.build([row], self._model.config.context_ids)
        return self._model.forward(batch, self._cache).logits


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="deepmesh bench prefill_tail")
    add_options(parser)
    parser.set_defaults(preset="tiny")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--continuation", type=int, default=32, help="tokens behind the prompt")
    parser.add_argument("--numerics", choices=["exact", "fp32", "bf16"], default="bf16")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(arguments)
    torch.set_num_threads(1)
    model = load_model(checkpoint.folder, arguments.numerics)
    if not exact_halo(model.config):
        print("this model's upper layers leave more behind than window rows", file=sys.stderr)
        return 2
    most = max(arguments.tokens) + arguments.continuation
    ids = text_ids(checkpoint.folder, most, model.config.vocab_size)
    cases = [
        Case(tokens, tail, _first(model, tokens, tail))
        for tokens in arguments.tokens
        for tail in TAILS
    ]
    measure(model, ids, cases, arguments)
    found = [figures(case, cases, checkpoint.name) for case in cases]
    show("Upper layers of a prompt", COLUMNS, found)
    ok = all(case["tail"] != "exact" or case["max_error"] == 0.0 for case in found)
    config: dict[str, Json] = {
        "chunk": arguments.chunk,
        "runs": arguments.runs,
        "continuation": arguments.continuation,
        "numerics": arguments.numerics,
        "layers": model.config.num_hidden_layers,
        "upper_layers": model.config.num_hidden_layers - model.config.candidate_source_layer_id,
        "window": model.config.sliding_window,
        "exact_halo": exact_halo(model.config),
    }
    made = report("bench prefill_tail", config=config, cases=found, ok=ok)
    publish(made, name="prefill_tail", as_json=arguments.json)
    return 0


def measure(
    model: DeepseekV41, ids: list[int], cases: list[Case], arguments: argparse.Namespace
) -> None:
    """All runs, taking turns; the first warms up, and its logits are looked at."""
    with bar() as progress:
        task = progress.add_task("prefill", total=len(cases) * (arguments.runs + 1))
        for run in range(arguments.runs + 1):
            for case in cases:
                progress.update(task, description=f"{case.tokens} tokens, {case.tail}")
                end = case.tokens + arguments.continuation
                prompt = Prompt(model, ids[:end], arguments.numerics != "exact")
                cuts = [*range(0, case.tokens, arguments.chunk), case.tokens]
                began = time.thread_time()
                logits = torch.empty(0)
                for start, stop in pairwise(cuts):
                    logits = prompt.run(start, stop, case.first)
                took = time.thread_time() - began
                if run:
                    case.samples.append(took)
                else:
                    behind = [prompt.run(at, at + 1, 0) for at in range(case.tokens, end)]
                    case.logits = torch.cat((logits, *behind))
                progress.advance(task)


def figures(case: Case, cases: list[Case], preset: str) -> dict[str, Json]:
    """Of one case, beside the full one of the same length."""
    full = next(c for c in cases if c.tokens == case.tokens and c.tail == "full")
    took, whole = statistics.median(case.samples), statistics.median(full.samples)
    assert case.logits is not None
    assert full.logits is not None
    error = (case.logits - full.logits).abs().max().item()
    wanted, ours = full.logits.log_softmax(1), case.logits.log_softmax(1)
    kl = (wanted.exp() * (wanted - ours)).sum(1).mean().item()
    return {
        "device": "cpu",
        "preset": preset,
        "tokens": case.tokens,
        "tail": case.tail,
        "run_upper": case.tokens - case.first,
        "prefill_cpu_ms": round(1e3 * took, 2),
        "saved": round(1 - took / whole, 4),
        "max_error": error,
        "error_over_std": error / full.logits.std().item(),
        "kl_mean": max(0.0, kl),
        "greedy_mismatches": int((wanted.argmax(1) != ours.argmax(1)).sum()),
        "positions": case.logits.shape[0],
        "samples_ms": [round(1e3 * sample, 2) for sample in case.samples],
    }


def text_ids(folder: Path, count: int, vocab_size: int) -> list[int]:
    """Ids of this project's documentation, or random ones where there is no tokenizer."""
    file = folder / "tokenizer.json"
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    if not file.exists():
        return random_rows(1, 0, count, vocab_size)[0].tolist()
    ids = Tokenizer.from_file(str(file)).encode(text).ids
    if len(ids) < count or max(ids) >= vocab_size:
        return random_rows(1, 0, count, vocab_size)[0].tolist()
    return ids[:count]


def _first(model: DeepseekV41, tokens: int, tail: str) -> int:
    if tail == "full":
        return 0
    halo = exact_halo(model.config) if tail == "exact" else bounded_halo(model.config)
    return max(0, tokens - halo) // BLOCK_TOKENS * BLOCK_TOKENS


if __name__ == "__main__":
    sys.exit(main())
