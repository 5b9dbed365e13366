"""Runs peers: each in a process of its own, with a time limit; one that fails is reported."""

import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.gpu.peers.job import Answer, Job
from deepmesh.report import Json

ROOT = Path(__file__).parents[2]
PEERS = {  # module of bench/gpu/peers, the package that it needs, its operation
    "humming": ("humming_moe", "humming-kernels", "experts"),
    "flashinfer": ("flashinfer_moe", "flashinfer-python", "experts"),
    "flash_mla": ("flash_mla_attention", "sgl-flash-mla", "attention"),
    "deep_gemm": ("deep_gemm_index", "sgl-deep-gemm", "index"),
}
LAST_LINES = 12  # of what a peer says when it fails


class PeerRuns:
    """What the asked peers gave, and what is wrong with the others."""

    def __init__(self, names: Sequence[str], limit_s: float) -> None:
        self._names, self._limit_s = names, limit_s
        self.state: dict[str, Json] = {}  # version, or the error

    def ask(self, job: Job) -> list[Answer]:
        """Times of all peers that have this operation."""
        answers: list[Answer] = []
        for name in self._names:
            module, package, op = PEERS[name]
            if op == job.op:
                answers += self._run(name, module, package, job)
        return answers

    def _run(self, name: str, module: str, package: str, job: Job) -> list[Answer]:
        command = [sys.executable, "-m", f"bench.gpu.peers.{module}", job.line()]
        print(f"peer {name}", file=sys.stderr, flush=True)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=self._limit_s,
                env=environment,
                check=False,
            )
            out, said, status = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired as error:
            out = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            said, status = f"not done within {self._limit_s:g} s", -1
        answers = [Answer(**json.loads(line)) for line in out.splitlines() if line[:1] == "{"]
        version = _version(package)
        if status == 0:
            self.state[name] = version
        else:
            words = "\n".join(said.strip().splitlines()[-LAST_LINES:])
            self.state[name] = {"version": version, "status": status, "error": words}
        return answers

    @property
    def all_ran(self) -> bool:
        """Whether each that was asked came to its end."""
        return all(isinstance(state, str) for state in self.state.values())


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed as a package"
