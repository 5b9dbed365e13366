"""The packages of each image, out of pyproject.toml: a service gets what it imports, no more.

`packages.py` prints the requirements of all for pip; `packages.py EVERYTHING TREES`, run by a
Python that has pip, makes a folder for each service out of the one where pip has put everything.
"""

import os
import re
import sys
import tomllib
from importlib.metadata import Distribution, distributions
from pathlib import Path

ALL = ("msgspec", "pyzmq", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
RECIPE = ("deepseek-recipe", "tokenizers", "llguidance", "numpy", "isal")
PACKAGES = {
    "gateway": ("starlette", "uvicorn", "uvloop", "httptools", "prometheus-client"),
    "tokenizer": (*RECIPE, "uvloop"),
    "router": ("numpy", "isal"),
    "scheduler": ("numpy", "isal"),
    "kvstore": ("isal", "msgpack", "redis"),
    "executor": ("numpy", "isal", "llguidance", "tokenizers"),  # torch comes by an index of its own
    "operator": ("typer", "rich", "httpx", "redis", *RECIPE),
}


def requirements(project: Path) -> list[str]:
    """What pip installs for all services, with the versions that pyproject.toml asks for.

    Raises:
        KeyError: a package that pyproject.toml does not name.
    """
    lines = tomllib.loads(project.read_text())["project"]["dependencies"]
    by_name = {re.split(r"[^A-Za-z0-9._-]", line)[0]: line for line in lines}
    wanted = {*ALL, *(package for packages in PACKAGES.values() for package in packages)}
    return [by_name[package] for package in sorted(wanted)]


def closure(wanted: tuple[str, ...], installed: dict[str, Distribution]) -> set[str]:
    """These packages and all that they need, by name."""
    from pip._vendor.packaging.requirements import Requirement

    found, open_ends = set[str](), [(name, "") for name in wanted]
    while open_ends:
        name, extra = open_ends.pop()
        found.add(canonical(name))
        for line in installed[canonical(name)].requires or []:
            needs = Requirement(line)
            if needs.marker is None or needs.marker.evaluate({"extra": extra}):
                ends = [(needs.name, each) for each in ("", *needs.extras)]
                open_ends += [end for end in ends if canonical(end[0]) not in found or end[1]]
    return found


def canonical(name: str) -> str:
    """As package indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def split(everything: Path, trees: Path) -> None:
    """A folder for each service: hard links, so that it takes neither time nor room."""
    installed = {canonical(d.metadata["Name"]): d for d in distributions(path=[str(everything)])}
    for service, packages in PACKAGES.items():
        for name in closure((*ALL, *packages), installed):
            for file in installed[name].files or []:
                if ".." not in file.parts:  # programs in bin
                    target = trees / service / file
                    target.parent.mkdir(parents=True, exist_ok=True)
                    os.link(everything / file, target)


if __name__ == "__main__":
    if sys.argv[1:]:
        split(Path(sys.argv[1]), Path(sys.argv[2]))
    else:
        print(*requirements(Path("pyproject.toml")), sep="\n")
