"""A long prompt's chunk cut over ranks: even work, and the bits of one rank."""

import functools
import itertools
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from bench.accounting import prefill_flops
from bench.context import work_shares
from deepmesh.context_cut import cut
from deepmesh.wire.messages import Pool
from kernels.comm.gloo import GlooExchange
from services.executor.batch import StepBatch
from services.executor.context_parallel import ALIGN, prompt_work, tail_start, token_work
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS, ModelConfig, load_config, parse_config
from services.executor.models.context_part import ContextPart
from services.executor.presets import preset_config
from services.executor.weights import load_model
from tests.model.driving import (
    FIXTURE,
    Request,
    cache_for,
    fixture_model,
    poisoned_cache,
    random_ids,
    same_bits,
)

CHUNK = 256


def released() -> ModelConfig:
    raw = preset_config("v41-flash")
    raw["text_config"]["engram_compressed_vocab_size"] = 1
    return parse_config(raw)


# ------------------------------------------------------------ the cut


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("start", [0, 8192, 65536])
def test_work_is_even_at_8k_tokens(ranks: int, start: int) -> None:
    config = released()
    work = token_work(config, start, start + 8192)
    bounds = cut(work.encoder, start, ranks, least=config.sliding_window, align=ALIGN)
    assert (bounds[0], bounds[-1], len(bounds)) == (start, start + 8192, ranks + 1)
    assert all(bound % ALIGN == 0 for bound in bounds)
    encoder = [part[0] for part in work.of_parts([bound - start for bound in bounds])]
    assert sum(encoder) == work.encoder.sum()
    assert max(encoder) <= 1.05 * min(encoder)


def test_later_tokens_cost_more_so_equal_lengths_are_not_even() -> None:
    config = released()
    work = token_work(config, 0, 1 << 18)
    halves = [part[0] for part in work.of_parts([0, 1 << 17, 1 << 18])]
    assert halves[1] > 1.05 * halves[0]
    bounds = cut(work.encoder, 0, 2, least=config.sliding_window, align=ALIGN)
    assert bounds[1] > 1 << 17
    first, second = (part[0] for part in work.of_parts(bounds))
    assert abs(first - second) < 0.01 * first


def test_the_decoder_half_is_the_tails() -> None:
    config = released()
    assert tail_start(config, 8192) == 8192 - 128 - 20 * 127
    assert tail_start(config, 100) == 0
    work, tail = token_work(config, 0, 8192), tail_start(config, 8192)
    bounds = cut(work.encoder, 0, 2, least=config.sliding_window, align=ALIGN)
    decoder = [part[1] for part in work.of_parts(bounds, tail)]
    assert decoder == [0, work.decoder[tail:].sum()]


@pytest.mark.parametrize(("ranks", "chunk"), [(2, 512), (2, 4096), (4, 512)])
def test_a_prompt_of_8k_tokens_is_even_work_over_its_chunks(ranks: int, chunk: int) -> None:
    shares = work_shares(released(), 8192, chunk, ranks)
    assert len(shares) == ranks
    assert max(shares) <= 1.05


@pytest.mark.parametrize("start", [0, 1024, 8192, 131072])
def test_cuts_by_what_the_scheduler_is_told_are_as_even(start: int) -> None:
    config = released()
    told, work = prompt_work(config), token_work(config, start, start + 8192).encoder
    positions = np.arange(start, start + 8192)
    guessed = np.interp(positions, told.positions, told.work)
    bounds = cut(guessed, start, 4, least=config.sliding_window, align=told.align)
    parts = [int(work[a - start : b - start].sum()) for a, b in itertools.pairwise(bounds)]
    assert max(parts) <= 1.02 * min(parts)
    assert np.abs(guessed / work - 1).max() < 0.01


def test_work_is_that_of_the_prefill_benchmark() -> None:
    config = load_config(FIXTURE)
    work = token_work(config, 0, 500)
    scores = 2 * config.index_n_heads * config.index_head_dim
    keys = 0
    for layer in config.index_source_layer_ids:
        visible = (torch.arange(500) + 1) // config.compress_ratios[layer]
        scored = torch.where(visible > config.index_topk, visible, 0)
        if config.uses_candidates(layer):
            most = config.candidate_topk_blocks * config.candidate_block_size
            scored = scored.clamp_max(most)
        keys += int(scored.sum())
    total = 2 * int(work.encoder.sum() + work.decoder.sum())
    head = 2 * config.vocab_size * config.hidden_size
    drafts = prefill_flops(config, 500) - head - (total - scores * keys)
    assert 0 < drafts < 0.2 * total  # the draft stages' window rows, which are cheap and even


