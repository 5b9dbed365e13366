"""`bench kernels` as a user runs it: small shapes, once."""

import pytest

from tests.bench.running import bench


def test_every_kernel_has_a_case_that_agrees_with_its_peer() -> None:
    options = ("--shapes", "v41-nano", "--rows", "3", "--threads", "1", "--runs", "2")
    found, _ = bench("kernels", *options)
    ops = {case["op"] for case in found["cases"]}
    assert ops >= {"linear", "routed_experts", "sparse_attention", "index_scores", "hyper_mix"}
    for case in found["cases"]:
        assert case["ours_us"] > 0
        floor = case["floor_us"] / case["ours_us"]
        assert case["share_of_floor"] == pytest.approx(floor, rel=0.1, abs=0.01)
        if case["op"] in ("linear", "rms_norm"):
            assert case["max_error"] < 0.02  # bfloat16
        if case["op"] == "top_k_indices":
            assert case["max_error"] == 0
        assert set(case["peers"]) <= {"torch"}
