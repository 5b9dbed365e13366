"""Which compressed rows a query reads, and the loss that teaches the indexer to choose them.

The choice passes no gradient, so the indexer learns from the attention it serves: its scores, as a
distribution over the rows, are drawn to the mean attention of the layers that use its selection.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from models.tiny.training.layers import NEVER, compiled_on_gpu, rotate, visible_rows
from models.tiny.training.quantise import fp4_index

if TYPE_CHECKING:
    from models.tiny.training.model import Mode


@dataclass(frozen=True)
class IndexQuery:
    """What the index scores of some positions are made from; gradients stop here."""

    low_rank: Tensor
    u: Tensor
    cos: Tensor
    sin: Tensor

    def at(self, rows: Tensor) -> "IndexQuery":
        """Return the queries of some positions only."""
        return IndexQuery(self.low_rank[:, rows], self.u[:, rows], self.cos[rows], self.sin[rows])


def _scores(
    low_rank: Tensor,
    u: Tensor,
    keys: Tensor,
    wq_b: Tensor,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    rounds: bool,
) -> Tensor:
    num_heads = heads.shape[0]
    query = rotate(
        (low_rank @ wq_b.t()).unflatten(-1, (num_heads, -1)), cos[..., None, :], sin[..., None, :]
    )
    query = fp4_index(query) if rounds else query
    weight = (u @ heads.t()).float() * (query.shape[-1] * num_heads) ** -0.5
    matches = (query.flatten(1, 2) @ keys.mT).unflatten(1, (-1, num_heads))
    return (matches.relu().float() * weight[..., None]).sum(2)


@compiled_on_gpu
def index_scores(
    low_rank: Tensor,
    u: Tensor,
    keys: Tensor,
    wq_b: Tensor,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    rounds: bool,
) -> Tensor:
    """Return the score of every compressed row for every query."""
    return _scores(low_rank, u, keys, wq_b, heads, cos, sin, rounds)


@compiled_on_gpu
def attention_share(query: Tensor, compressed: Tensor, normaliser: Tensor, seen: Tensor) -> Tensor:
    """Return the attention that the mean head pays to each compressed row."""
    heads, width = query.shape[-2:]
    far = ((query * width**-0.5).flatten(1, 2) @ compressed.mT).unflatten(1, (-1, heads)).float()
    return torch.exp(far.masked_fill(~seen[:, :, None], NEVER) - normaliser[..., None]).mean(2)


@compiled_on_gpu
def divergence(
    low_rank: Tensor,
    u: Tensor,
    keys: Tensor,
    wq_b: Tensor,
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    rounds: bool,
    seen: Tensor,
    share: Tensor,
) -> Tensor:
    """Return the mean KL divergence from attention to index scores, over queries with a choice."""
    scores = _scores(low_rank, u, keys, wq_b, heads, cos, sin, rounds)
    log_index = scores.masked_fill(~seen, NEVER).log_softmax(-1)
    total = share.sum(-1, keepdim=True)
    target = share / total.clamp_min(1e-9)
    terms = target * (target.clamp_min(1e-9).log() - log_index)
    counts = ((seen.sum(-1) > 1) & (total.squeeze(-1) > 1e-6)).float()
    return (terms.masked_fill(~seen, 0).sum(-1) * counts).sum() / counts.sum().clamp_min(1)


class Indexer:
    """The selection in force as a forward goes up the layers."""

    def __init__(
        self,
        config: dict[str, Any],
        weights: dict[str, Tensor],
        mode: "Mode",
        starts: Tensor,
        positions: Tensor,
    ) -> None:
        self.config, self.weights, self.mode = config, weights, mode
        self.starts, self.positions = starts, positions
        self.keys: Tensor | None = None
        self.selected: Tensor | None = None
        self.query: IndexQuery | None = None
        self.source = -1
        self._candidates: Tensor | None = None

    def projections(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the index query and head weights of a layer."""
        prefix = f"layers.{layer}.attn.indexer."
        return self.weights[prefix + "wq_b.weight"], self.weights[prefix + "weights_proj.weight"]

    def select(self, layer: int, query: IndexQuery) -> None:
        """Choose the compressed rows for this layer and those that reuse its choice."""
        self.source, self.query = layer, query
        if self.mode.is_sparse:
            with torch.no_grad():
                self.selected = self._top_rows(layer, query)

    def _top_rows(self, layer: int, query: IndexQuery) -> Tensor:
        c = self.config
        assert self.keys is not None
        num_rows = self.keys.shape[1]
        seen = visible_rows(self.positions, self.starts, num_rows)
        where = (query.cos, query.sin, self.mode.rounds_activations)
        scores = index_scores(query.low_rank, query.u, self.keys, *self.projections(layer), *where)
        if self.mode.random_index:
            scores = torch.rand_like(scores)
        scores = scores.masked_fill(~seen, -torch.inf)
        if layer == c["candidate_source_layer_id"]:
            self._candidates = self._top_blocks(scores)
        elif layer > c["candidate_source_layer_id"] and self._candidates is not None:
            scores = scores.masked_fill(~self._candidates, -torch.inf)
        return _top(scores, c["index_topk"])

    def _top_blocks(self, scores: Tensor) -> Tensor:
        """Return the rows of the best blocks; that of a query's newest row is one of them."""
        size = self.config["candidate_block_size"]
        num_rows = scores.shape[-1]
        padding = (0, -num_rows % size)
        best = (
            torch.nn.functional.pad(scores, padding, value=-torch.inf)
            .unflatten(-1, (-1, size))
            .amax(-1)
        )
        ratio = len(self.positions) // num_rows
        newest = ((self.positions + 1) // ratio - 1) // size
        own = torch.arange(best.shape[-1], device=scores.device) == newest[:, None]
        chosen = _top(best.masked_fill(own, torch.inf), self.config["candidate_topk_blocks"])
        return chosen.repeat_interleave(size, -1)[..., :num_rows]


def _top(scores: Tensor, count: int) -> Tensor:
    if count >= scores.shape[-1]:
        return scores > -torch.inf
    indices = scores.topk(count, -1, sorted=False).indices
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, indices, True)
    return chosen & (scores > -torch.inf)


