"""`python -m tests.chaos --seconds 180`: faults at random under streams that must not notice.

Every answer is compared with that of an undisturbed mesh, to the bit; in the end nothing may be
left: no request, block, slot, mapped file, socket or process. A line for each fault as it is over,
on stderr; the last line of stdout is the result as JSON. Exits with 1 when a promise is broken.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from deepmesh.report import Json, publish, report
from tests.chaos.plan import KINDS
from tests.chaos.run import AT_LEAST, STREAMS, Limits, Run
from tests.chaos.small_disk import enter_namespace


def main(argv: list[str]) -> int:
    """Run and print; the exit status."""
    options = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    options.add_argument("--seconds", type=float, default=180.0, help="no new fault after them")
    options.add_argument("--faults", type=int, default=0, help="so many; 0: as there is time for")
    options.add_argument("--seed", type=int, default=1, help="of the faults; 0: any")
    options.add_argument("--only", choices=KINDS, action="append", help="these kinds of faults")
    options.add_argument("--slack", type=float, default=1.0, help="limits times this: a busy host")
    options.add_argument("--keep", type=Path, help="folder for the logs, kept afterwards")
    options.add_argument("--json", action="store_true", help="nothing but the result")
    given = options.parse_args(argv)
    seed = given.seed or int.from_bytes(os.urandom(4), "big")
    has_namespace = enter_namespace()  # before there is a second thread
    print(f"seed {seed}; disk: {'tmpfs' if has_namespace else 'limit'}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="dm-chaos-", ignore_cleanup_errors=True) as name:
        folder = given.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        run = Run(folder, seed, has_namespace=has_namespace, slack=given.slack)
        figures = run.go(Limits(given.seconds, given.faults), given.only or KINDS)
    config: dict[str, Json] = {
        "seed": seed,
        "seconds": given.seconds,
        "faults": given.faults,
        "streams": STREAMS,
        "least_in_flight": AT_LEAST,
        "slack": given.slack,
        "disk": "tmpfs" if has_namespace else "limit",
    }
    ok = not figures["problems"]
    found = report("chaos", config=config, cases=[], ok=ok)
    if not given.json:
        print(table(figures))
    publish({**found, **figures}, name="chaos", as_json=True)
    return 0 if ok else 1


def table(figures: dict[str, Json]) -> str:
    """For people."""
    rows = [f"{'kind':<14}{'count':>6}{'p50 s':>8}{'max s':>8}{'limit':>7}{'streams: p50':>14}"]
    rows[0] += f"{'max':>7}"
    kinds = figures["recovery_s"]
    assert isinstance(kinds, dict)
    for name, row in kinds.items():
        assert isinstance(row, dict)
        limit = "" if row["limit"] is None else f"{row['limit']:g}"
        rows.append(
            f"{name:<14}{row['count']:>6}{row['p50']:>8}{row['max']:>8}{limit:>7}"
            f"{row['streams_p50']:>14}{row['streams_max']:>7}"
        )
    rows.append(
        f"{figures['faults']} faults, {figures['answers']} answers, {figures['lost_requests']} "
        f"lost, {figures['wrong_tokens']} wrong, {figures['leaks']} leaks, "
        f"longest gap {figures['longest_gap_s']} s"
    )
    problems = figures["problems"]
    assert isinstance(problems, list)
    return "\n".join([*rows, *(f"BROKEN: {problem}" for problem in problems)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
