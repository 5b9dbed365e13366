"""Held-out figures: whole answers, teacher-forced (right ones equal greedy decoding)."""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from models.tiny.training import layers, structured, tasks
from models.tiny.training.draft_trainer import ANCHORS_PER_ROW, DraftTrainer
from models.tiny.training.lookup import lookup as draw_lookup
from models.tiny.training.model import Forward, Mode, Rows
from models.tiny.training.render import Conversation
from models.tiny.training.rows import FULL_WEIGHT, Corpus, TokenRows

LOOKUP_LENGTHS = (200, 500, 1000, 2000)
Draw = Callable[[random.Random], Conversation]


def draws(corpus: Corpus) -> dict[str, Draw]:
    """Return the held-out tasks by name."""

    def lookup(length: int) -> Draw:
        return lambda rng: draw_lookup(rng, corpus.material, length, num_questions=1)

    plain: dict[str, Draw] = {
        "copy": tasks.copy_short,
        "long_copy": tasks.copy_long,
        "add": lambda rng: tasks.add(rng, held_out=True),
        "tool": structured.call_tool,
        "json": structured.write_json,
        "think": tasks.think,
    }
    return plain | {f"lookup_{length}": lookup(length) for length in LOOKUP_LENGTHS}


def held_out(
    corpus: Corpus, name: str, draw: Draw, num_tokens: int, num_documents: int
) -> TokenRows | None:
    """Return documents of a task, one a row, or None where they do not fit in the row."""
    rng = random.Random(f"held out {name}")
    wanted = int(name.split("_")[1]) if name.startswith("lookup_") else None
    if wanted and wanted > num_tokens:
        return None
    ids = np.full((num_documents, num_tokens + 1), corpus.pad, np.uint16)
    weights = np.zeros(ids.shape, np.uint8)
    count = 0
    for _ in range(40 * num_documents):
        own_ids, own_weights = corpus.encode(draw(rng).pieces())
        length = len(own_ids)
        is_off = wanted is not None and not 0.9 * wanted <= length <= 1.1 * wanted
        if length > num_tokens + 1 or is_off:
            continue
        ids[count, :length], weights[count, :length] = own_ids, own_weights
        count += 1
        if count == num_documents:
            return TokenRows(ids, weights, np.zeros(ids.shape, np.uint16))
    return None


def held_out_text(corpus: Corpus, num_tokens: int, num_rows: int) -> TokenRows:
    """Return rows of the held-out text."""
    size = num_tokens + 1
    ids = corpus.held_out[: num_rows * size].reshape(num_rows, size)
    starts = np.zeros(ids.shape, np.uint16)
    for row, place in zip(*np.nonzero(ids == corpus.bos), strict=True):
        starts[row, place:] = place
    return TokenRows(ids, np.where(ids == corpus.bos, 0, FULL_WEIGHT).astype(np.uint8), starts)


def answers(weights: np.ndarray) -> list[np.ndarray]:
    """Return the positions of each run of assistant tokens in one row."""
    places = np.flatnonzero(weights == FULL_WEIGHT)
    return [run for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if len(run)]


