"""What caches and routing do for agents: sessions of many turns, each with all that came before.

A made-up trace (see `agentic_trace.py`) is played through whole meshes on this machine. A session
asks its next turn once its last one is answered and all other sessions had theirs, a few at a time.
Answers are forced to the trace's tokens, so every setup is asked the same. `hit_rate` is the share
of prompt tokens that were not computed, `ideal_hit_rate` what a cache that forgets nothing would
have on the engine's grid; `busiest_over_mean` compares the CPU time of the executors. `skewed` has
single requests, most of which begin alike.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import uvloop
from msgspec.structs import replace
from tokenizers import Tokenizer

from bench.agentic_play import play
from bench.agentic_trace import Shape, Turn, ideal_hits, make_skewed, make_trace
from bench.load.cpu import CpuMeter
from bench.load.figures import percentile
from bench.load.pinned import MODEL, running
from deepmesh.config import (
    Config,
    ExecutorConfig,
    GatewayConfig,
    KvstoreConfig,
    LinksConfig,
    MeshConfig,
    RouterConfig,
    SchedulerConfig,
)
from deepmesh.report import MAX_STEAL, Json, Steal, publish, report

GRID = 128  # tokens between two points of a prefix at which the engine can resume
WORDS = (" the", " of", " and", " to", " in", " that", " for", " it")  # what agents answer
DISK_MEMORY = 2 << 20  # bytes of the kvstore's memory where its disk is to be used
METRICS_S = 2.5  # until the last heartbeats have reached the gateway
HIT_SAMPLES = r"^deepmesh_prefix_hit_tokens_total\{(.*)\} (\S+)$"
LATER_SHARE = 5.0  # times that later turns are to be faster than without a cache
HIT_SHARES = {"router": 0.9, **dict.fromkeys(("no cache", "round robin", "skewed", "1P1D"), 0.0)}
HIT_SHARE = 0.95  # of one replica
BALANCE = 1.15
Case = dict[str, Json]


def setups(base: Config, shape: Shape) -> dict[str, Config]:
    """The meshes that are compared. In `memory` and `disk` two full contexts fit on the device, in
    `disk` not much more into the kvstore's memory."""
    small = replace(base.executor, global_blocks=2 * shape.context_tokens // 64)
    store = KvstoreConfig(count=1, memory_bytes=1 << 30)
    disk = replace(store, memory_bytes=DISK_MEMORY, disk_bytes=4 << 30)
    two = replace(base, scheduler=replace(base.scheduler, count=2), router=RouterConfig(count=1))
    turns = RouterConfig(count=1, policy="round-robin")
    roles = replace(two.scheduler, roles=["prefill", "decode"])
    return {
        "no cache": replace(base, scheduler=replace(base.scheduler, prefix_cache=False)),
        "device": base,
        "memory": replace(base, executor=small, kvstore=store),
        "disk": replace(base, executor=small, kvstore=disk),
        "round robin": replace(two, router=turns),
        "router": two,
        "skewed": two,
        "1P1D": replace(two, scheduler=roles),
    }


def run(setup: str, config: Config, trace: list[list[Turn]], at_once: int) -> Case:
    """One mesh, from cold."""
    with running(config) as mesh:
        executors = {n: pid for n, pid in mesh.pids.items() if n.startswith("executor")}
        meter, start = CpuMeter(executors), time.perf_counter()
        played = uvloop.run(play(mesh.url, config.served_model, trace, at_once))
        seconds, cpu = time.perf_counter() - start, meter.take()
        time.sleep(METRICS_S)
        tiers = hit_tokens_by_tier(mesh.url)
    hits, prompts = ideal_hits(trace, GRID)
    exact, _ = ideal_hits(trace, 1)
    hit_rate = played.cached_tokens / max(1, played.prompt_tokens)
    return {
        "setup": setup,
        "hit_rate": round(hit_rate, 4),
        "ideal_hit_rate": round(hits / prompts, 4),
        "share_of_ideal": round(hit_rate * prompts / hits, 4),
        "ideal_hit_rate_by_token": round(exact / prompts, 4),
        "hit_tokens_by_tier": {tier: tokens for tier, tokens in sorted(tiers.items())},
        "ttft_ms_p50_first": _ms(played.first, 50),
        "ttft_ms_p99_first": _ms(played.first, 99),
        "ttft_ms_p50_later": _ms(played.later, 50),
        "ttft_ms_p99_later": _ms(played.later, 99),
        "tokens_per_s": round(played.output_tokens / seconds, 2),
        "prompt_tokens_per_s": round(played.prompt_tokens / seconds, 1),
        "busiest_over_mean": round(max(cpu.values()) * len(cpu) / sum(cpu.values()), 3),
        "executor_cpu_s": {name: round(used, 2) for name, used in sorted(cpu.items())},
        "seconds": round(seconds, 2),
        "requests": len(played.first) + len(played.later),
        "errors": len(played.errors),
        "error_kinds": [*sorted(set(played.errors))[:5]],
    }


def hit_tokens_by_tier(url: str) -> dict[str, int]:
    """Prompt tokens of all replicas that were cached, by where they were."""
    with urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: Counter[str] = Counter()
    for labels, value in re.findall(HIT_SAMPLES, text, re.MULTILINE):
        tier = re.search('tier="([^"]+)"', labels)
        if tier is not None and float(value):
            found[tier[1]] += round(float(value))
    return dict(found)


def _ms(values: Sequence[float], percent: float) -> float | None:
    found = percentile(values, percent)
    return round(found, 1) if found is not None else None


def judge(cases: list[Case]) -> list[Json]:
    """The limits that were set, where the setups ran that they compare."""
    by_setup = {str(case["setup"]): case for case in cases}
    found: list[Json] = []

    def limit(setup: str, key: str, value: float, bound: float, *, at_most: bool) -> None:
        met = value <= bound if at_most else value >= bound
        side = "at_most" if at_most else "at_least"
        found.append({"setup": setup, "key": key, "value": value, side: bound, "met": met})

    without = by_setup.get("no cache")
    for setup, case in by_setup.items():
        share = HIT_SHARES.get(setup, HIT_SHARE)
        if setup == "skewed":
            limit(
                setup,
                "busiest_over_mean",
                _number(case, "busiest_over_mean"),
                BALANCE,
                at_most=True,
            )
        if share:
            value = _number(case, "share_of_ideal")
            limit(setup, "share_of_ideal", value, share, at_most=False)
        if without is not None and share:
            ratio = _number(without, "ttft_ms_p50_later") / _number(case, "ttft_ms_p50_later")
            limit(setup, "no_cache_over_later", round(ratio, 2), LATER_SHARE, at_most=False)
    return found


def _number(case: Case, key: str) -> float:
    value = case[key]
    assert isinstance(value, int | float), key
    return float(value)


# ------------------------------------------------------------ command line


def base_config(run_dir: Path, model: Path) -> Config:
    """One replica with the model on one compute thread, and no traces on disk."""
    return Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(model)),
        links=LinksConfig(timeout_s=20.0),
        gateway=GatewayConfig(port=0),
        scheduler=SchedulerConfig(),
        executor=ExecutorConfig(threads=1),
    )


