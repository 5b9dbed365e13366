"""Fuzzes all targets in turn by coverage: python -m tests.fuzz --minutes 60 (`make fuzz`)."""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from deepmesh.report import Json, publish, report
from tests.fuzz import corpus
from tests.fuzz.limit import LIMIT_S, cpu_s
from tests.fuzz.services import logging_nothing
from tests.fuzz.targets import TARGETS

TIMEOUT_S = 10  # ends the run: wall clock, instrumented. `limit.LIMIT_S` is what counts
RSS_MB = 2048
MAX_LEN = 512


def run_target(name: str, seconds: int, folder: Path) -> dict[str, Json]:
    """One target for so long; what covered more is added to its corpus."""
    inputs, crashes, slow = (folder / each for each in ("inputs", "crashes", "slow"))
    for path in (inputs, crashes, slow):
        path.mkdir(parents=True)
    for number, data in enumerate(corpus.read(name)):
        (inputs / f"{number:04d}").write_bytes(data)
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT_S}",
        f"-rss_limit_mb={RSS_MB}",
        f"-max_len={MAX_LEN}",
        f"-artifact_prefix={crashes}/",
        "-print_final_stats=1",
    ]
    ended = _atheris(name, [str(slow), *options, str(inputs)], seconds + 600)
    corpus.write(name, [path.read_bytes() for path in inputs.iterdir()])  # each covered more
    runs = re.findall(r"stat::number_of_executed_units:\s*(\d+)", ended.stderr)
    covered = re.findall(r"\bcov: (\d+)", ended.stderr)
    found = sorted(crashes.iterdir())
    found += [path for path in sorted(slow.iterdir()) if _hangs(name, path.read_bytes())]
    if not runs:
        sys.exit(f"{name}: nothing was run:\n{ended.stderr[-2000:]}")
    if found:
        print(ended.stdout[-6000:], ended.stderr[-6000:], file=sys.stderr)  # tracebacks first
    return {
        "target": name,
        "seconds": seconds,
        "runs": int(runs[-1]),
        "covered": int(covered[-1]) if covered else 0,
        "corpus": len(corpus.read(name)),
        "crashes": [
            f"{path.parent.name} {path.name.split('-')[0]}: {path.read_bytes().hex()}"
            for path in found
        ],
    }


def _hangs(name: str, data: bytes) -> bool:
    with logging_nothing():
        cpu_s(name, data)  # imports and caches
        return cpu_s(name, data) > LIMIT_S


def _atheris(name: str, options: list[str], limit_s: int) -> "subprocess.CompletedProcess[str]":
    argv = [sys.executable, "-m", "tests.fuzz.atheris_run", name, *options]
    return subprocess.run(argv, capture_output=True, text=True, timeout=limit_s)


def main() -> int:
    """All targets, or those named; exit status 1 with a crash."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of all targets together")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; none: all"
    )
    arguments = parser.parse_args()
    names = arguments.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    seconds = max(1, int(60 * arguments.minutes / len(names)))
    results: list[dict[str, Json]] = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
            results.append(run_target(name, seconds, Path(folder)))
        line = results[-1]
        print(
            f"{name:16} {line['runs']:>9} runs, {line['covered']} places covered, "
            f"{line['corpus']} inputs kept, {len(results[-1]['crashes'])} crashes",  # type: ignore[arg-type]
            file=sys.stderr,
        )
    config: dict[str, Json] = {"minutes": arguments.minutes, "limit_s": LIMIT_S, "rss_mb": RSS_MB}
    ok = not any(line["crashes"] for line in results)
    found = report("make fuzz", config=config, cases=results, ok=ok)
    publish(found, name="fuzz", as_json=arguments.json)
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
