"""Licences of everything that runs with deepmesh: `make licences` writes docs/licences.md."""

import argparse
import importlib.metadata
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

PAGE = Path(__file__).parents[1] / "docs" / "licences.md"
EXTRAS = ("executor", "plot")  # of deepmesh, that run with it; the others build and test it
PERMISSIVE = frozenset(
    (
        *("0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "HPND"),
        *("ISC", "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib"),
        "LLVM-exception",
    )
)
# Not permissive, and accepted: why. They come with other packages, and are used as they are.
ACCEPTED = {
    "certifi": "MPL-2.0: a list of certificates, of `httpx`; unmodified",
    "tqdm": "MPL-2.0 AND MIT: of `huggingface-hub`, of `tokenizers`; unmodified, not imported",
}
NVIDIA = ("nvidia-", "cuda-")  # libraries beside a CUDA build of torch; NVIDIA's own terms
_SPELLINGS = {  # of old metadata
    "Apache Software License": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "BSD": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "MIT License": "MIT",
    "ISC License": "ISC",
    "ISC License (ISCL)": "ISC",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}


class Package(NamedTuple):
    """One installed distribution."""

    name: str
    licence: str  # SPDX as far as it can be told; empty: it does not say

    @property
    def problem(self) -> str:
        """Why it must not be shipped; empty: it may be."""
        if self.name in ACCEPTED or self.name.startswith(NVIDIA) or is_permissive(self.licence):
            return ""
        return f"{self.name}: {self.licence or 'no licence named'}"


def is_permissive(licence: str) -> bool:
    """Whether one of the alternatives of an SPDX expression is made of permissive ones alone."""
    alternatives = re.split(r"\s+OR\s+", licence)
    return bool(licence) and any(
        all(name in PERMISSIVE for name in re.split(r"\s+(?:AND|WITH)\s+", each.strip("() ")))
        for each in alternatives
    )


def packages() -> list[Package]:
    """Everything that deepmesh needs at run time here, direct or not."""
    found: dict[str, Package] = {}
    todo = list(_needs("deepmesh", EXTRAS))
    while todo:
        name, extras = todo.pop()
        if name in found:
            continue
        found[name] = Package(name, _licence(name))
        todo += _needs(name, extras)
    return sorted(found.values())


def _needs(name: str, extras: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for line in importlib.metadata.requires(name) or []:
        need = Requirement(line)
        wanted = need.marker is None or any(
            need.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        if wanted:
            yield _normal(need.name), tuple(need.extras)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _licence(name: str) -> str:
    about = importlib.metadata.metadata(name)
    classes = [
        str(line).rpartition(" :: ")[2]
        for line in about.get_all("Classifier") or []
        if line.startswith("License ::")
    ]
    text = _field(about, "License-Expression")
    if not text and classes:
        text = " AND ".join(dict.fromkeys(_SPELLINGS.get(each, each) for each in classes))
    first = _field(about, "License").strip().split("\n")[0]
    return text or _SPELLINGS.get(first, first)


def _field(about: importlib.metadata.PackageMetadata, name: str) -> str:
    return str((about.get_all(name) or [""])[0])


def page(found: list[Package]) -> str:
    """docs/licences.md."""
    lines = [
        "# Licences",
        "",
        "deepmesh is under Apache-2.0 (`LICENSE`). This is every package that runs with it, direct",
        "or not, as its own metadata says; `make licences` writes the page, and `make test` fails",
        "for a package that is missing here or whose licence is not permissive. Packages that only",
        "build or test deepmesh (the extras `dev` and `fuzz`) are not shipped with it.",
        "",
        "| package | licence |",
        "|---|---|",
        *(f"| {each.name} | {each.licence} |" for each in found),
        "",
        "Accepted though they are not permissive: they come with other packages, are used as they",
        "are, and nothing of them is in this repository.",
        "",
        *(f"- `{name}`: {why}" for name, why in ACCEPTED.items()),
        "- CUDA builds of torch bring NVIDIA's libraries (`nvidia-*`) under NVIDIA's own terms.",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Write the page, or check that nothing is missing in it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    found = packages()
    problems = [each.problem for each in found if each.problem]
    if arguments.check:
        told = PAGE.read_text()
        missing = [each.name for each in found if f"| {each.name} |" not in told]
        problems += [f"{name}: not in docs/licences.md; run `make licences`" for name in missing]
    else:
        PAGE.write_text(page(found))
        print(f"{len(found)} packages in {PAGE.name}", file=sys.stderr)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
