"""`python -m tests.mutants [NAME …]`: every bug put back must be caught by its tests.

The last line of stdout is one JSON object.
Each mutant runs in a copy of the sources, as many at once as there are cores (MUTANTS_AT_ONCE).
One that survives is a missing test: exit status 1.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("services", "deepmesh", "models", "tests", "pyproject.toml")
CPU_LIMIT_S = 60  # of one selection, which aims at 30 s; of CPU, whatever else the machine does
LIMIT_S = 900.0  # for one that waits for ever
LIMITED = ("sh", "-c", f'ulimit -t {CPU_LIMIT_S}; exec "$@"', "sh")
AT_ONCE = int(os.environ.get("MUTANTS_AT_ONCE", 0)) or min(8, os.cpu_count() or 1)


def copy_sources(target: Path) -> None:
    """What the selections need, without caches."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.safetensors")
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            shutil.copy(source, target / name)


def is_killed(mutant: Mutant, folder: Path) -> bool:
    """Run its selection against the changed source.

    Raises:
        SystemExit: the mutant does not fit the sources, or pytest could not run.
    """
    path = folder / mutant.path
    original = path.read_text()
    count = original.count(mutant.old)
    if count != 1:
        sys.exit(f"{mutant.name}: its text occurs {count} times in {mutant.path}, not once")
    path.write_text(original.replace(mutant.old, mutant.new))
    command = [*LIMITED, sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(folder)}
    try:
        done = subprocess.run(
            [*command, *mutant.tests.split()],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True  # it hangs instead of ending: caught
    finally:
        path.write_text(original)
    if done.returncode == -signal.SIGXCPU:
        return True
    if done.returncode not in (0, 1):
        sys.exit(f"{mutant.name}: pytest could not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def run_all(chosen: list[Mutant], folder: Path) -> list[str]:
    """Names of those that survive. Each one at work has a copy of the sources to itself."""
    free: SimpleQueue[Path] = SimpleQueue()
    for number in range(AT_ONCE):
        copy_sources(folder / str(number))
        free.put(folder / str(number))

    def run(mutant: Mutant) -> tuple[Mutant, bool, float]:
        copy, start = free.get(), time.monotonic()
        try:
            return mutant, is_killed(mutant, copy), time.monotonic() - start
        finally:
            free.put(copy)

    survivors: list[str] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for done in as_completed([pool.submit(run, mutant) for mutant in chosen]):
            mutant, killed, seconds = done.result()
            if not killed:
                survivors.append(mutant.name)
            verdict = "killed" if killed else "SURVIVES"
            print(f"{mutant.name:32} {verdict:9} {seconds:5.1f} s", flush=True)
    return survivors


def main(names: list[str]) -> int:
    """Run the named mutants, or all."""
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deepmesh-mutants-") as name:
        survivors = run_all(chosen, Path(name))
    found = {
        "mutants": len(chosen),
        "killed": len(chosen) - len(survivors),
        "survived": survivors,
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(found))
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
