"""mlx-lm's deepseek_v41 on a converted checkpoint. Runs in the environment of peer mlx."""

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
from mlx_lm.models import deepseek_v41
from worker_loop import Rows, serve


class Mlx:
    """The model with its incremental cache."""

    def __init__(self, folder: Path, threads: int) -> None:
        """`threads` reach its libraries through the environment."""
        mx.set_default_device(mx.cpu)
        raw = json.loads((folder / "config.json").read_text())
        arguments = deepseek_v41.ModelArgs.from_dict(raw)
        self._model = deepseek_v41.Model(arguments)
        weights: list[tuple[str, mx.array]] = []
        for file in sorted(folder.glob("*.safetensors")):
            weights += [(_renamed(name), value) for name, value in mx.load(str(file)).items()]
        self._model.load_weights(weights, strict=True)
        mx.eval(self._model.parameters())

    def prefill(self, ids: Rows) -> list[object]:
        """A cache of the rows."""
        cache = self._model.make_cache()
        self._run(ids, cache)
        return cache

    def step(self, state: list[object], ids: Sequence[int]) -> list[object]:
        """One more token of each row."""
        self._run([[token] for token in ids], state)
        return state

    def _run(self, ids: Rows, cache: list[object]) -> None:
        logits = self._model(mx.array(ids), cache)
        mx.eval(logits[:, -1].argmax(-1))


def _renamed(name: str) -> str:
    """Names of the converted file (see `convert.py`) -> mlx-lm's."""
    stacked = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    if ".ffn.experts." in name:
        prefix, leaf = name.split(".ffn.experts.")
        part = stacked[leaf.removesuffix(".weight")]
        return f"model.{prefix}.mlp.experts.switch_mlp.{part}.weight"
    return deepseek_v41._rename(name)


if __name__ == "__main__":
    serve(Mlx)