class Evaluator:
    """Runs held-out documents through a forward in batches of one shape."""

    def __init__(self, corpus: Corpus, forward: Forward, num_tokens: int, num_rows: int) -> None:
        self.corpus, self._forward = corpus, forward
        self._num_tokens, self._num_rows = num_tokens, num_rows
        self._made: dict[tuple[str, int], TokenRows | None] = {}

    def _held_out(self, name: str, num_documents: int) -> TokenRows | None:
        key = (name, num_documents)
        if key not in self._made:
            self._made[key] = held_out(
                self.corpus, name, draws(self.corpus)[name], self._num_tokens, num_documents
            )
        return self._made[key]

    def run(
        self, weights: dict[str, torch.Tensor], mode: Mode, rows: TokenRows
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the losses and right tokens of a batch."""
        device = self._forward.device
        ids = torch.from_numpy(rows.ids.astype(np.int64)).to(device)
        starts = torch.from_numpy(rows.starts[:, :-1].astype(np.int64)).to(device)
        span = torch.full((len(ids),), self._forward.config["sliding_window"], device=device)
        # With gradients on, so that a GPU reuses the graphs compiled for training.
        index_rows = torch.arange(0, self._num_tokens, 8, device=device) if ids.is_cuda else None
        output = self._forward(weights, Rows(ids[:, :-1], starts, span), mode, index_rows)
        losses, is_right = layers.token_losses(output.hidden, weights["head.weight"], ids[:, 1:])
        return losses.detach().cpu().numpy(), is_right.cpu().numpy()

    def _batches(self, rows: TokenRows) -> list[TokenRows]:
        batches: list[TokenRows] = []
        for start in range(0, len(rows.ids), self._num_rows):
            chosen = np.arange(start, start + self._num_rows) % len(rows.ids)
            batches.append(TokenRows(rows.ids[chosen], rows.weights[chosen], rows.starts[chosen]))
        return batches

    def exact(
        self, weights: dict[str, torch.Tensor], mode: Mode, name: str, num_documents: int
    ) -> dict[str, Any] | None:
        """Return the share of whole answers that are right."""
        rows = self._held_out(name, num_documents)
        if rows is None:
            return None
        right: list[bool] = []
        for batch in self._batches(rows):
            _, is_right = self.run(weights, mode, batch)
            for row in range(self._num_rows):
                right += [bool(is_right[row][run - 1].all()) for run in answers(batch.weights[row])]
        return {"exact": round(float(np.mean(right)), 4), "answers": len(right)}

    def perplexity(self, weights: dict[str, torch.Tensor], mode: Mode, num_rows: int) -> float:
        """Return the perplexity of held-out text."""
        total, count = 0.0, 0
        for batch in self._batches(held_out_text(self.corpus, self._num_tokens, num_rows)):
            losses, _ = self.run(weights, mode, batch)
            counted = batch.weights[:, 1:] == FULL_WEIGHT
            total, count = total + float(losses[counted].sum()), count + int(counted.sum())
        return round(math.exp(total / count), 3)

    def all_tasks(
        self, weights: dict[str, torch.Tensor], mode: Mode, num_documents: int
    ) -> dict[str, Any]:
        """Return the share of right answers of every task and the perplexity of text."""
        found: dict[str, Any] = {}
        for name in draws(self.corpus):
            result = self.exact(weights, mode, name, num_documents)
            if result is not None:
                found[name] = result["exact"]
        num_rows = min(num_documents, len(self.corpus.held_out) // (self._num_tokens + 1))
        whole = max(self._num_rows, num_rows - num_rows % self._num_rows)
        found["perplexity"] = self.perplexity(weights, mode, whole)
        return found


def draft_lengths(corpus: Corpus, trainer: DraftTrainer, num_batches: int = 1) -> dict[str, float]:
    """Return tokens per verify step of each task, drafting along the true answers."""
    phase = trainer.phase
    found: dict[str, float] = {}
    for name in (*draws(corpus), "text"):
        num_documents = phase.num_rows * num_batches
        if name == "text":
            rows = held_out_text(corpus, phase.num_tokens, num_documents)
        else:
            made = held_out(corpus, name, draws(corpus)[name], phase.num_tokens, num_documents)
            if made is None:
                continue
            rows = made
        num_steps, emitted = 0, 0
        for start in range(0, num_documents, phase.num_rows):
            chosen = slice(start, start + phase.num_rows)
            batch = TokenRows(rows.ids[chosen], rows.weights[chosen], rows.starts[chosen])
            places = [_answer_places(weights, phase.num_tokens) for weights in batch.weights]
            anchors = np.stack([np.resize(own, ANCHORS_PER_ROW) for own in places])
            trainer.load(batch, anchors)
            for own, accepted in zip(places, trainer.accepted().cpu().numpy(), strict=True):
                index = 0
                while index < len(own):
                    advance = min(int(accepted[index]) + 1, len(own) - index)
                    num_steps, emitted, index = num_steps + 1, emitted + advance, index + advance
        found[name] = round(emitted / max(1, num_steps), 3)
    return found


def _answer_places(weights: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the longest run of positions before assistant tokens, at most a row of anchors."""
    usable = np.flatnonzero(weights[2 : num_tokens - 8] == FULL_WEIGHT) + 1
    runs = np.split(usable, np.flatnonzero(np.diff(usable) > 1) + 1)
    return max(runs, key=len)[:ANCHORS_PER_ROW] if len(usable) else np.array([2])
