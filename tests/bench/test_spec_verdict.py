"""What `bench spec` says of its policy, on made-up cases, and what it counts into a case."""

from pathlib import Path

import pytest

from bench.spec import RECORDED, Measured, case
from bench.spec_runs import ADAPTIVE, LENGTHS, ZERO, Run
from bench.spec_verdict import holds, verdict
from bench.spec_window import Counts
from deepmesh.report import Json
from services.executor.random_model import write_random_model
from tests.bench.running import bench


def entry(policy: str, low: float, high: float, batch: int = 4) -> dict[str, Json]:
    ratio: dict[str, Json] = {"ratio_low": low, "ratio_to_off": (low + high) / 2}
    return {"batch": batch, "policy": policy, "ratio_high": high, "roofline_ratio": 2.0, **ratio}


def fixed(best: float, batch: int = 4) -> list[dict[str, Json]]:
    """All lengths; the third one is the best."""
    lows = {length: best if length == 3 else 0.6 for length in LENGTHS}
    return [entry(str(length), low, low + 0.1, batch) for length, low in lows.items()]


@pytest.mark.parametrize(
    ("low", "high", "best", "wanted"),
    [
        (1.2, 1.3, 1.25, (True, True)),
        (1.2, 1.24, 1.25, (True, False)),
        (0.96, 0.99, 0.8, (True, False)),  # no drafts is a fixed length, too
        (0.94, 1.01, 0.8, (False, True)),
    ],
)
def test_the_policy_is_held_to_both_promises(
    low: float, high: float, best: float, wanted: tuple[bool, bool]
) -> None:
    found = verdict([*fixed(best), entry(ADAPTIVE, low, high)])
    assert (found["4"]["never_a_loss"], found["4"]["as_the_best_fixed"]) == wanted
    assert found["4"]["of_roofline"] == pytest.approx((low + high) / 4, abs=0.001)
    assert holds(found, [4]) == all(wanted)


def test_a_length_that_did_not_run_leaves_the_best_unknown() -> None:
    found = verdict([*fixed(1.1)[:-1], entry(ADAPTIVE, 1.2, 1.3)])
    assert (found["4"]["never_a_loss"], found["4"]["as_the_best_fixed"]) == (True, None)
    assert not holds(found, [4])


def test_noise_is_no_length_to_be_as_good_as() -> None:
    found = verdict([entry(ZERO, 1.4, 1.5), *fixed(1.1), entry(ADAPTIVE, 1.2, 1.3)])
    assert holds(found, [4])


def test_every_batch_asked_counts() -> None:
    good = [*fixed(1.1), entry(ADAPTIVE, 1.2, 1.3)]
    bad = [*fixed(1.1, batch=64), entry(ADAPTIVE, 0.9, 1.0, batch=64)]
    assert holds(verdict(good), [4])
    assert not holds(verdict(good), [4, 64])  # it was not measured
    assert not holds(verdict([*good, *bad]), [4, 64])
    assert holds(verdict([*good, *bad]), [4])


def run_of(steps: int, tokens: int, accepted: list[int]) -> Run:
    return Run(Counts(2.0, steps, tokens, [2 * count for count in accepted], accepted), {})


def test_a_case_says_how_short_its_shortest_window_was() -> None:
    found = Measured()
    found.add(run_of(9, 40, [3]), run_of(12, 20, []))
    found.add(run_of(8, 50, [6, 1]), run_of(7, 25, []))  # a place more than the run before
    made = case(4, "2", found, None)
    assert (made["least_steps"], made["pairs"]) == (7, 2)
    assert (made["accepted"], made["verified"]) == ([9, 1], 20)
    assert made["draft_len"] == pytest.approx(20 / 80)


def test_length_0_is_a_pair_without_drafts_and_proves_nothing(tmp_path: Path) -> None:
    write_random_model(tmp_path / "nano", "v41-nano")
    options = ("--model", str(tmp_path / "nano"), "--acceptance", str(RECORDED), "--policy", ZERO)
    found, said = bench("spec", *options, "--batch", "64", "--pairs", "2", "--tokens", "1")
    (made,) = found["cases"]
    assert (made["policy"], made["pairs"], made["verified"]) == (ZERO, 2, 0)
    assert made["least_steps"] >= 12
    assert (found["ok"], found["config"]["adaptive"], found["config"]["failed"]) == (False, {}, [])
    assert found["config"]["tokens"] >= 85  # as many as a window needs
    assert "steps" in said
