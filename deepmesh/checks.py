"""What `deepmesh doctor` looks at. Each check says what it found and what to do next."""

import importlib.metadata
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from deepmesh.config import Config, ConfigError, load_config
from deepmesh.gateway_address import PortError, check_port, gateway_fault
from deepmesh.run_dir import MeshRecord, read_record, tail

MIN_SHM_BYTES = 64 << 20


class Check(msgspec.Struct, frozen=True):
    """One finding."""

    name: str
    state: Literal["ok", "warn", "fail"]
    found: str
    next_step: str = ""


def all_checks(path: Path | None) -> list[Check]:
    """Everything, in the order in which it has to work."""
    # which are written in terms of `Check`
    from deepmesh.handover_checks import check_handovers
    from deepmesh.kvstore_checks import check_kvstores
    from deepmesh.link_checks import check_links

    checks = [check_python(), *check_packages(), check_compiler(), check_shared_memory()]
    try:
        config = load_config(path)
    except ConfigError as error:
        return [*checks, Check("configuration", "fail", str(error), "correct that key")]
    checks.append(Check("configuration", "ok", str(path or "defaults")))
    checks.append(check_torch(config))
    checks.append(check_model(Path(config.mesh.model), needs_weights=_needs_weights(config)))
    checks.append(check_grammars(config))
    checks += check_kvstores(config)
    checks += check_handovers(config)
    return [*checks, *check_links(config), *check_mesh(config)]


def _needs_weights(config: Config) -> bool:
    return config.executor.kind == "model" and not config.executor.address


def check_python(version: tuple[int, ...] = sys.version_info[:3]) -> Check:
    """3.11 or later."""
    text = ".".join(map(str, version))
    if version >= (3, 11):
        return Check("Python", "ok", f"{text} at {sys.executable}")
    return Check("Python", "fail", text, "install Python 3.11 or later")


def check_packages() -> Iterator[Check]:
    """Every package that the services without tensors need."""
    missing: list[str] = []
    for requirement in importlib.metadata.requires("deepmesh") or []:
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0]
        if "extra ==" not in requirement and version_of(name) is None:
            missing.append(name)
    if missing:
        yield Check("packages", "fail", f"missing: {', '.join(missing)}", "pip install deepmesh")
    else:
        yield Check("packages", "ok", "all installed")


def version_of(package: str) -> str | None:
    """The installed version, without importing the package (torch takes 1.5 s)."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_compiler() -> Check:
    """The CPU kernels are compiled at the first start."""
    if path := shutil.which("g++"):
        return Check("g++", "ok", path)
    return Check("g++", "fail", "not found", "apt-get install g++ (or another C++ compiler as g++)")


def check_shared_memory() -> Check:
    """Room for what processes of one machine map together."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return Check("/dev/shm", "warn", "not there", "mount a tmpfs at /dev/shm")
    free = stats.f_bavail * stats.f_frsize
    if free >= MIN_SHM_BYTES:
        return Check("/dev/shm", "ok", f"{free >> 20} MiB free")
    step = "enlarge it (containers: --shm-size 1g)"
    return Check("/dev/shm", "warn", f"only {free >> 20} MiB free", step)


def check_torch(config: Config) -> Check:
    """Only an executor with weights needs it."""
    version, needed = version_of("torch"), _needs_weights(config)
    if version is None and needed:
        return Check("torch", "fail", "not installed", "pip install 'deepmesh[executor]'")
    if version is None:
        return Check("torch", "ok", "not installed; no executor with weights runs here")
    major, minor = (int(part) for part in re.findall(r"\d+", version)[:2])
    if (2, 11) <= (major, minor) < (2, 14):
        return Check("torch", "ok", version)
    step = "pip install 'torch>=2.11,<2.14'"
    return Check("torch", "fail" if needed else "warn", f"{version} is untested", step)


def check_model(folder: Path, *, needs_weights: bool) -> Check:
    """The files of a checkpoint; their content is checked by the loader."""
    wanted = ["config.json", "tokenizer.json"]
    if needs_weights:
        wanted += _weight_files(folder)
    missing = [name for name in wanted if not (folder / name).is_file()]
    if not missing:
        return Check("model", "ok", f"{folder}: {len(wanted)} files")
    step = "set mesh.model to the folder of a checkpoint"
    return Check("model", "fail", f"{folder}: missing {', '.join(missing[:5])}", step)


