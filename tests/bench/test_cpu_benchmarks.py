"""`bench decode` and `bench prefill` as a user runs them: small, once, and what they print."""

import json
from pathlib import Path

import pytest

from services.executor.model_config import load_config
from services.executor.random_model import write_random_model
from tests.bench.running import bench

COMMON = {"command", "commit", "machine", "versions", "config", "cases", "ok", "valid"}


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "nano"
    write_random_model(folder, "v41-nano")
    return folder


def test_decode_counts_and_compares_with_the_floor(nano: Path, tmp_path: Path) -> None:
    size = ("--batch", "1", "3", "--context", "40", "--threads", "1", "--runs", "2", "--steps", "2")
    found, said = bench("decode", "--model", str(nano), *size, results=tmp_path)
    assert set(found) == COMMON
    assert (found["command"], found["ok"]) == ("bench decode", True)
    assert json.loads((tmp_path / "decode.jsonl").read_text()) == found
    one, three = found["cases"]
    assert (one["preset"], one["layers"], one["device"]) == ("nano", 4, "cpu")
    assert [(c["batch"], c["context"], c["threads"]) for c in found["cases"]] == [
        (1, 40, 1),
        (3, 40, 1),
    ]
    for case in found["cases"]:
        assert 0 < case["floor_ms"] < case["step_ms"]  # so small a model is nothing but overhead
        share = case["floor_ms"] / case["step_ms"]
        assert case["share_of_floor"] == pytest.approx(share, abs=0.002)
        assert case["ours_tokens_per_s"] == pytest.approx(
            1e3 * case["batch"] / case["step_ms"], 0.01
        )
        floor_ms = case["bytes_read"] / case["read_gbps"] / 1e6
        assert case["floor_ms"] == pytest.approx(floor_ms, rel=0.05)
        assert case["read_gbps"] > 0.1
        assert len(case["samples_ms"]) == 2
        assert (case["peers"], case["ratio_to_best_peer"]) == ({}, None)
    assert one["experts_touched"] == 2  # top-2 of one row, in every layer
    assert 2 < three["experts_touched"] <= 6
    assert one["bytes_read"] < three["bytes_read"] < sum(f.stat().st_size for f in nano.iterdir())
    assert three["kv_bytes"] == pytest.approx(3 * one["kv_bytes"], rel=0.001)
    assert "share_of_floor" in said


def test_a_peer_that_is_not_there_makes_the_run_not_ok(nano: Path, tmp_path: Path) -> None:
    size = ("--batch", "1", "--context", "20", "--threads", "1", "--runs", "1", "--steps", "1")
    options = ("--model", str(nano), "--peer", "mlx", "--cache", str(tmp_path))
    found, said = bench("decode", *options, *size)
    assert (found["ok"], found["cases"][0]["peers"]) == (False, {})
    assert "bench peers setup mlx" in said


def test_prefill_compares_with_torch(nano: Path) -> None:
    options = ("--tokens", "24", "100", "--threads", "1", "--runs", "2", "--chunk", "64")
    found, _ = bench("prefill", "--model", str(nano), *options)
    assert set(found) == COMMON
    for case, tokens in zip(found["cases"], (24, 100), strict=True):
        assert (case["tokens"], case["threads"]) == (tokens, 1)
        rate = case["flops"] * case["ours_tokens_per_s"] / tokens / 1e9
        assert case["ours_gflops"] == pytest.approx(rate, rel=0.02)
        share = case["ours_gflops"] / case["torch_peak_gflops"]
        assert case["share_of_peak"] == pytest.approx(share, abs=0.002)
        assert 0 < case["share_of_peak"] < 1
        assert case["share_of_shapes"] > 0
    few, many = (case["flops"] for case in found["cases"])
    assert 4 < many / few < 5  # in proportion, and attention beside it


def test_a_context_beyond_the_model_is_refused(nano: Path) -> None:
    limit = load_config(nano).max_model_len
    with pytest.raises(AssertionError, match=f"the model has {limit}"):
        bench("decode", "--model", str(nano), "--context", str(limit))