class IndexLoss:
    """Compares the attention of the layers that share a selection with its scores."""

    def __init__(self, indexer: Indexer, rows: Tensor) -> None:
        self._indexer, self._rows = indexer, rows
        self._layer = -1
        self._share: Tensor | None = None
        self._num_layers = 0
        self._terms: list[Tensor] = []
        self._state: tuple[IndexQuery, Tensor, Tensor] | None = None

    def watch(self, layer: int, query: Tensor, compressed: Tensor, normaliser: Tensor) -> None:
        """Add the attention of one layer."""
        indexer, rows = self._indexer, self._rows
        if layer == indexer.source:
            self._close()
            assert indexer.query is not None
            assert indexer.keys is not None
            seen = visible_rows(
                indexer.positions[rows], indexer.starts[:, rows], compressed.shape[1]
            )
            if indexer.selected is not None:
                seen = indexer.selected[:, rows]
            self._state = (indexer.query.at(rows), indexer.keys, seen)
            self._layer, self._share, self._num_layers = layer, None, 0
        assert self._state is not None
        with torch.no_grad():
            share = attention_share(
                query.detach()[:, rows], compressed.detach(), normaliser[:, rows], self._state[2]
            )
        self._share = share if self._share is None else self._share + share
        self._num_layers += 1

    def _close(self) -> None:
        if self._share is None or self._state is None:
            return
        query, keys, seen = self._state
        where = (query.cos, query.sin, self._indexer.mode.rounds_activations)
        projections = self._indexer.projections(self._layer)
        share = self._share / self._num_layers
        self._terms.append(
            divergence(query.low_rank, query.u, keys, *projections, *where, seen, share)
        )

    def total(self) -> Tensor:
        """Return the sum over the index layers."""
        self._close()
        self._share = None
        return torch.stack(self._terms).sum()
