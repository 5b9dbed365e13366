"""Training of the DSpark stages with the main model frozen.

The teacher is the main model's distribution at the true prefix. Each stage starts from the last
decoder layer.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.tiny.training.draft import Anchors, DraftForward
from models.tiny.training.model import Forward, effective_weights
from models.tiny.training.optim import Optimiser
from models.tiny.training.parameters import Parameter
from models.tiny.training.rows import FULL_WEIGHT, TokenRows
from models.tiny.training.schedule import Phase
from models.tiny.training.trainer import BIAS_STEP, GraphedStep, StaticBatch

ANCHORS_PER_ROW = 64
LATER_WEIGHT = 0.8  # of each further token of a block
CONFIDENCE_WEIGHT = 0.1


@torch.no_grad()
def start_from_last_layer(values: dict[str, Tensor], last_layer: int, num_features: int) -> None:
    """Copy the last decoder layer into the draft stages, as far as shapes allow."""
    for name, value in values.items():
        if not name.startswith("mtp."):
            continue
        source = values.get(f"layers.{last_layer}.{name.split('.', 2)[2]}")
        if source is not None and source.shape[1:] == value.shape[1:]:
            value.copy_(source[: len(value)])
        elif name.endswith("main_proj.weight"):
            value.copy_(torch.eye(len(value)).repeat(1, num_features) / num_features)
        elif name.endswith("main_norm.weight"):
            value.fill_(1.0)
        elif name.split(".", 2)[2] == "norm.weight":
            value.copy_(values["norm.weight"])


class DraftTrainer:
    """Holds the step of the draft phase; the main model's values are read only."""

    def __init__(
        self,
        phase: Phase,
        forward: Forward,
        main_parameters: dict[str, Parameter],
        parameters: dict[str, Parameter],
        values: dict[str, Tensor],
        optimiser: Optimiser,
        use_graph: bool,
    ) -> None:
        self.phase, self.forward, self.draft = phase, forward, DraftForward(forward)
        self._parameters, self._values, self._optimiser = parameters, values, optimiser
        device = forward.device
        self._biases = {name: v for name, v in values.items() if name.endswith("gate.bias")}
        with torch.no_grad():
            main = effective_weights(values, main_parameters, phase.mode)
        self._main = {name: value.detach() for name, value in main.items()} | self._biases
        # Marked as trained, so that the main pass reuses what was compiled for training.
        self._teaching = {n: v.detach().requires_grad_() for n, v in main.items()} | self._biases
        self.batch = StaticBatch(phase.num_rows, phase.num_tokens, device)
        self.anchors = torch.zeros(
            (phase.num_rows, ANCHORS_PER_ROW), dtype=torch.long, device=device
        )
        block = self.draft.block_size
        self._decay = (LATER_WEIGHT ** torch.arange(block)).to(device)
        self.lr_share = torch.zeros((), device=device)
        self.sums = torch.zeros(3 + 2 * block, device=device)
        self.state_scale = torch.ones(
            (), device=device
        )  # of the block's states, for the confidence head
        self._step = GraphedStep(self._compute, use_graph)

    def weights(self) -> dict[str, Tensor]:
        """Return main and draft weights as the engine reads them."""
        return self._main | effective_weights(self._values, self._parameters, self.phase.mode)

    def main_pass(self) -> tuple[Tensor, Tensor]:
        """Return the frozen model's hidden states and features for the batch."""
        output = self.forward(self._teaching, self.batch.rows(), self.phase.mode)
        return output.hidden.detach(), output.features.detach()

    def load(self, batch: TokenRows, anchors: np.ndarray) -> None:
        """Copy a batch and its anchors in."""
        self.batch.load(batch, np.full(self.phase.num_rows, self.forward.config["sliding_window"]))
        self.anchors.copy_(torch.from_numpy(anchors))

    def step(self, batch: TokenRows, lr_share: float, rng: np.random.Generator) -> None:
        """Train on one batch."""
        self.load(batch, draw_anchors(batch, self.draft.block_size, rng))
        self.lr_share.fill_(lr_share)
        self._step()

    def measure_states(self) -> None:
        """Set the scale of the states from the loaded batch."""
        weights, (_, features) = self.weights(), self.main_pass()
        states, _ = self.draft(
            weights, self.batch.rows(), features, Anchors(self.anchors), self.phase.mode
        )
        self.state_scale.copy_(states.detach().square().mean().sqrt().clamp_min(1e-3))

    def _compute(self) -> None:
        hidden, features = self.main_pass()
        weights, rows, anchors = self.weights(), self.batch.rows(), Anchors(self.anchors)
        states, loads = self.draft(weights, rows, features, anchors, self.phase.mode)
        base = self.draft.base_logits(weights, states, self.phase.mode)
        places = anchors.targets(self.draft.block_size)
        teacher = self._teacher(hidden, places)
        previous = _at(rows.ids, places)
        added, memory = self.draft.markov(weights, previous)
        log_draft = (base + added).log_softmax(-1)
        is_valid = self._is_valid(places)
        weight = is_valid * self._decay
        loss = (-(teacher * log_draft).sum(-1) * weight).sum() / weight.sum().clamp_min(1)
        overlap = torch.minimum(teacher, log_draft.detach().exp()).sum(-1)
        logits = self.draft.confidence(weights, states.detach() / self.state_scale, memory.detach())
        doubt = F.binary_cross_entropy_with_logits(logits, overlap.clamp(0, 1), reduction="none")
        doubt = (doubt * weight).sum() / weight.sum().clamp_min(1)
        trained = [self._values[name] for name in self._optimiser.names]
        grads = torch.autograd.grad(loss + CONFIDENCE_WEIGHT * doubt, trained)
        self._optimiser.step(list(grads), self.lr_share)
        with torch.no_grad():
            for prefix, load in loads.items():
                bias = self._values[prefix + "ffn.gate.bias"]
                bias += BIAS_STEP * self.lr_share * torch.sign(load.mean() - load)
            agrees = ((log_draft.argmax(-1) == teacher.argmax(-1)) * is_valid).sum(0)
            heads = torch.stack((loss, doubt, torch.ones_like(loss)))
            self.sums += torch.cat((heads, agrees, is_valid.sum(0))).detach()

    def _teacher(self, hidden: Tensor, places: Tensor) -> Tensor:
        at = _at(hidden, places.clamp(max=hidden.shape[1] - 1))
        return (at @ self._main["head.weight"].t()).float().softmax(-1)

    def _is_valid(self, places: Tensor) -> Tensor:
        """Return whether the next token is the assistant's and of the anchor's document."""
        last = self.batch.starts.shape[1] - 1
        own = _at(self.batch.starts, places.clamp(max=last))
        is_answer = _at(self.batch.weights, places.clamp(max=last)) == 1
        return ((own == own[:, :1]) & is_answer & (places <= last)).float()

    def accepted(self) -> Tensor:
        """Return how many drafted tokens the main model accepts at each anchor [rows, anchors]."""
        hidden, features = self.main_pass()
        weights, rows, anchors = self.weights(), self.batch.rows(), Anchors(self.anchors)
        states, _ = self.draft(weights, rows, features, anchors, self.phase.mode)
        base = self.draft.base_logits(weights, states.detach(), self.phase.mode)
        assert torch.isfinite(base).all()
        assert torch.isfinite(hidden).all()
        places = anchors.targets(self.draft.block_size)
        wanted = self._teacher(hidden, places).argmax(-1)
        drafted = self.draft.greedy(weights, base, _at(rows.ids, places)[:, 0])
        agrees = (drafted == wanted).float() * self._is_valid(places)
        return agrees.cumprod(-1).sum(-1).view(self.anchors.shape)

    def read_sums(self) -> dict[str, float | list[float]]:
        """Return the means since the last call, and fail on a number that is not finite."""
        sums = self.sums.tolist()
        self.sums.zero_()
        assert all(np.isfinite(sums)), sums
        (loss, doubt, count), block = sums[:3], self.draft.block_size
        agreement = [
            a / max(1, n) for a, n in zip(sums[3 : 3 + block], sums[3 + block :], strict=True)
        ]
        return {
            "loss": loss / max(1, count),
            "confidence_loss": doubt / max(1, count),
            "agreement": agreement,
        }

    @torch.no_grad()
    def finish(self) -> None:
        """Fold the scale of the states into the confidence head."""
        proj = self._values[self.draft.last + "confidence_head.proj.weight"]
        proj[:, : self.forward.config["hidden_size"]] /= self.state_scale


def _at(values: Tensor, places: Tensor) -> Tensor:
    """Return values [batch, tokens, ...] at places [batch * anchors, block]."""
    batch = values.shape[0]
    by_row = places.view(batch, -1)
    row = torch.arange(batch, device=values.device)[:, None]
    return values[row, by_row].view(*places.shape, *values.shape[2:])


def draw_anchors(batch: TokenRows, block_size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw anchors whose next token is the assistant's."""
    num_tokens = batch.ids.shape[1] - 1
    anchors = np.zeros((len(batch.ids), ANCHORS_PER_ROW), np.int64)
    for row, weights in enumerate(batch.weights):
        # weights[p + 1] is that of the token after position p
        usable = np.flatnonzero(weights[3 : num_tokens - block_size] == FULL_WEIGHT) + 2
        anchors[row] = rng.choice(usable if len(usable) else np.arange(2, 10), ANCHORS_PER_ROW)
    return anchors
