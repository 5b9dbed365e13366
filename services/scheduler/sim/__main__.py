"""`python -m services.scheduler.sim --runs 100 --seed 0 --faults 3`: soak the real core.

Each run is a world drawn from its seed (geometry, depth, ranks, workload, faults), audited after
every event and checked against the token oracle and shadow KV. The exit status is 1 if any fails.
"""

import argparse
import json
import sys
from collections import Counter

from .faults import KINDS
from .soak import draw_world


def main() -> int:
    """Run the worlds of consecutive seeds and sum up."""
    parser = argparse.ArgumentParser(prog="python -m services.scheduler.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--faults", type=int, default=2, help="in each run")
    parser.add_argument("--kind", action="append", choices=KINDS, help="of fault; default: any")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    arguments = parser.parse_args()
    kinds = tuple(arguments.kind or KINDS)
    sums = Counter[str](runs=0, failed_runs=0)
    for seed in range(arguments.seed, arguments.seed + arguments.runs):
        world = draw_world(seed, faults=arguments.faults, kinds=kinds)
        try:
            world.run()
            world.verify()
        except AssertionError as error:
            sums["failed_runs"] += 1
            print(f"seed {seed}: {error}", file=sys.stderr)
        sums["runs"] += 1
        sums["requests"] += len(world.requests)
        sums["preemptions"] += world.num_preemptions
        sums["steps"] += world.core.stats().steps
        sums["external_writes"] += world.writer.num_writes
        sums["rejected_drafts"] += sum(e.device.rejected_drafts for e in world.executors)
        sums["attaches"] += sum(t.num_attached for t in world.tokenizers)
        sums["cached_tokens"] += world.num_cached_tokens
        if sys.stderr.isatty():
            done = seed - arguments.seed + 1
            print(f"\r{done}/{arguments.runs}", end="", file=sys.stderr, flush=True)
    if arguments.json:
        print(json.dumps(sums))
    else:
        print(*(f"{name}: {value}" for name, value in sums.items()), sep="\n")
    return 1 if sums["failed_runs"] else 0


if __name__ == "__main__":
    sys.exit(main())
