"""Every kernel of a GPU once at small shapes: for compute-sanitizer, which slows each down.

`python -m tests.kernels.small_forwards [decode] [prefill] [sample]`; all without arguments.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from kernels.engram.constants import table_primes
from kernels.sampling.sample_cuda import (
    CHANGE,
    MaskFlag,
    SampleBuffers,
    put_records,
    sample_rows,
)
from kernels.sampling.scores_cuda import token_scores
from kernels.step.slots_portable import Sampling
from services.executor.batch import BatchRow, StepBatch
from services.executor.gpu.model import DeviceModel
from services.executor.gpu.random_model import random_device_model
from services.executor.kv_cache import KvCache
from services.executor.presets import preset_config

SMALL = {
    "vocab_size": 512,
    "hidden_size": 512,
    "moe_intermediate_size": 128,
    "num_attention_heads": 8,
    "q_lora_rank": 128,
    "o_lora_rank": 128,
    "o_groups": 2,
    "n_routed_experts": 32,
    "index_topk": 64,
    "candidate_topk_blocks": 12,
    "dspark_noise_token_id": 5,
    "engram_vocab_size": 64,
    "engram_n_heads": 2,
    "engram_head_dim": 64,
}
PROMPT, LONGER, STEPS = 150, 40, 2


def small_config() -> dict[str, Any]:
    """V4.1-Flash with fewer and narrower linears, heads and experts; rows as wide as there."""
    raw = preset_config("v41-flash", layers=6)
    raw["text_config"] |= SMALL
    text = raw["text_config"]
    heads, size = text["engram_n_heads"], text["engram_vocab_size"]
    count, order = len(text["engram_layer_ids"]), text["engram_max_ngram_size"]
    text["engram_num_embeddings"] = [sum(own) for own in table_primes(count, order, heads, size)]
    return raw


class Requests:
    """Three requests of their own blocks, and what they have computed."""

    def __init__(self, model: DeviceModel) -> None:
        self.model = model
        self.cache = KvCache(model.config, 12, 12, 3, device="cuda")
        generator = torch.Generator().manual_seed(1)
        count = PROMPT + LONGER
        self.ids = torch.randint(20, 512, (3, count), generator=generator).tolist()

    def row(self, index: int, start: int, end: int) -> BatchRow:
        """Positions of a request."""
        blocks = range(4 * index, 4 * index + 4)
        ids = self.ids[index]
        before = ids[max(0, start - self.model.config.context_ids) : start]
        return BatchRow(ids[start:end], start, blocks, blocks, index, context=before)

    def batch(self, *rows: BatchRow) -> StepBatch:
        """Of one step."""
        return StepBatch.build(list(rows), self.model.config.context_ids)


def decode(requests: Requests) -> Tensor:
    """The forward of decode kernels: single tokens, some behind prompts that it computes, too."""
    model, cache = requests.model, requests.cache
    model.launch(requests.batch(requests.row(0, 0, PROMPT), requests.row(1, 0, 70)), cache)
    out = torch.empty(0)
    for step in range(STEPS):
        rows = (requests.row(i, n, n + 1) for i, n in ((0, PROMPT + step), (1, 70 + step)))
        out = model.launch(requests.batch(*rows, requests.row(2, step, step + 1)), cache).logits
    return out


def prefill(requests: Requests) -> Tensor:
    """The forward of prompts: chunks beside each other."""
    model, cache = requests.model, requests.cache
    assert model.prefill is not None, "these shapes have no kernels for prompts"
    model.prefill.forward(requests.batch(requests.row(0, 0, 100), requests.row(1, 0, 33)), cache)
    rows = requests.row(0, 100, PROMPT), requests.row(1, 33, 40), requests.row(2, 0, 1)
    return model.prefill.forward(requests.batch(*rows), cache).logits


def sample(logits: Tensor) -> Tensor:
    """The sampler: greedy, drawn from all ids, and behind each filter, with log-probabilities."""
    logits = logits[torch.arange(8, device=logits.device) % len(logits)].float()
    count, vocab = logits.shape
    device = logits.device
    buffers = SampleBuffers.of(count, vocab, count, device)
    asks = [  # temperature, top_p, min_p, top_k; number of best ids
        (0.0, 1.0, 0.0, 0, 20),
        (1.0, 1.0, 0.0, 0, -1),
        (1.0, 0.9, 0.0, 0, 20),
        (1.0, 1.0, 0.0, 40, 0),
        (1.0, 0.7, 0.0, 400, 5),
        (2.0, 0.999, 0.05, 0, -1),
        (0.3, 0.5, 0.1, 7, 20),
        (0.0, 0.5, 0.0, 3, 1),
    ]
    changes = b"".join(
        CHANGE.pack(slot, *own, 0.0, 0.0, 1.0, 0, 9, 0, 0, 0, num_top)
        for slot, (*own, num_top) in enumerate(asks)
    )
    on_device = torch.frombuffer(bytearray(changes), dtype=torch.int32).to(device)
    put_records(on_device.data_ptr(), count, buffers)
    buffers.states[::2] = MaskFlag.MASK
    buffers.masks.random_(-(2**31), 2**31 - 1)
    rows = torch.tensor([[i, 1, int(Sampling.TOKEN)] for i in range(count)], dtype=torch.int32)
    starts = torch.full((count,), PROMPT, dtype=torch.int32, device=device)
    sample_rows(logits, rows.to(device), starts, buffers)
    token_scores(logits, buffers.out.tokens, 20)
    return buffers.out.tokens


def main() -> int:
    """0 if all results are finite."""
    wanted = sys.argv[1:] or ["decode", "prefill", "sample"]
    requests = Requests(random_device_model(small_config()))
    logits = torch.randn(3, 512, device="cuda")
    if "decode" in wanted:
        logits = decode(requests)
    if "prefill" in wanted:
        logits = prefill(requests)
    if "sample" in wanted:
        print("tokens", sample(logits).tolist())
    torch.cuda.synchronize()
    print("finite", bool(torch.isfinite(logits).all()))
    return 0 if torch.isfinite(logits).all() else 1


if __name__ == "__main__":
    sys.exit(main())