def main() -> int:
    """0 unless a setup could not run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setups", default="", help="comma-separated; empty: all of them")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--sessions", type=int, default=Shape.sessions)
    parser.add_argument("--new-tokens", type=int, default=Shape.new_tokens)
    parser.add_argument("--context-tokens", type=int, default=Shape.context_tokens)
    parser.add_argument("--turn-share", type=float, default=1.0, help="of each session's turns")
    parser.add_argument("--at-once", type=int, default=3, help="requests under way")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    shape = Shape(
        arguments.sessions, arguments.new_tokens, arguments.context_tokens, arguments.turn_share
    )
    ids = output_ids(arguments.model)
    trace = make_trace(shape, arguments.seed, ids)
    skewed = make_skewed(shape, arguments.seed, ids)
    steal = Steal()
    cases: list[Case] = []
    known = list(setups(base_config(Path("/"), arguments.model), shape))
    chosen = [name.strip() for name in arguments.setups.split(",") if name.strip()] or known
    if unknown := set(chosen) - set(known):
        parser.error(f"no such setup: {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    for setup in chosen:
        with tempfile.TemporaryDirectory(prefix="dm-") as folder:
            base = base_config(Path(folder) / "run", arguments.model.resolve())
            config = setups(base, shape)[setup]
            if setup == "skewed":  # other requests, enough at a time that there is a queue
                case = run(setup, config, skewed, 4 * arguments.at_once)
            else:
                case = run(setup, config, trace, arguments.at_once)
        case["valid"] = steal.take() <= MAX_STEAL
        print({key: case[key] for key in _SHOWN}, file=sys.stderr)
        cases.append(case)
    judged = judge(cases)
    for each in judged:
        print(each, file=sys.stderr)
    config_of: dict[str, Json] = {
        "model": arguments.model.name,
        "sessions": shape.sessions,
        "turns": [len(session) for session in trace],
        "new_tokens": shape.new_tokens,
        "context_tokens": shape.context_tokens,
        "input_over_output": round(input_over_output(trace), 1),
        "at_once": arguments.at_once,
        "seed": arguments.seed,
        "load_average": round(os.getloadavg()[0], 2),
        "targets": judged,
    }
    ok = not any(case["errors"] for case in cases)
    found = report("bench agentic", config=config_of, cases=cases, ok=ok)
    publish(found, name="agentic", as_json=arguments.json, store=not arguments.no_store)
    return 0


_SHOWN = (
    *("setup", "hit_rate", "ideal_hit_rate", "share_of_ideal", "ttft_ms_p50_first"),
    *("ttft_ms_p50_later", "ttft_ms_p99_later", "tokens_per_s", "busiest_over_mean", "seconds"),
    *("hit_tokens_by_tier", "requests", "errors", "error_kinds"),
)


def input_over_output(trace: Sequence[Sequence[Turn]]) -> float:
    """Prompt tokens to each output token."""
    turns = [turn for session in trace for turn in session]
    return sum(len(turn.prompt) for turn in turns) / sum(turn.num_output for turn in turns)


def output_ids(model: Path) -> list[int]:
    """Tokens whose text is a plain word, so that each is an event of the stream."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    coded = [tokenizer.encode(word, add_special_tokens=False).ids for word in WORDS]
    return [ids[0] for ids in coded if len(ids) == 1]


if __name__ == "__main__":
    sys.exit(main())
