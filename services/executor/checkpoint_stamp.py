"""Whether the files of a checkpoint are still those that were read."""

from pathlib import Path

Stamp = tuple[
    tuple[str, int, int], ...
]  # name, bytes, time of the last change in ns; the folder first


def stamp(folder: Path) -> Stamp:
    """Of its configuration and weights; what cannot be read is left out."""
    files = sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")])
    found = [(str(folder.resolve()), 0, 0)]
    for file in files:
        try:
            about = file.stat()
        except OSError:
            continue  # a dangling link: loading says what is wrong
        found.append((file.name, about.st_size, about.st_mtime_ns))
    return tuple(found)
