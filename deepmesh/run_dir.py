"""The run folder of a mesh: one owner at a time, sockets, logs, traces, and who runs where."""

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

import msgspec

from deepmesh.config import Config, ConfigError
from deepmesh.errors import UserError

KEPT = ("logs", "traces")  # what a stopped mesh leaves behind for its user; `epochs` for the next


class RunDirError(UserError):
    """The run folder cannot be used; the text says what to do."""


class ProcessRecord(msgspec.Struct, frozen=True):
    """One process in mesh.json."""

    service: str
    pid: int  # 0: not running now
    state: str  # running, waiting (for its back-off), ended
    restarts: int
    log: str
    since_s: float = 0.0  # wall clock: running since, or starts again at
    last_end: str = ""  # of the life before; empty: this is the first


class MeshRecord(msgspec.Struct, frozen=True):
    """RUN_DIR/mesh.json: what runs, for `doctor`, tests and chaos."""

    name: str
    url: str
    supervisor_pid: int
    config: str
    processes: dict[str, ProcessRecord]
    addresses: dict[str, str]


class RunDir:
    """Owns one run folder until `release`."""

    def __init__(self, path: Path, mapped: Path | None = None) -> None:
        """Create the folder and lock it.

        Args:
            mapped: a folder elsewhere that belongs to this mesh alone (files that its processes
                map); removed with the sockets.

        Raises:
            RunDirError: another mesh runs there, or the folder is someone else's.
        """
        self.path, self._mapped = path, mapped
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if path.stat().st_uid != os.getuid():
                raise RunDirError(f"mesh.run_dir: {path} belongs to another user; set another one")
            if path.stat().st_mode & 0o002:
                raise RunDirError(f"mesh.run_dir: others can write to {path}; chmod 700")
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise RunDirError(f"mesh.run_dir: {path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            raise RunDirError(_in_use(path)) from error
        self.clean()
        for folder in KEPT:
            (path / folder).mkdir(exist_ok=True)

    def clean(self) -> None:
        """Remove what a mesh, perhaps a killed one, left: sockets, records; not logs and traces."""
        for entry in self.path.iterdir():
            ours = entry.name in ("mesh.json", "mesh.toml", "mesh.json.new")
            if ours or entry.is_socket() or entry.suffix == ".ready":
                entry.unlink(missing_ok=True)
        if self._mapped is not None:
            shutil.rmtree(self._mapped, ignore_errors=True)

    def release(self) -> None:
        """Remove everything but logs and traces, and let the next mesh in."""
        self.clean()
        (self.path / "lock").unlink(missing_ok=True)
        os.close(self._lock)

    def discard(self) -> None:
        """`release` by a mesh that never was: folders without a log or a trace go, too."""
        self.release()
        with contextlib.suppress(OSError):  # not empty: an earlier mesh's
            for folder in KEPT:
                (self.path / folder).rmdir()
            self.path.rmdir()

    def write_config(self, config: Config) -> Path:
        """mesh.toml as resolved, so that every process reads the same file."""
        path = self.path / "mesh.toml"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)  # a URL in it may hold a password
        path.write_text(dump_toml(config))
        return path

    def write_record(self, record: MeshRecord) -> None:
        """Replace mesh.json in one go: readers never see half of it."""
        new = self.path / "mesh.json.new"
        new.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n")
        new.replace(self.path / "mesh.json")

    def log_path(self, name: str) -> Path:
        """Where the output of process `name` goes."""
        return self.path / "logs" / f"{name}.log"


def _in_use(path: Path) -> str:
    record = read_record(path)
    who = f" by pid {record.supervisor_pid} at {record.url}" if record else ""
    return (
        f"mesh.run_dir: a mesh is already running in {path}{who}; "
        "stop it, or give this one another mesh.name or mesh.run_dir"
    )


def read_record(run_dir: Path) -> MeshRecord | None:
    """What mesh.json says, or None when no mesh runs there."""
    try:
        return msgspec.json.decode((run_dir / "mesh.json").read_bytes(), type=MeshRecord)
    except (OSError, msgspec.DecodeError):
        return None


def tail(log: Path, num_lines: int, *, max_bytes: int = 16_384) -> list[str]:
    """The last lines of a log; a progress bar's carriage returns count as line ends."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    lines = [line for line in re.split(r"[\r\n]+", text) if line.strip()]
    return lines[-num_lines:]


def dump_toml(config: Config) -> str:
    """The configuration as mesh.toml; `load_config` gives the same one back."""
    lines: list[str] = []
    for section, table in msgspec.to_builtins(config).items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {_toml_value(f'{section}.{key}', v)}" for key, v in table.items()]
        lines.append("")
    return "\n".join(lines)


def _toml_value(key: str, value: object) -> str:
    # TOML writes these the way JSON does (0x7f aside, which JSON does not escape).
    text = msgspec.json.encode(value).decode()
    if "\x7f" in text:
        raise ConfigError(f"{key}: holds a control character")
    return text
