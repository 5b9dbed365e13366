"""Inputs worth keeping: one file for each target, one input a line in hex."""

from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")
MAX_INPUTS = 60  # of a target; the shortest
MAX_BYTES = 512  # of one


def read(target: str) -> list[bytes]:
    """The inputs of a target; crashes of former times are among them."""
    path = FOLDER / f"{target}.txt"
    if not path.exists():
        return []
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return [bytes.fromhex(line) for line in lines if line]


def write(target: str, inputs: list[bytes]) -> None:
    """Replace them, but for lines with a comment: those are regressions."""
    path = FOLDER / f"{target}.txt"
    FOLDER.mkdir(exist_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    kept = [line for line in lines if "#" in line]
    fresh = sorted({data for data in inputs if len(data) <= MAX_BYTES}, key=lambda d: (len(d), d))
    path.write_text("\n".join([*kept, *(data.hex() for data in fresh[:MAX_INPUTS])]) + "\n")
