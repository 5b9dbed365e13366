"""What the adaptive policy of drafts is held to, batch by batch."""

from collections.abc import Sequence

from bench.spec_runs import ADAPTIVE, LENGTHS
from deepmesh.report import Json

LEAST_RATIO = 0.95  # to no drafts, that is no loss


def verdict(cases: Sequence[dict[str, Json]]) -> dict[str, dict[str, Json]]:
    """By batch, as far as the policy ran; null where what it is compared with did not."""
    found: dict[str, dict[str, Json]] = {}
    for batch in sorted({_number(entry, "batch") for entry in cases}):
        here = {str(entry["policy"]): entry for entry in cases if entry["batch"] == batch}
        ours = here.get(ADAPTIVE)
        if ours is None:
            continue
        fixed = [here[str(length)] for length in LENGTHS if str(length) in here]
        best = max([1.0, *(_number(entry, "ratio_low") for entry in fixed)])
        roofline, is_whole = ours["roofline_ratio"], len(fixed) == len(LENGTHS)
        found[str(int(batch))] = {
            "never_a_loss": _number(ours, "ratio_low") >= LEAST_RATIO,
            "of_roofline": None
            if not isinstance(roofline, float)
            else round(_number(ours, "ratio_to_off") / roofline, 3),
            "as_the_best_fixed": _number(ours, "ratio_high") >= best if is_whole else None,
        }
    return found


def holds(verdicts: dict[str, dict[str, Json]], batches: Sequence[int]) -> bool:
    """Both promises were kept at every batch, and compared with all that they speak of."""
    return all(
        verdicts.get(str(batch), {}).get(promise) is True
        for batch in batches
        for promise in ("never_a_loss", "as_the_best_fixed")
    )


def _number(entry: dict[str, Json], key: str) -> float:
    value = entry[key]
    assert isinstance(value, int | float)
    return value