def test_a_chunk_that_is_too_short_for_its_parts_is_refused() -> None:
    config = load_config(FIXTURE)
    work = token_work(config, 0, 40).encoder
    with pytest.raises(ValueError, match="40 tokens are too few for 3 parts of 16"):
        cut(work, 0, 3, least=config.sliding_window, align=ALIGN)
    assert cut(work, 0, 2, least=16, align=ALIGN) == [0, 16, 40]


# ------------------------------------------------------------ the model


def prefill_over(
    ranks: int, ids: Sequence[int], chunk: int, numerics: str, *, whole: bool
) -> tuple[Tensor, Tensor, KvCache]:
    """Last logits, the tail's features and the cache of the rank that has the tail."""
    store, config = HashStore(), load_config(FIXTURE)
    num_blocks, window = -(-len(ids) // BLOCK_TOKENS), config.sliding_window
    tail = 0 if whole else tail_start(config, len(ids))

    def run(rank: int) -> tuple[Tensor, Tensor, KvCache]:
        torch.set_num_threads(1)
        options = dist.ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=30)
        group = dist.ProcessGroupGloo(store, rank, ranks, options)
        exchange = GlooExchange(group, threading.Event(), patience_s=30)
        model = load_model(FIXTURE, numerics, rank=rank, ranks=ranks, exchange=exchange)
        cache = poisoned_cache(model, num_blocks, num_blocks, 1)
        blocks = [(block + 1 + rank) % num_blocks for block in range(num_blocks)]
        request = Request(ids, blocks, blocks, 0)
        logits = features = torch.zeros(0)
        for start in range(0, len(ids), chunk):
            end = min(start + chunk, len(ids))
            work = token_work(config, start, end).encoder
            bounds = cut(work, start, ranks, least=window, align=ALIGN)
            request.done = bounds[rank]
            width = bounds[rank + 1] - bounds[rank]
            is_last = rank == ranks - 1 and end == len(ids)
            batch = StepBatch.build([request.row(width, 1 if is_last else 0)])
            exchange.begin(start, end - start)
            part = ContextPart(rank, bounds, tail, exchange)
            out = model.forward_part(batch, cache, part)
            logits, features = out.logits, out.features
        del group
        exchange.close()
        return logits, features, cache

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))[-1]


@functools.cache
def one_rank(length: int, numerics: str) -> tuple[Tensor, Tensor, KvCache]:
    """The same of one rank, in one chunk."""
    model, ids = fixture_model(numerics), random_ids(length, length)
    blocks = range(-(-length // BLOCK_TOKENS))
    cache = cache_for(model, len(blocks), len(blocks), 1)
    out = model.forward(StepBatch.build([Request(ids, blocks, blocks, 0).row(length, 1)]), cache)
    return out.logits, out.features, cache


def rows_of(cache: KvCache, length: int, shift: int) -> tuple[list[Tensor], Tensor]:
    """Compressed rows and index keys by position, and window rows of the last positions."""
    config, num_blocks = cache.config, cache.num_blocks[Pool.GLOBAL]
    blocks = (torch.arange(-(-length // BLOCK_TOKENS)) + shift) % num_blocks
    entries: list[Tensor] = []
    for source in config.kv_source_layer_ids:
        ratio = config.compress_ratios[source]
        for rows in (cache.compressed[source], cache.index_keys[source]):
            by_block = rows.unflatten(0, (-1, BLOCK_TOKENS // ratio))
            entries.append(by_block[blocks].flatten(0, 1)[: length // ratio])
    window = cache.window.unflatten(1, (-1, BLOCK_TOKENS))[:, blocks].flatten(1, 2)
    return entries, window[:, length - config.sliding_window : length]


@pytest.mark.parametrize("numerics", ["exact", "fp32", "bf16"])
@pytest.mark.parametrize(("ranks", "length"), [(2, 395), (3, 512)])
@pytest.mark.parametrize("whole", [True, False])
def test_bits_are_those_of_one_rank(numerics: str, ranks: int, length: int, whole: bool) -> None:
    ids = random_ids(length, length)
    logits, features, cache = prefill_over(ranks, ids, CHUNK, numerics, whole=whole)
    wanted_logits, wanted_features, wanted_cache = one_rank(length, numerics)
    window = cache.config.sliding_window
    assert same_bits(logits, wanted_logits)
    assert same_bits(features[-window:], wanted_features[-window:])
    entries, rows = rows_of(cache, length, ranks)
    wanted_entries, wanted_rows = rows_of(wanted_cache, length, 0)
    for ours, wanted in zip(entries, wanted_entries, strict=True):
        assert torch.equal(ours.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(
        rows.contiguous().view(torch.uint8), wanted_rows.contiguous().view(torch.uint8)
    )
    state = cache.pairs[0], wanted_cache.pairs[0]
    if length % 2:
        assert torch.equal(*state)
