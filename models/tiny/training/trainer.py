"""One optimisation step of the main model, replayed as a CUDA graph where there is a GPU."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from models.tiny.training import layers
from models.tiny.training.model import Forward, Output, Rows, effective_weights
from models.tiny.training.optim import Optimiser
from models.tiny.training.parameters import Parameter
from models.tiny.training.rows import FULL_WEIGHT, TokenRows
from models.tiny.training.schedule import Phase

INDEX_ROWS_SHARE = 8  # one query in so many teaches the indexer in a step
BIAS_STEP = 0.002
NUM_GRAPH_WARMUPS = 3


class StaticBatch:
    """The device tensors that a step reads; their addresses never change."""

    def __init__(self, num_rows: int, num_tokens: int, device: torch.device) -> None:
        shape = (num_rows, num_tokens)
        self.ids = torch.zeros((num_rows, num_tokens + 1), dtype=torch.long, device=device)
        self.weights = torch.zeros(shape, device=device)
        self.starts = torch.zeros(shape, dtype=torch.long, device=device)
        self.span = torch.zeros(num_rows, dtype=torch.long, device=device)

    def load(self, batch: TokenRows, span: np.ndarray) -> None:
        """Copy a batch in."""
        self.ids.copy_(torch.from_numpy(batch.ids.astype(np.int64)))
        self.weights.copy_(torch.from_numpy(batch.weights[:, 1:].astype(np.float32) / FULL_WEIGHT))
        self.starts.copy_(torch.from_numpy(batch.starts[:, :-1].astype(np.int64)))
        self.span.copy_(torch.from_numpy(span.astype(np.int64)))

    def rows(self) -> Rows:
        """Return what a forward reads."""
        return Rows(self.ids[:, :-1], self.starts, self.span)


def draw_spans(phase: Phase, rng: np.random.Generator) -> np.ndarray:
    """Draw the window width of each row."""
    widths, shares = zip(*phase.spans, strict=True)
    return rng.choice(widths, phase.num_rows, p=shares)


class GraphedStep:
    """Runs a function of static tensors; on a GPU, records it once warm and replays it."""

    def __init__(self, function: Callable[[], None], use_graph: bool) -> None:
        self._function, self._use_graph = function, use_graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._num_calls = 0

    def __call__(self) -> None:
        self._num_calls += 1
        if self._graph is not None:
            self._graph.replay()
        elif not self._use_graph:
            self._function()
        elif self._num_calls <= NUM_GRAPH_WARMUPS:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._function()
            torch.cuda.current_stream().wait_stream(stream)
        else:
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._function()
            self._graph.replay()


class MainTrainer:
    """Holds the step of one phase over the shared parameter values."""

    def __init__(
        self,
        phase: Phase,
        forward: Forward,
        parameters: dict[str, Parameter],
        values: dict[str, Tensor],
        optimiser: Optimiser,
        use_graph: bool,
    ) -> None:
        self.phase, self.forward = phase, forward
        self._parameters, self._values, self._optimiser = parameters, values, optimiser
        self._biases = {
            n: v for n, v in values.items() if n.startswith("layers.") and n.endswith("gate.bias")
        }
        device = forward.device
        self.batch = StaticBatch(phase.num_rows, phase.num_tokens, device)
        self._index_rows = torch.zeros(
            phase.num_tokens // INDEX_ROWS_SHARE, dtype=torch.long, device=device
        )
        self.lr_share = torch.zeros((), device=device)
        self.sums = torch.zeros(6, device=device)
        self._step = GraphedStep(self._compute, use_graph)

    def weights(self) -> dict[str, Tensor]:
        """Return the weights as this phase reads them."""
        return effective_weights(self._values, self._parameters, self.phase.mode) | self._biases

    def step(self, batch: TokenRows, lr_share: float, rng: np.random.Generator) -> None:
        """Train on one batch."""
        self.batch.load(batch, draw_spans(self.phase, rng))
        size = len(self._index_rows)
        rows = rng.choice(self.phase.num_tokens, size, replace=False)
        self._index_rows.copy_(torch.from_numpy(np.sort(rows)))
        self.lr_share.fill_(lr_share)
        self._step()

    def _compute(self) -> None:
        weights = self.weights()
        batch = self.batch
        output = self.forward(weights, batch.rows(), self.phase.mode, self._index_rows)
        losses, is_right = layers.token_losses(
            output.hidden, weights["head.weight"], batch.ids[:, 1:]
        )
        loss = (losses * batch.weights).sum() / batch.weights.sum().clamp_min(1)
        trained = [self._values[name] for name in self._optimiser.names]
        grads = torch.autograd.grad(loss + output.index_loss, trained)
        norm = self._optimiser.step(list(grads), self.lr_share)
        self._balance(output)
        full = batch.weights == 1
        accuracy = (is_right & full).sum() / full.sum().clamp_min(1)
        loads = torch.stack(list(output.loads.values()))
        imbalance = (loads.amax(-1) / loads.mean(-1)).amax()
        now = (loss, output.index_loss, accuracy, norm, imbalance, torch.ones_like(loss))
        self.sums += torch.stack([value.detach().float() for value in now])

    @torch.no_grad()
    def _balance(self, output: Output) -> None:
        """Move the router biases towards equal loads."""
        for prefix, load in output.loads.items():
            bias = self._values[prefix + "ffn.gate.bias"]
            bias += BIAS_STEP * self.lr_share * torch.sign(load.mean() - load)

    def read_sums(self) -> dict[str, float]:
        """Return the means since the last call, and fail on a number that is not finite."""
        *sums, count = self.sums.tolist()
        self.sums.zero_()
        names = ("loss", "index_loss", "accuracy", "grad_norm", "imbalance")
        means = {name: value / max(1, count) for name, value in zip(names, sums, strict=True)}
        assert all(np.isfinite(list(means.values()))), means
        return means
