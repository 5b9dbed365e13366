"""Facts of the checkpoint that ships, read from it: tests must survive a new training run."""

import json
from pathlib import Path

MODEL_FOLDER = Path(__file__).parents[1] / "models" / "tiny"
VOCAB_SIZE: int = json.loads((MODEL_FOLDER / "config.json").read_text())["text_config"][
    "vocab_size"
]
