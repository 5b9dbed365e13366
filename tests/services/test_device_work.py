"""MFU and bandwidth share: what a step computes and moves, against numbers counted by hand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.accounting import Touched, as_sets, kv_bytes, weight_bytes
from deepmesh.config import ExecutorConfig
from services.executor.interface import LiveRows
from services.executor.model_config import ModelConfig, load_config
from services.executor.peaks import device_peaks, measured_peaks, named_peaks
from services.executor.work import Peaks, WorkBook
from services.executor.work_shapes import StepRows, WorkShapes

TINY = Path(__file__).parents[2] / "models" / "tiny"
NOT_COUNTED = -1.0


def ints(*values: int) -> NDArray[np.int64]:
    return np.array(values, np.int64)


def rows(
    *each: tuple[int, int, int],
    logits: int,
    touched: float = NOT_COUNTED,
    expert_rows: float = NOT_COUNTED,
) -> StepRows:
    """One step; of each row: start, count, positions that leave out the upper layers."""
    starts, counts, skips = (ints(*column) for column in zip(*each, strict=True))
    return StepRows(
        ints(0),
        starts,
        counts,
        skips,
        ints(logits),
        np.array([touched]),
        np.array([expert_rows]),
    )


@pytest.fixture(scope="module")
def small() -> ModelConfig:
    """Two layers that a person can count: window attention only, no Engram, no draft stages."""
    return dataclasses.replace(
        load_config(TINY),
        vocab_size=100,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=1,
        sliding_window=4,
        compress_ratios=(0, 0),
        kv_source_layer_ids=(),
        index_source_layer_ids=(),
        candidate_source_layer_id=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=0,
        dspark_target_layer_ids=(),
        hc_mult=2,
    )


# Weights of a layer that multiply a token, by hand: low-rank queries, one KV head, output in two
# steps, router, two experts of eight and the shared one, and the mixes of both sublayers.
ATTENTION = 32 * 64 + 2 * 32 * 32 + 32 * 64 + 32 * (2 * 32) + 64 * 32
EXPERT = 3 * 64 * 32
MIXES = 2 * (2 + 2) * 2 * (2 * 64)
LAYER = ATTENTION + 8 * 64 + 3 * EXPERT + MIXES


def test_flops_of_a_decode_row_are_those_counted_by_hand(small: ModelConfig) -> None:
    flops, _ = WorkShapes(small, 100).count(rows((9, 1, 0), logits=1))
    attended = 2 * 2 * 4  # scores and sums, over two heads of 32, in a full window
    by_hand = 2 * (2 * LAYER) + 2 * attended * 2 * 32 + 2 * 100 * 64
    assert flops[0] == by_hand


def test_flops_of_a_prompt_are_those_of_its_tokens(small: ModelConfig) -> None:
    shapes = WorkShapes(small, 100)
    whole, _ = shapes.count(rows((0, 10, 0), logits=1))
    parts = [shapes.count(rows((p, 1, 0), logits=int(p == 9)))[0][0] for p in range(10)]
    assert whole[0] == pytest.approx(sum(parts))
    attended = sum(min(p + 1, 4) for p in range(10))
    assert whole[0] == 2 * 2 * LAYER * 10 + 2 * 2 * 2 * 2 * 32 * attended + 2 * 100 * 64


def test_positions_that_leave_out_the_upper_layer_cost_half(small: ModelConfig) -> None:
    shapes = WorkShapes(small, 100)
    whole = shapes.count(rows((0, 8, 0), logits=0))[0][0]
    skipped = shapes.count(rows((0, 8, 8), logits=0))[0][0]
    assert skipped == whole / 2


def test_bytes_of_a_step_are_those_counted_by_hand(small: ModelConfig) -> None:
    shapes = WorkShapes(small, 100)
    _, moved = shapes.count(rows((9, 1, 0), (2, 1, 0), logits=2, touched=5))
    fp8 = ATTENTION + 3 * 64 * 32  # a byte a weight, the shared expert among them
    scales = fp8 // (32 * 32)
    router = 8 * 64 * 2 + 8 * 4
    norms = 2 * 64 * 2 + 32 * 2 + 32 * 2 + 2 * 4
    mixes = 4 * MIXES + 2 * 4 * ((2 + 2) * 2 + 3)
    expert = EXPERT // 2 + EXPERT // 32  # FP4, a scale for 32
    row = 32 + 32 // 32  # of a window: FP8, a scale for 32
    by_hand = 2 * (fp8 + scales + router + norms + mixes) + 5 * expert
    by_hand += 64 * 2  # the last norm
    by_hand += 2 * 64 * 2 + 100 * 64 * 2  # two rows of embeddings, the head
    by_hand += 2 * row * (4 + 3)  # window rows read, in both layers
    by_hand += 2 * 2 * row  # and written
    assert moved[0] == by_hand


@pytest.mark.parametrize("positions", [(5, 700, 2000), (0,), (63, 64, 65, 4000)])
def test_bytes_of_the_shipped_model_agree_with_the_benchmarks(positions: tuple[int, ...]) -> None:
    """bench/accounting.py goes tensor by tensor, and is what floors are made of."""
    config = load_config(TINY)
    shapes = WorkShapes(config, 8192)
    experts = as_sets([range(4)] * config.num_hidden_layers)
    step = Touched(experts, tuple(range(len(positions))), positions)
    each = [(position, 1, 0) for position in positions]
    touched = 4.0 * config.num_hidden_layers
    _, moved = shapes.count(rows(*each, logits=len(positions), touched=touched))
    read = weight_bytes(config, step) + kv_bytes(config, step)
    assert moved[0] == read + len(positions) * shapes.write_bytes


def test_experts_that_are_not_counted_are_those_without_favourites(small: ModelConfig) -> None:
    shapes = WorkShapes(small, 100)
    one = shapes.count(rows((9, 1, 0), logits=1))[1][0]
    counted = shapes.count(rows((9, 1, 0), logits=1, touched=4))[1][0]
    assert one == pytest.approx(counted), "one token has two experts in each of two layers"
    many = shapes.count(rows((0, 90, 0), logits=1))[1][0]
    all_of_them = shapes.count(rows((0, 90, 0), logits=1, touched=16))[1][0]
    assert many == pytest.approx(all_of_them, rel=1e-6)


def test_a_rank_computes_the_rows_that_came_to_its_experts(small: ModelConfig) -> None:
    shapes = WorkShapes(small, 100, held_experts=4)
    own = shapes.count(rows((9, 1, 0), logits=1))[0][0]
    came = shapes.count(rows((9, 1, 0), logits=1, expert_rows=10))[0][0]
    assert came == own + 2 * EXPERT * (10 - 4)
    flops, moved = shapes.count(rows((0, 0, 0), logits=0, expert_rows=6))
    assert flops[0] == 2 * EXPERT * 6, "without tokens of its own it works for the others"
    assert 0 < moved[0] <= 8 * shapes.expert_bytes


def live(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> LiveRows:
    num = len(starts)
    flags = np.ones(num, bool)
    return LiveRows(np.arange(num), np.arange(num), starts, counts, flags, ~flags, ~flags)


def test_a_book_adds_up_what_is_noted_step_by_step(small: ModelConfig) -> None:
    shapes, book = WorkShapes(small, 100), WorkBook()
    assert book.total(0, 0) is None, "nothing is loaded"
    book.begin(shapes, Peaks(1e12, 1e11))
    book.note(7, live(ints(9, 2), ints(1, 1)), 2, touched=5)
    book.note(8, live(ints(0), ints(10)), 1)
    one, two = rows((9, 1, 0), (2, 1, 0), logits=2, touched=5), rows((0, 10, 0), logits=1)
    wanted = [(step, *(float(v[0]) for v in shapes.count(r))) for step, r in ((7, one), (8, two))]
    assert book.of_steps(7) == wanted
    assert book.of_steps(8) == wanted[1:]
    total = book.total(3, 1_000_000)
    assert total is not None
    assert (total.rank, total.steps, total.busy_ns) == (3, 2, 1_000_000)
    assert total.flops == pytest.approx(sum(flops for _, flops, _ in wanted))
    assert total.moved_bytes == pytest.approx(sum(moved for _, _, moved in wanted))
    assert (total.peak_flops, total.peak_bytes) == (1e12, 1e11)


def test_peaks_are_configured_known_or_measured() -> None:
    given = device_peaks(ExecutorConfig(peak_tflops=2.5, peak_gbps=100), "cpu")
    assert given == Peaks(2.5e12, 1e11)
    measured = measured_peaks()
    assert 1e8 < measured.flops < 1e15
    assert 1e8 < measured.bytes < 1e13
    half = device_peaks(ExecutorConfig(peak_tflops=2.5), "cpu")
    assert half.flops == 2.5e12
    assert half.bytes > 1e8
    assert named_peaks("NVIDIA H200") == Peaks(1.979e15, 4.8e12)
    assert named_peaks("NVIDIA H20") == Peaks(2.96e14, 4e12)
    assert named_peaks("NVIDIA Something") == Peaks(0, 0)
