"""Ways to choose the kind of a group step that others use, to stand beside ours."""

from deepmesh.wire.messages import StepKind

from ..core.alignment import ChooseKind, Intents

PREFILL_EVERY = 85  # decode steps between prefills of the decode-first policy: 70 to 100 in use


def prefill_first(intents: Intents) -> StepKind:
    """Whatever can be prefilled is, alone; decodes wait."""
    return StepKind.PREFILL if any(intents.prefill_tokens) else StepKind.DECODE


def decode_first(intents: Intents) -> StepKind:
    """Decode steps only, but for a prefill step now and then, or when nothing decodes."""
    if not any(intents.decode_tokens) or intents.held >= PREFILL_EVERY:
        return StepKind.PREFILL
    return StepKind.DECODE


POLICIES: dict[str, ChooseKind | None] = {
    "mixed": None,  # ours
    "prefill-first": prefill_first,
    "decode-first": decode_first,
}
