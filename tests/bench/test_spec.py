"""What `bench spec` compares with: drafts as often right as recorded, and a roofline."""

from pathlib import Path

import numpy as np
import pytest

from bench.spec import RECORDED, interval
from bench.spec_acceptance import Acceptance, Fate, Place, Recording, read_acceptance
from bench.spec_roofline import Roofline
from services.executor.models.deepseek_v41 import DeepseekV41
from services.executor.weights import load_model

MODEL = Path(__file__).parents[2] / "models" / "tiny"
VOCAB_SIZE = 1000
TOKENS = 20_000


@pytest.fixture(scope="module")
def tiny() -> DeepseekV41:
    return load_model(MODEL, "bf16")


def test_made_up_drafts_are_right_as_often_as_recorded_ones() -> None:
    recorded = read_acceptance(RECORDED)
    output = np.random.default_rng(1).integers(0, VOCAB_SIZE, TOKENS).tolist()
    fate = Fate.of(recorded, 3, output, VOCAB_SIZE)
    for place, wanted in enumerate(recorded.by_place):
        known = TOKENS - place
        right = fate.ids[:known, place] == np.array(output[place:])
        assert abs(float(right.mean()) - wanted) < 0.02
        sure = fate.confidence[:known, place] > 0.9
        assert right[sure].mean() > right[~sure].mean()


def test_the_recorded_model_brings_two_tokens_a_verify_step() -> None:
    assert read_acceptance(RECORDED).tokens(5) >= 2.0


def test_what_is_recorded_is_what_came_of_drafts(tmp_path: Path) -> None:
    recording = Recording(2)
    confidence = np.array([[0.9, 0.8], [0.4, 0.3], [0.7, 0.6]], np.float32)
    recording.learn(confidence, np.array([2, 2, 1]), np.array([1, 0, 1]))
    found = recording.acceptance("here", 3)
    found.write(tmp_path / "file.json")
    again = read_acceptance(tmp_path / "file.json")
    assert again == found
    assert again.by_place == pytest.approx(
        [2 / 3, 0.0]
    )  # the second row's second was not looked at
    assert sum(again.places[1].drafts) == 1


def test_tokens_of_a_step_add_up_what_survives() -> None:
    places = [Place([0.5], [10], [0.5]), Place([0.5], [5], [0.4])]
    assert Acceptance("here", 1, places).tokens(2) == pytest.approx(1 + 0.5 + 0.5 * 0.4)


def test_the_roofline_counts_weights_once_a_step(tiny: DeepseekV41) -> None:
    roofline = Roofline(tiny.config, tiny.weights)
    whole = sum(
        weight.data.nbytes
        for layer in tiny.weights.layers
        for weight in (layer.moe.w13, layer.moe.w2)
    )
    share = tiny.config.num_experts_per_tok / tiny.config.n_routed_experts
    dense = roofline.step(1) - whole * share
    assert roofline.step(10_000) == pytest.approx(dense + whole)
    assert 1.0 < roofline.ratio(1, 5, 4.0) < 4.0
    assert roofline.best_ratio(1, [1.0, 1.0, 1.0]) == 1.0


def test_an_interval_holds_the_mean() -> None:
    low, mean, high = interval([1.0, 1.1, 0.9, 1.05, 0.97])
    assert low < mean < high
    assert interval([1.2, 1.2])[0] == pytest.approx(1.2)


def test_an_interval_of_two_ratios_says_how_little_they_tell() -> None:
    low, mean, high = interval([1.0, 1.1])
    assert mean == pytest.approx(1.1**0.5)
    assert high / low == pytest.approx(1.1**12.706, rel=1e-3)  # 12.7 times as wide
