"""What the router of a model chooses for real text, counted in every layer."""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bench.watcher import Watcher
from services.executor.batch import BatchRow, StepBatch
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS
from services.executor.weights import load_model

ROOT = Path(__file__).parents[1]
PROMPT = 64  # tokens of each of the prompts of a step


def record(
    model: Path, records: int, tokens: int, seed: int = 0
) -> tuple[NDArray[np.float64], int]:
    """[layers, records, experts], and experts of a token."""
    torch.set_num_threads(1)
    plain = load_model(model, "bf16")
    config = plain.config
    num_experts, steps = config.n_routed_experts, list[NDArray[np.int64]]()
    watcher = Watcher(lambda ids: steps.append(np.bincount(ids.flatten(), minlength=num_experts)))
    spread = type(plain)(config, plain.weights, "bf16", watcher)
    prompts = max(1, tokens // PROMPT)
    ids = _text_ids(model, records * prompts * PROMPT, seed)
    blocks = -(-PROMPT // BLOCK_TOKENS)
    cache = KvCache(config, prompts * blocks, prompts * blocks, prompts)
    for step in ids.reshape(records, prompts, PROMPT):
        rows = [
            BatchRow(
                ids=prompt,
                start=0,
                global_blocks=range(at * blocks, (at + 1) * blocks),
                window_blocks=range(at * blocks, (at + 1) * blocks),
                state_block=at,
                context=(),
            )
            for at, prompt in enumerate(step)
        ]
        spread.forward(StepBatch.build(rows, config.context_ids), cache)
    counts = np.array(steps, np.float64).reshape(records, config.num_hidden_layers, -1)
    return counts.swapaxes(0, 1), config.num_experts_per_tok


def _text_ids(model: Path, count: int, seed: int) -> NDArray[np.int32]:
    """Pieces of PROMPT ids from anywhere in the repository's own texts, `count` ids in all."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "kernels/moe").glob("*.py"))]
    ids = np.concatenate([tokenizer.encode(text.read_text()).ids for text in texts])
    starts = np.random.default_rng(seed).integers(0, len(ids) - PROMPT, count // PROMPT)
    return ids[starts[:, None] + np.arange(PROMPT)].astype(np.int32).reshape(-1)
