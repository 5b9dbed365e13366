"""What benchmarks say must be read and multiplied, against counts by hand."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from bench.accounting import Touched, kv_bytes, prefill_flops, weight_bytes
from bench.offline import Offline, random_rows
from services.executor.model_config import ModelConfig, load_config
from services.executor.random_model import write_random_model
from services.executor.tensor_specs import tensor_specs
from services.executor.weights import load_model
from tests.model.driving import alone, same_bits

EXPERT = 3 * 64 * 32 * 17 // 32  # w1, w2, w3 in FP4 and a scale for 32 weights


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "nano"
    write_random_model(folder, "v41-nano")
    return folder


@pytest.fixture(scope="module")
def config(nano: Path) -> ModelConfig:
    return load_config(nano)


def step(*layers: set[int], ids: tuple[int, ...] = (7,), position: int = 40) -> Touched:
    return Touched(tuple(map(frozenset, layers)), ids, (position,) * len(ids))


def test_an_expert_counts_once_in_each_layer_that_chose_it(config: ModelConfig) -> None:
    none = weight_bytes(config, step(set(), set(), set(), set()))
    some = weight_bytes(config, step({0, 5}, {5}, set(), {1, 2, 3}))
    assert some - none == 6 * EXPERT


def test_all_experts_and_all_ids_are_the_whole_main_model(config: ModelConfig) -> None:
    """But for the tables, of which rows are read, and the biases of images."""
    everything = set(range(8))
    ids = tuple(range(512))
    read = weight_bytes(config, step(*[everything] * 4, ids=ids))
    specs = tensor_specs(config)
    main = sum(spec.num_bytes for spec in specs if not spec.name.startswith("mtp."))
    tables = sum(spec.num_bytes for spec in specs if ".engram.embed." in spec.name)
    rows = 2 * 512 * (3 * 2) * (32 + 1)  # layers, tokens, hashes, bytes of a row
    biases = 4 * 8 * 4
    # the draft stages' window rows: projection of three layers' features, and their norms
    fed = 64 * 192 + 2 * 6 + 2 * 64 + 3 * (32 * 64 + 1 * 2 + 2 * 32)
    assert read == main - tables + rows - biases + fed


def test_rows_of_the_embedding_count_by_distinct_id(config: ModelConfig) -> None:
    layers = [{0}] * 4
    one, two = step(*layers, ids=(7, 7)), step(*layers, ids=(7, 9))
    assert weight_bytes(config, two) - weight_bytes(config, one) == 2 * 64


def test_kv_is_what_attention_and_the_indexer_reach(config: ModelConfig) -> None:
    """Position 40: window of 16, ratios 0 2 1 1, top 16; candidates of layer 2 hold 32 keys."""
    window = 4 * 16 * (32 + 1)
    rows = 3 * 16 * (32 // 2 + 32 // 16)
    keys = (20 + 41 + 32) * (32 // 2 + 32 // 32)
    assert kv_bytes(config, step({0}, {0}, {0}, {0})) == window + rows + keys
    # position 9: everything that is there, and nothing to choose
    early = step({0}, {0}, {0}, {0}, position=9)
    assert kv_bytes(config, early) == 4 * 10 * 33 + (5 + 10 + 10) * 18


def test_prefill_counts_active_weights_and_attended_rows(config: ModelConfig) -> None:
    attention = 64 * (32 + 32) + 32 * 4 * 32 + 2 * 32 * (4 * 32 // 2) + 2 * 32 * 64
    shared, routed, router = 3 * 64 * 32, 2 * 3 * 64 * 32, 8 * 64
    mix = 2 * 24 * 4 * 64
    layers = 4 * (attention + shared + routed + router + mix)
    sources = 2 * (32 * 64 + 32 * 32) + 32 * 64  # compressors, index keys, the gate of ratio 2
    indexers = 3 * (16 * 32 * 32 + 16 * 64)
    engram = 2 * 64 * 5 * (6 * 32)
    draft = 64 * 192 + 3 * 32 * 64
    weights = layers + sources + indexers + engram + draft
    tokens = 20
    window = sum(min(p + 1, 16) for p in range(tokens))
    rows = sum(min((p + 1) // 2, 16) + 2 * min(p + 1, 16) for p in range(tokens))
    attended = 4 * 4 * 32 * (4 * window + rows)
    head = 2 * 512 * 64
    assert prefill_flops(config, tokens) == 2 * weights * tokens + attended + head


# ---------------------------------------------------------------- the engine that is measured


def test_copied_contexts_are_those_that_each_row_would_compute(nano: Path) -> None:
    """Every row's logits depend on its KV: rows alone must leave the same bits behind."""
    context, length = 70, 75
    ids = random_rows(3, context, length, 512)
    assert (ids[:, :context] == ids[0, :context]).all()
    assert len(np.unique(ids[:, context:], axis=0)) == 3
    offline = Offline(nano, rows=3, max_len=128, on_progress=lambda stage, done, total: None)
    offline.begin(ids, context, chunk=64)
    for position in range(context, length):
        offline.decode(3, position)
    model = load_model(nano, "bf16")
    for row in range(3):
        wanted = alone(model, ids[row].tolist())
        again = offline.logits(row, length - 1)
        assert same_bits(again, wanted.logits[-1:])


def test_the_experts_that_are_counted_are_those_of_the_router(nano: Path) -> None:
    ids = random_rows(4, 30, 34, 512)
    offline = Offline(nano, rows=4, max_len=64, on_progress=lambda stage, done, total: None)
    offline.begin(ids, 30)
    offline.decode(4, 30)
    whole = offline.touched(4, 30)
    alone_ = [offline.touched(rows, 30) for rows in (1, 2, 3)]
    assert whole.positions == (30,) * 4
    assert whole.ids == tuple(ids[:, 30].tolist())
    for layer in range(4):
        assert len(alone_[0].experts[layer]) == 2  # top-2 of one row
        grown = [one.experts[layer] for one in (*alone_, whole)]
        assert all(a <= b for a, b in itertools.pairwise(grown))
    assert offline.touched(4, 30) == whole
