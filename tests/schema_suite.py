"""The JSON-Schema-Test-Suite, as it comes inside the source distribution of `jsonschema`."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

DRAFT = "draft2020-12"


class Group(NamedTuple):
    """One schema and instances of which it is known whether they are valid."""

    name: str
    schema: Any  # Any: any JSON value
    instances: list[tuple[Any, bool]]


def groups_of(folder: Path) -> list[Group]:
    """All groups in the files of a folder."""
    return [
        Group(
            f"{file.stem}: {group['description']}",
            group["schema"],
            [(test["data"], test["valid"]) for test in group["tests"]],
        )
        for file in sorted(folder.glob("*.json"))
        for group in json.loads(file.read_text())
    ]


def download(into: Path) -> Path:
    """Fetch the suite with pip; the folder of the draft, without its optional parts."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", "jsonschema", "--dest", str(into), "jsonschema"]
    subprocess.run(command, check=True, timeout=300)
    (archive,) = into.glob("jsonschema-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    (folder,) = into.glob(f"jsonschema-*/json/tests/{DRAFT}")
    return folder
