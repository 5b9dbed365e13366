"""The environments of the peers: what goes into each, and how it is made."""

import hashlib
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


class PeerError(RuntimeError):
    """A peer cannot be set up or does not work; the text says what to do."""


@dataclass(frozen=True)
class Recipe:
    """One peer: its packages, in the order of installation, and what is to be known of it."""

    installs: tuple[tuple[str, ...], ...]  # arguments of `pip install`
    worker: str
    converted: bool  # it needs the weights dequantised
    remark: str  # for reports: what it computes otherwise


RECIPES = {
    "mlx": Recipe(
        (("mlx[cpu]==0.32.4", "numpy"), ("--no-deps", "mlx-lm==0.32.2"), ("transformers==5.24.0",)),
        "mlx_worker.py",
        converted=True,
        remark="mlx-lm 0.32.2 on mlx[cpu] 0.32.4, fp32; no Engram layers, no draft stages",
    ),
    "nemo": Recipe(
        (
            ("torch==2.13.0", "transformers==5.24.0", "safetensors", "tokenizers"),
            ("pillow", "numpy"),
            ("--no-deps", "nemo_automodel==0.7.0"),
        ),
        "nemo_worker.py",
        converted=False,
        remark="nemo_automodel 0.7.0, bf16; no KV cache: each token computes its whole prefix",
    ),
}


def recipe(name: str) -> Recipe:
    """What is known of a peer.

    Raises:
        PeerError: there is no such peer.
    """
    if name not in RECIPES:
        raise PeerError(f"no peer {name!r}; there are: {', '.join(RECIPES)}")
    return RECIPES[name]


def python_of(name: str, cache: Path) -> Path:
    """The interpreter of a peer that has been set up.

    Raises:
        PeerError: it has not.
    """
    folder = _folder(name, cache)
    if not _stamp(folder, name).exists():
        raise PeerError(f"peer {name} is not set up: deepmesh bench peers setup {name}")
    return folder / "bin" / "python"


def set_up(name: str, cache: Path, say: Callable[[str], None]) -> Path:
    """Make the environment, unless it is there with the same packages; returns its interpreter.

    Raises:
        PeerError: pip failed; its last words are in the text.
    """
    folder, installs = _folder(name, cache), recipe(name).installs
    if not _stamp(folder, name).exists():
        shutil.rmtree(folder, ignore_errors=True)
        say(f"{name}: a new environment in {folder}")
        venv.create(folder, with_pip=True, symlinks=True)
        for packages in installs:
            say(f"{name}: pip install {' '.join(packages)}")
            _pip(folder, packages)
        _stamp(folder, name).write_text("")
    return folder / "bin" / "python"


def _pip(folder: Path, packages: tuple[str, ...]) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "install", "--quiet", *packages], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PeerError(f"pip install {' '.join(packages)} failed:\n{done.stderr.strip()[-2000:]}")


def _folder(name: str, cache: Path) -> Path:
    return cache / "peers" / f"{name}-py{sys.version_info.major}{sys.version_info.minor}"


def _stamp(folder: Path, name: str) -> Path:
    """Only there once everything is installed; another list of packages has another one."""
    words = sorted(word for packages in recipe(name).installs for word in packages)
    return folder / f"installed-{_digest(words)}"


def _digest(words: list[str]) -> str:
    """Short and the same in every process."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
