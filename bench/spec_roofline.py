"""What drafts could be worth if a step took as long as its weights take to be read.

Experts are counted as touched by uniform routing; KV is left out, which short requests have
little of. A bound for small batches: where rows are many, arithmetic is what takes time.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass

from kernels.quant.linear import LinearWeight
from services.executor.model_config import ModelConfig
from services.executor.models.parameters import LayerWeights, ModelWeights


class Roofline:
    """Bytes of the steps and draft passes of one model."""

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        draft = weights.draft
        assert draft is not None
        self.config = config
        self._top_k = config.num_experts_per_tok
        self._draft_top_k, self._size = config.dspark_num_experts_per_tok, config.dspark_block_size
        self._head = _bytes(weights.head)
        feed = _bytes(draft.main_proj) + sum(_bytes(s.attention.down) for s in draft.stages)
        layers, stages = weights.layers, draft.stages
        self._dense = sum(map(_dense, layers)) + self._head + feed
        self._experts, self._expert = _experts(layers)
        self._draft_dense = sum(map(_dense, stages)) + self._head + _bytes(draft.confidence)
        self._draft_experts, self._draft_expert = _experts(stages)
        self._markov = _bytes(draft.markov_head)

    def step(self, tokens: int) -> float:
        """Bytes of a step of the main model with so many tokens."""
        return self._dense + self._expert * _touched(self._experts, self._top_k, tokens)

    def draft(self, rows: int, places: int) -> float:
        """Bytes of a draft pass."""
        touched = _touched(self._draft_experts, self._draft_top_k, rows * self._size)
        return self._draft_dense + self._draft_expert * touched + places * self._markov

    def ratio(self, rows: int, draft_len: int, tokens_per_step: float) -> float:
        """Throughput against that without drafts, at best."""
        spent = self.step(rows * (1 + draft_len)) + self.draft(rows, draft_len)
        return tokens_per_step * self.step(rows) / spent

    def best_ratio(self, rows: int, tokens_per_step: Sequence[float]) -> float:
        """Of all draft lengths from 0 on, with the tokens that each brings."""
        found = [
            self.ratio(rows, length, tokens_per_step[length])
            for length in range(1, len(tokens_per_step))
        ]
        return max([1.0, *found])


def _touched(experts: int, top_k: int, tokens: int) -> float:
    return experts * (1.0 - (1.0 - top_k / experts) ** tokens)


def _experts(layers: Iterable[LayerWeights]) -> tuple[int, float]:
    """Routed experts of a layer, and the bytes that one of each layer has."""
    layers = list(layers)
    count = layers[0].moe.w13.groups
    whole = sum(_bytes(layer.moe.w13) + _bytes(layer.moe.w2) for layer in layers)
    return count, whole / count


def _dense(layer: LayerWeights) -> float:
    """All linears of a layer but its routed experts."""
    routed = _bytes(layer.moe.w13) + _bytes(layer.moe.w2)
    return sum(map(_bytes, _linears(layer))) - routed


def _linears(part: object) -> Iterable[LinearWeight]:
    if isinstance(part, LinearWeight):
        yield part
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from _linears(getattr(part, field.name))


def _bytes(weight: LinearWeight) -> float:
    return float(weight.data.numel() * weight.data.element_size())
