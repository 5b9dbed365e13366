"""The sampler: a step's rows, from logits to tokens, by what their requests ask for."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from bench.gpu.timing import Rates, graph_us
from bench.sampling import KINDS, rows_of
from deepmesh.report import Json
from services.executor.gpu.sampler import DeviceSampler

VOCAB = 129_280
SETS_BYTES = 160 << 20  # logits in turn, so that those of one call hardly wait in the L2
MAX_SETS = 8


def sample_cases(rates: Rates, batches: list[int]) -> Iterator[dict[str, Json]]:
    """The floor is one read of the logits."""
    for batch in batches:
        read = 4.0 * batch * VOCAB
        sets = max(1, min(MAX_SETS, round(SETS_BYTES / read)))
        logits = [torch.randn(batch, VOCAB, device="cuda") * 3 for _ in range(sets)]
        for kind in KINDS:
            ours = _sampler(kind, batch)
            times = graph_us(lambda at, ours=ours, x=logits: ours(x[at]), sets)
            case = rates.case("sample", f"{kind} B={batch}", times, read=read)
            if peer := PEERS.get(kind):
                peer_us, _ = graph_us(lambda at, peer=peer, x=logits: peer(x[at]), sets)
                case["peers"] = {"torch": round(peer_us, 2)}
            yield case


def _sampler(kind: str, batch: int) -> Callable[[Tensor], None]:
    sampler = DeviceSampler(batch, VOCAB, batch, torch.device("cuda"))
    for slot, row in enumerate(rows_of(kind, batch, VOCAB)):
        sampler.stage(row._replace(init=replace(row.init, slot=slot)))
    sampler.flush(_copy)
    given = [[slot, 1, 1] for slot in range(batch)]
    rows = torch.tensor(given, dtype=torch.int32, device="cuda")
    starts = torch.full((batch,), 1000, dtype=torch.int32, device="cuda")
    return lambda logits: sampler.sample(logits, rows, starts)


def _copy(to: Tensor, values: NDArray[np.int32]) -> None:
    to.copy_(torch.from_numpy(values))


def _greedy(logits: Tensor) -> Tensor:
    return logits.argmax(1)


def _temperature(logits: Tensor) -> Tensor:
    """By an exponential race, the shortest way in torch."""
    chances = logits.softmax(1)
    return (chances / torch.empty_like(chances).exponential_()).argmax(1)


def _top_k(logits: Tensor) -> Tensor:
    best = logits.topk(40, 1)
    return best.indices.gather(1, _temperature(best.values)[:, None])


def _top_p(logits: Tensor) -> Tensor:
    ranked, order = logits.sort(1, descending=True)
    chances = ranked.softmax(1)
    left = chances.masked_fill(chances.cumsum(1) - chances >= 0.9, 0.0)
    drawn = (left / torch.empty_like(left).exponential_()).argmax(1)
    return order.gather(1, drawn[:, None])


PEERS: dict[str, Callable[[Tensor], Tensor]] = {
    "greedy": _greedy,
    "temperature": _temperature,
    "top_k 40": _top_k,
    "top_p 0.9": _top_p,
}