def check_grammars(config: Config) -> Check:
    """Whether mask workers can read the model's vocabulary."""
    executor = config.executor
    if not executor.masks or executor.kind != "model" or executor.address:
        return Check("grammars", "ok", "no mask worker runs here")
    from llguidance import LLTokenizer

    path = Path(config.mesh.model) / "tokenizer.json"
    try:
        size = LLTokenizer(path.read_text("utf-8")).vocab_size
    except (OSError, ValueError) as error:
        step = "formats and forced calls will be refused; set executor.masks = false to be silent"
        return Check("grammars", "warn", f"{path}: {error}", step)
    return Check("grammars", "ok", f"llguidance {version_of('llguidance')}, {size} tokens")


def _weight_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except OSError:
        return ["model.safetensors"]
    except msgspec.DecodeError:
        return [f"a readable {index.name}"]
    return sorted(set(weight_map.values()))


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def check_mesh(config: Config) -> Iterator[Check]:
    """The run folder, the port, and the processes if a mesh runs."""
    run_dir = Path(config.mesh.run_dir)
    record = read_record(run_dir)
    if record is not None and not is_alive(record.supervisor_pid):
        step = "`deepmesh up` cleans it up"
        yield Check("run folder", "warn", f"{run_dir}: left by a killed mesh", step)
        record = None
    elif run_dir.exists() and not os.access(run_dir, os.W_OK):
        yield Check("run folder", "fail", f"{run_dir}: not writable", "set mesh.run_dir")
    elif record is None and (sockets := sorted(run_dir.glob("*.sock"))):
        found = f"{run_dir}: {', '.join(path.name for path in sockets)}, and no mesh"
        yield Check("run folder", "warn", found, "served by hand, or left over: then remove them")
    else:
        yield Check("run folder", "ok", str(run_dir))
    if record is None:
        yield _check_free_port(config)
        yield Check("mesh", "ok", "not running", "deepmesh up")
    else:
        yield from _check_processes(record, run_dir)


def _check_free_port(config: Config) -> Check:
    address = f"{config.gateway.host}:{config.gateway.port}"
    try:
        check_port(config)
    except PortError as error:
        step = "deepmesh up --port 0, or set gateway.port"
        return Check("port", "fail", str(error), step)
    return Check("port", "ok", f"{address} is free")


def _check_processes(record: MeshRecord, run_dir: Path) -> Iterator[Check]:
    for name, process in record.processes.items():
        restarts = f", started again {process.restarts} times" if process.restarts else ""
        restarts += f" ({process.last_end})" if process.last_end else ""
        found = f"pid {process.pid}{restarts}"
        if is_alive(process.pid):
            yield Check(
                name,
                "ok" if not process.restarts else "warn",
                found,
                _log_hint(process.restarts, process.log),
            )
        else:
            last = " ".join(tail(Path(process.log), 1))
            yield Check(name, "fail", f"not running{restarts}; {last}", f"read {process.log}")
    fault = gateway_fault(record.url)
    if fault.code == "draining":
        yield Check(
            "mesh", "fail", f"drained: {record.url} takes no requests", _resume_hint(run_dir)
        )
    elif fault.message:
        yield Check("mesh", "fail", f"not ready: {fault.message}", "read the logs above")
    else:
        yield Check("mesh", "ok", f"ready at {record.url}")


def _resume_hint(run_dir: Path) -> str:
    """The admin ports that take the order back; each gateway has its own and leaves it there."""
    found = [path.read_text().strip() for path in sorted(run_dir.glob("gateway*.admin"))]
    call = 'curl -X POST -H "Authorization: Bearer ADMIN_KEY"'
    urls = [f"{url}/admin/resume" for url in found] or ["http://HOST:ADMIN_PORT/admin/resume"]
    return f"to take requests again: {call} {' '.join(urls)}"


def _log_hint(restarts: int, log: str) -> str:
    return f"read {log}.1 or {log}" if restarts else ""


def is_alive(pid: int) -> bool:
    """Whether a process of that number exists."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
