"""Draw the losses of a run: `python -m models.tiny.training.plot LOG PNG` (needs matplotlib)."""

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib import pyplot

COLOR_BY_PHASE = {"dense": "tab:blue", "sparse": "tab:orange", "draft": "tab:green"}


def main() -> None:
    """Plot loss over tokens, and the index loss below it."""
    log, png = Path(sys.argv[1]), Path(sys.argv[2])
    entries: list[dict[str, Any]] = [json.loads(line) for line in log.read_text().splitlines()]
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(6.4, 4.8), sharex=True)
    before = 0.0
    for phase, color in COLOR_BY_PHASE.items():
        own = [entry for entry in entries if entry.get("phase") == phase]
        steps = [entry for entry in own if entry.get("step", 0) >= 10]
        tokens = next(entry["tokens"] / entry["steps"] for entry in own if entry.get("done"))
        millions = [before + entry["step"] * tokens / 1e6 for entry in steps]
        top.plot(millions, [entry["loss"] for entry in steps], color=color, label=phase)
        if phase != "draft":
            bottom.plot(millions, [entry["index_loss"] for entry in steps], color=color)
        before = millions[-1]
    top.set_ylabel("cross entropy")
    top.set_ylim(0.8, 4.0)
    top.legend()
    bottom.set_ylabel("index loss (KL)")
    bottom.set_xlabel("million tokens")
    figure.tight_layout()
    figure.savefig(png, dpi=90)


if __name__ == "__main__":
    main()
