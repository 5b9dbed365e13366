"""Held-out figures of a written checkpoint, in fp32 on any device, with the index ablation.

The rounded and the unrounded model differ in weights and in activations: the first reads the
checkpoint, the second the masters that it was rounded from.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.tiny.training import evaluate, export
from models.tiny.training.config import compress_vocabulary
from models.tiny.training.model import Forward, Mode, effective_weights
from models.tiny.training.parameters import main_parameters, routing_biases
from models.tiny.training.rows import Corpus, TokenRows
from models.tiny.training.train import read_masters

ROUNDED = Mode(rounds_activations=True)  # the checkpoint's weights are rounded already
UNROUNDED = Mode()
RANDOM_INDEX = replace(ROUNDED, random_index=True)


@dataclass(frozen=True)
class Reader:
    """A model and the window that its rows are padded to."""

    corpus: Corpus
    forward: Forward
    weights: dict[str, torch.Tensor]

    def run(self, rows: TokenRows, mode: Mode) -> tuple[np.ndarray, np.ndarray]:
        """Return the losses and right tokens of one row, computed no further than it is filled."""
        window = self.forward.config["sliding_window"]
        length = int(np.flatnonzero(rows.weights[0])[-1])
        num_tokens = min(length + -length % window, rows.ids.shape[1] - 1)
        single = evaluate.Evaluator(self.corpus, self.forward, num_tokens, 1)
        size = num_tokens + 1
        cut = TokenRows(rows.ids[:, :size], rows.weights[:, :size], rows.starts[:, :size])
        with torch.no_grad():
            return single.run(self.weights, mode, cut)

    def exact(self, mode: Mode, name: str, num_documents: int) -> dict[str, Any]:
        """Return the share of whole answers that are right."""
        draw = evaluate.draws(self.corpus)[name]
        rows = evaluate.held_out(self.corpus, name, draw, 2240, num_documents)
        assert rows is not None
        right: list[bool] = []
        for row in range(num_documents):
            one = slice(row, row + 1)
            document = TokenRows(rows.ids[one], rows.weights[one], rows.starts[one])
            _, is_right = self.run(document, mode)
            found = evaluate.answers(document.weights[0])
            right += [bool(is_right[0][run - 1].all()) for run in found]
        return {"exact": round(float(np.mean(right)), 4), "answers": len(right)}

    def perplexity(self, mode: Mode, num_rows: int, num_tokens: int = 1024) -> dict[str, Any]:
        """Return the perplexity of held-out text."""
        rows = evaluate.held_out_text(self.corpus, num_tokens, num_rows)
        total, count = 0.0, 0
        for row in range(num_rows):
            one = slice(row, row + 1)
            losses, _ = self.run(
                TokenRows(rows.ids[one], rows.weights[one], rows.starts[one]), mode
            )
            counted = rows.weights[one, 1:] > 0
            total, count = total + float(losses[counted].sum()), count + int(counted.sum())
        return {"perplexity": round(float(np.exp(total / count)), 4), "tokens": count}


def main() -> None:
    """Measure and write the figures as they come."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/tiny"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--masters", type=Path, help="folder with the weights before rounding")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--documents", type=int, default=60)
    parser.add_argument("--text-rows", type=int, default=16)
    parser.add_argument("--only", nargs="*", help="measure these figures alone")
    options = parser.parse_args()
    corpus = Corpus(options.data)
    config, values = export.read(options.model)
    parameters = main_parameters(config)
    forward = Forward(
        config, compress_vocabulary(corpus.tokenizer, config["vocab_size"]), torch.device("cpu")
    )
    biases = {name: values[name] for name in routing_biases(config)}
    rounded = Reader(corpus, forward, effective_weights(values, parameters, ROUNDED) | biases)
    figures: dict[str, Any] = {}

    def record(name: str, measure: Callable[[], dict[str, Any]]) -> None:
        if options.only and name not in options.only:
            return
        figures[name] = measure()
        print(name, figures[name], flush=True)
        options.out.write_text(json.dumps(figures, indent=1) + "\n")

    num_documents, num_few = options.documents, max(1, options.documents // 3)
    for name in ("lookup_200", "lookup_1000", "lookup_2000"):
        record(name, lambda name=name: rounded.exact(ROUNDED, name, num_documents))
        few = lambda name=name: rounded.exact(RANDOM_INDEX, name, num_few)  # noqa: E731
        record(f"{name}, random index", few)
    record("text, rounded", lambda: rounded.perplexity(ROUNDED, options.text_rows))
    if options.masters:
        masters = {name: value.float() for name, value in read_masters(options.masters).items()}
        weights = effective_weights(masters, parameters, UNROUNDED) | biases
        unrounded = Reader(corpus, forward, weights)
        record("text, unrounded", lambda: unrounded.perplexity(UNROUNDED, options.text_rows))
    for name in evaluate.draws(corpus):
        if name not in figures:
            record(name, lambda name=name: rounded.exact(ROUNDED, name, num_documents))


if __name__ == "__main__":
    main()
