"""What a host must have before a service starts, each lack in one sentence that says what to do.

`python -m deepmesh.start_checks -c mesh.toml kvstore executor` is what containers wait for
(compose/compose.yaml); kvstores and executors look again themselves. torch is not imported.
"""

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from deepmesh.config import Config, ConfigError, load_config
from deepmesh.gpus import NoGpus, found_gpus

# CUDA version of torch, and the first driver that runs it.
MIN_DRIVERS = {13: 580, 12: 525}
SUFFIXES = (".json", ".safetensors")
_MIB = 1 << 20


def problem_of(config: Config, service: str, *, smi: str = "nvidia-smi") -> str:
    """Why a process of this service cannot work on this host; empty: nothing is known against it.

    Args:
        smi: the driver's program.
    """
    if service == "kvstore":
        return _memory_problem(config)
    if service == "executor" and (found := weights_problem(config)):
        return found
    if service == "executor" and config.executor.kind == "model":
        return _gpu_problem(smi) if config.executor.device == "cuda" else ""
    return ""


def weights_problem(config: Config) -> str:
    """Why the weights cannot be read; empty: they can, or none are needed."""
    return _model_problem(Path(config.mesh.model)) if config.executor.kind == "model" else ""


def _memory_problem(config: Config) -> str:
    """A container engine gives 64 MB of /dev/shm unless it is told otherwise."""
    folder, wanted = config.shared_dir, config.kvstore.memory_bytes
    if folder is None or not wanted:
        return ""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    stats = os.statvfs(there)
    total = stats.f_blocks * stats.f_frsize
    if total >= wanted:
        return ""
    return (
        f"kvstore.memory_bytes asks for {wanted // _MIB} MiB of memory that processes map, and"
        f" {there} holds {total // _MIB} MiB in all: give the container more (`--shm-size"
        f" {wanted // _MIB + 64}m`, in compose `shm_size`, or the size of the volume that"
        " kvstore.shared_dir lies on), or lower kvstore.memory_bytes"
    )


def _model_problem(folder: Path) -> str:
    """Weights belong to whoever fetched them; processes of containers are user 10001."""
    who = f"user {os.getuid()}"
    try:
        files = sorted(
            path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")
        )
    except OSError as error:
        return _unreadable(folder, f"{who} cannot list it ({error.strerror})")
    if not any(path.suffix == ".safetensors" for path in files):
        return _unreadable(folder, "no *.safetensors is in it", "set it to a checkpoint's folder")
    for path in files:
        try:
            with path.open("rb") as file:
                file.read(1)
        except OSError as error:
            return _unreadable(path, f"{who} cannot read it ({error.strerror})")
    return ""


def _unreadable(path: Path, why: str, step: str = "`chmod -R a+rX` on the host") -> str:
    return f"mesh.model: {path}: {why}: {step}; in compose DEEPMESH_MODEL names the folder"


def _gpu_problem(smi: str) -> str:
    """Whether there is a GPU, and a driver that runs what torch was compiled for."""
    try:
        driver = found_gpus(smi)[0].driver
    except NoGpus as error:
        return (
            f"executor.device is cuda, and this process sees no GPU ({error}): install the driver"
            " and the NVIDIA Container Toolkit and start with compose.gpu.yaml (or `docker run"
            " --gpus all`), or set executor.device = 'cpu'"
        )
    return driver_problem(driver, torch_cuda())


def driver_problem(driver: str, cuda: str) -> str:
    """Whether a driver such as "580.95.05" runs code for CUDA "13.0"; empty: it does."""
    least = MIN_DRIVERS.get(int(cuda.partition(".")[0] or 0), 0)
    major = driver.partition(".")[0]
    if not major.isdecimal() or int(major) >= least:
        return ""
    return (
        f"the NVIDIA driver of this host is {driver}, and torch with CUDA {cuda} needs {least} or"
        " later: update the driver, or build the image with a torch for an older CUDA (build"
        " arguments TORCH and TORCH_INDEX)"
    )


def torch_cuda() -> str:
    """The CUDA that the installed torch was compiled for, such as "13.0"; empty: none, no torch."""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return ""
    text = Path(found.origin).with_name("version.py").read_text()
    cuda = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
    return cuda[1] if cuda else ""


def _problems(config: Config, services: list[str]) -> Iterator[str]:
    yield from (words for service in services if (words := problem_of(config, service)))


def main() -> int:
    """0: all is there; 1: the first thing that is not, on stderr."""
    parser = argparse.ArgumentParser(prog="python -m deepmesh.start_checks", description=__doc__)
    parser.add_argument("-c", "--config", type=Path, default=None, help="mesh.toml")
    parser.add_argument("services", nargs="+", choices=("kvstore", "executor"))
    arguments = parser.parse_args()
    try:
        words = next(_problems(load_config(arguments.config), arguments.services), "")
    except ConfigError as error:
        words = str(error)
    print(words or "this host has what the mesh needs", file=sys.stderr if words else sys.stdout)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
