"""`python -m tests.mutants [NAME …]`: every bug put back must be caught by its tests.

The last line of stdout is one JSON object.
Each mutant runs in a copy of the sources. One that survives is a missing test: exit status 1.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
COPIED = ("services", "deepmesh", "models", "tests", "pyproject.toml")
LIMIT_S = 60.0  # of one selection; it aims at 30 s on a quiet machine


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
    """Run its selection against the changed source."""
    path = folder / mutant.path
    original = path.read_text()
    count = original.count(mutant.old)
    if count != 1:
        sys.exit(f"{mutant.name}: its text occurs {count} times in {mutant.path}, not once")
    path.write_text(original.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
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
    if done.returncode not in (0, 1):
        sys.exit(f"{mutant.name}: pytest could not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 1


def main(names: list[str]) -> int:
    """Run the named mutants, or all."""
    unknown = set(names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        sys.exit(f"no such mutant: {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    survivors: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="deepmesh-mutants-") as name:
        copy_sources(Path(name))
        for mutant in chosen:
            start = time.monotonic()
            killed = is_killed(mutant, Path(name))
            if not killed:
                survivors.append(mutant.name)
            verdict = "killed" if killed else "SURVIVES"
            print(f"{mutant.name:32} {verdict:9} {time.monotonic() - start:5.1f} s", flush=True)
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
