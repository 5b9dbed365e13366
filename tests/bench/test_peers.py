"""The peers' road: a real worker process, the budget of their turns, the converted weights."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bench.peers.convert import converted
from bench.peers.link import Peer
from bench.peers.running import Turns, peer_figures
from bench.peers.venvs import HERE, RECIPES, PeerError, Recipe, python_of, recipe
from kernels.quant.unpack import unpack_fp4, unpack_fp8
from services.executor.model_config import load_config
from services.executor.random_model import write_random_model

WORKER = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from worker_loop import serve

class Echo:
    def __init__(self, folder, threads):
        print("a library that prints")
        if folder.name == "broken":
            raise ValueError("no such weights")
        assert threads == 2

    def prefill(self, ids):
        return [list(row) for row in ids]

    def step(self, state, ids):
        if ids[0] == 13:
            sys.exit("thirteen is too much")
        assert len(state) == len(ids)
        return [[*row, token] for row, token in zip(state, ids)]

serve(Echo)
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A peer of a few lines; returns a folder that it can load."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    one = Recipe((), str(worker), converted=False, remark="adds up")
    monkeypatch.setitem(RECIPES, "echo", one)
    return tmp_path


def test_a_worker_answers_with_the_seconds_that_it_took(echo: Path) -> None:
    peer = Peer("echo", Path(sys.executable), echo, threads=2)
    try:
        assert 0 <= peer.prefill([1, 2, 3]) < 5
        peer.begin("a", [[1, 2], [3, 4]])
        assert 0 <= peer.step("a", [5, 6]) < 5
        peer.end("a")
        with pytest.raises(PeerError, match="KeyError"):  # it has forgotten the rows
            peer.step("a", [5, 6])
        assert peer.prefill([1]) >= 0  # an error does not end it
        assert peer.remark == "adds up"
    finally:
        peer.close()


def test_the_last_words_of_a_worker_that_died_are_reported(echo: Path) -> None:
    peer = Peer("echo", Path(sys.executable), echo, threads=2)
    try:
        peer.begin("a", [[1]])
        with pytest.raises(PeerError, match="thirteen is too much"):
            peer.step("a", [13])
    finally:
        peer.close()


def test_a_model_that_it_cannot_load_is_an_error(echo: Path) -> None:
    with pytest.raises(PeerError, match="no such weights"):
        Peer("echo", Path(sys.executable), echo / "broken", threads=2)


def test_a_peer_without_an_environment_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="deepmesh bench peers setup nemo"):
        python_of("nemo", tmp_path)
    with pytest.raises(PeerError, match="there are: mlx, nemo"):
        recipe("vllm")


def test_a_slow_peer_gets_no_turn_beyond_its_budget() -> None:
    turns = Turns(budget_s=10.0)
    took = iter([60.0, 3.0, 2.9, 9.0, 1.0])
    for _ in range(5):
        turns.take(lambda: next(took))
    assert turns.samples == [60.0, 3.0, 2.9, 9.0]  # 14.9 s, and the first warmed up
    assert turns.median_s == pytest.approx(3.0)
    slow = Turns(budget_s=0.0)
    for seconds in (50.0, 40.0, 1.0):
        slow.take(lambda took=seconds: took)
    assert (slow.samples, slow.median_s) == ([50.0, 40.0], 40.0)
    assert Turns(1.0).median_s is None


def test_the_ratio_is_to_the_best_peer_that_ran() -> None:
    figures = peer_figures({"a": 10.0, "b": 40.0, "c": None}, ours=60.0)
    assert figures == {"peers": {"a": 10.0, "b": 40.0}, "ratio_to_best_peer": 1.5}
    assert peer_figures({"c": None}, ours=60.0)["ratio_to_best_peer"] is None


def test_converted_weights_are_the_values_of_the_released_ones(tmp_path: Path) -> None:
    source, target = tmp_path / "nano", tmp_path / "plain"
    write_random_model(source, "v41-nano")
    config, seen = load_config(source), list[tuple[int, int]]()
    converted(source, config, target, lambda done, total: seen.append((done, total)))
    assert seen[-1] == (5, 5)  # four layers, and the rest
    plain = {k: v for file in target.glob("*.safetensors") for k, v in load_file(file).items()}
    stored = load_file(next(source.glob("*.safetensors")))
    assert {value.dtype for value in plain.values()} == {torch.float32}
    assert not any(word in name for name in plain for word in ("mtp.", "engram", "scale."))
    experts = plain["layers.2.ffn.experts.w2.weight"]
    assert experts.shape == (8, 64, 32)
    base = "layers.2.ffn.experts.5.w2."
    assert torch.equal(experts[5], unpack_fp4(stored[base + "weight"], stored[base + "scale"]))
    base = "layers.0.attn.wo_a."
    groups = plain["layers.0.attn.wo_a.weight"]
    assert groups.shape == (2, 32, 64)
    dense = unpack_fp8(stored[base + "weight"], stored[base + "scale"])
    assert torch.equal(groups.flatten(0, 1), dense)
    assert torch.equal(plain["head.weight"], stored["head.weight"].float())
    seen.clear()
    converted(source, config, target, lambda done, total: seen.append((done, total)))
    assert seen == []  # once is enough
