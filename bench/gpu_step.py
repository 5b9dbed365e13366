"""Whole steps of a slice of V4.1-Flash on a GPU beside what they must read.

`make bench NAME=gpu_step ARGS=--json`. Random weights of real shape, made on the device; rows with
a context of `--context` tokens in pools of random rows. A step is timed as the executor runs it:
from the batch in host memory to the logits there, operation by operation. The floor is what must be
read, experts expected under uniform routing, over the rate of a plain read-only sum of the run.
"""

import argparse
import statistics
import sys
import time

import torch

from bench.gpu_experts import read_rate
from deepmesh.report import Json, publish, report
from services.executor.batch import BatchRow, StepBatch
from services.executor.gpu.model import DeviceModel
from services.executor.gpu.random_model import random_device_model
from services.executor.kv_cache import KvCache
from services.executor.kv_sizes import kv_sizes
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.presets import preset_config
from services.executor.tensor_specs import tensor_specs

BATCHES = (1, 16, 64, 256)
PROMPTS = (512, 2048)
REPEATS = 7
NEXT_BLOCKS = 1  # behind the context, for what the step writes
UE8M0_ONE, E4M3_ONE = 127, 0x38


def filled_cache(config: ModelConfig, blocks: int, windows: int) -> KvCache:
    """Pools of random codes, all with scales near one."""
    cache = KvCache(config, blocks, windows, 512, device="cuda")
    pools = [cache.window, *cache.compressed.values(), *cache.index_keys.values()]
    for pool in pools:
        pool.random_(0, 120)
    codes = {528: (512, UE8M0_ONE - 9), 288: (256, E4M3_ONE), 68: (64, UE8M0_ONE)}
    for pool in pools[: -len(cache.index_keys)]:
        first, scale = codes[pool.shape[-1]]
        pool[..., first:] = scale
    for source, keys in cache.index_keys.items():  # codes of a block's keys, then their scales
        entries = BLOCK_TOKENS // config.compress_ratios[source]
        keys.view(-1, entries * keys.shape[1])[:, entries * codes[68][0] :] = UE8M0_ONE
    return cache


def decode_batch(config: ModelConfig, rows: int, context: int) -> StepBatch:
    """A token for each of `rows` requests of `context` tokens."""
    width = -(-(context + 1) // BLOCK_TOKENS)
    held = -(-config.sliding_window // BLOCK_TOKENS) + 1
    made = [
        BatchRow(
            ids=[5 + row],
            start=context,
            global_blocks=range(row * width, (row + 1) * width),
            window_blocks=[-1] * (width - held) + list(range(row * held, (row + 1) * held)),
            state_block=row,
            context=[7, 8, 9 + row],
        )
        for row in range(rows)
    ]
    return StepBatch.build(made, config.context_ids)


def prefill_batch(config: ModelConfig, tokens: int) -> StepBatch:
    """A prompt from its beginning; the logits of its last token."""
    blocks = range(-(-tokens // BLOCK_TOKENS))
    ids = torch.randint(0, config.vocab_size, (tokens,)).tolist()
    return StepBatch.build([BatchRow(ids, 0, blocks, blocks, 0)], config.context_ids)


def floor_bytes(config: ModelConfig, rows: int, context: int) -> float:
    """What a decode step reads at least: weights once, rows of each request."""
    dense = experts = 0
    for spec in tensor_specs(config):
        if ".experts." in spec.name:
            experts += spec.num_bytes
        elif ".engram.embed." not in spec.name and spec.name != "embed.weight":
            dense += spec.num_bytes
    share = 1 - (1 - config.num_experts_per_tok / config.n_routed_experts) ** rows
    sizes, layers = kv_sizes(config), config.num_hidden_layers
    compressed = sum(ratio > 0 for ratio in config.compress_ratios[:layers])
    attended = sizes.window_block // BLOCK_TOKENS * config.sliding_window
    attended += compressed * config.index_topk * (config.head_dim // 2 + config.head_dim // 16)
    key = config.index_head_dim // 2 + config.index_head_dim // 32
    keys = sum(context // config.compress_ratios[i] for i in config.index_source_layer_ids) * key
    return dense + share * experts + rows * (attended + keys)


def times_us(model: DeviceModel, batch: StepBatch, cache: KvCache) -> list[float]:
    """Sorted times of a step."""
    found: list[float] = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        began = time.perf_counter()
        model.forward(batch, cache)
        found.append(1e6 * (time.perf_counter() - began))
    return sorted(found[2:])


def show_operations(model: DeviceModel, batch: StepBatch, cache: KvCache) -> None:
    """Where the device's time of one step goes, to stderr."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        model.forward(batch, cache)
    table = profile.key_averages().table(sort_by="cuda_time_total", row_limit=16)
    lines = [line[:60] + line[-90:] for line in table.splitlines()]
    print("\n".join(lines), file=sys.stderr, flush=True)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--prompt", type=int, action="append")
    parser.add_argument("--operations", action="store_true", help="of the step with 16 rows")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 1
    torch.manual_seed(0)
    rate = read_rate()
    torch.cuda.empty_cache()
    began = time.perf_counter()
    model = random_device_model(preset_config("v41-flash", layers=arguments.layers))
    loaded_s = time.perf_counter() - began
    config, batches = model.config, arguments.batch or list(BATCHES)
    context, prompts = arguments.context, arguments.prompt or list(PROMPTS)
    blocks = max(batches) * (context // BLOCK_TOKENS + NEXT_BLOCKS)
    windows = max(max(batches) * 4, *(-(-tokens // BLOCK_TOKENS) for tokens in prompts))
    cache = filled_cache(config, blocks, windows)
    cases: list[dict[str, Json]] = []

    def say(case: dict[str, Json]) -> None:
        cases.append(case)
        print(case, file=sys.stderr, flush=True)

    for rows in batches:
        batch = decode_batch(config, rows, context)
        found = times_us(model, batch, cache)
        floor = 1e6 * floor_bytes(config, rows, context) / rate
        say(
            {
                "device": "cuda",
                "op": "decode step",
                "shape": f"B={rows}",
                "ours_us": round(statistics.median(found)),
                "best_us": round(found[0]),
                "floor_us": round(floor),
                "share_of_floor": round(floor / statistics.median(found), 4),
            }
        )
        if arguments.operations and rows == 16:
            show_operations(model, batch, cache)
    for tokens in prompts:
        found = times_us(model, prefill_batch(config, tokens), cache)
        median = statistics.median(found)
        say(
            {
                "device": "cuda",
                "op": "prefill",
                "shape": f"{tokens} tokens",
                "ours_us": round(median),
                "best_us": round(found[0]),
                "tokens_per_s": round(1e6 * tokens / median),
            }
        )
    described: dict[str, Json] = {
        "read_gbps": round(rate / 1e9, 1),
        "layers": arguments.layers,
        "context": context,
        "load_s": round(loaded_s, 1),
        "memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
    }
    name = torch.cuda.get_device_name()
    found = report("bench gpu_step", config=described, cases=cases, ok=True, gpu=name)
    publish(found, name="gpu_step", as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
