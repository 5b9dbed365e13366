"""A picture of the ranks' steps over time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepmesh.errors import UserError
from deepmesh.wire.messages import StepKind

from .clock import MS
from .collectives import StepSpan

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

MAX_STEPS = 40  # shown, from a quarter of the run on
WIDTH, LEFT, TOP, BOTTOM = 1600, 70, 60, 40
COLOURS = {
    StepKind.PREFILL: "#d1495b",
    StepKind.DECODE: "#30638e",
    StepKind.MIXED: "#7d5ba6",
    StepKind.DUMMY: "#8d99ae",
}
WAITS, TAIL, PAPER, INK = "#d9e2ec", "#b6c2cf", "#ffffff", "#222222"


def draw_timeline(spans: list[StepSpan], tail_ns: int, path: Path) -> None:
    """One line a rank: its own work by kind of step, the wait for the slowest rank, the tail.

    Raises:
        UserError: there is nothing to draw, or nothing to draw with.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        text = "--plot needs Pillow: pip install 'deepmesh[plot]'"
        raise UserError(text) from None
    if not spans:
        raise UserError("no step ran: there is nothing to draw")
    first = max(0, min(len(spans) // 4, len(spans) - MAX_STEPS))
    shown = spans[first : first + MAX_STEPS]
    ranks = len(shown[0].busy_ns)
    line = max(5, min(28, 900 // ranks))
    image = Image.new("RGB", (WIDTH, TOP + ranks * line + BOTTOM), PAPER)
    draw = ImageDraw.Draw(image)
    begin, end = shown[0].begin_ns, shown[-1].end_ns + tail_ns
    scale = (WIDTH - LEFT - 20) / max(1, end - begin)

    def x(time_ns: int) -> float:
        return LEFT + (time_ns - begin) * scale

    for span in shown:
        for rank, busy in enumerate(span.busy_ns):
            top, bottom = TOP + rank * line, TOP + (rank + 1) * line - (1 if line < 12 else 3)
            done = span.begin_ns + busy
            draw.rectangle((x(span.begin_ns), top, x(done), bottom), COLOURS[span.descriptor.kind])
            if span.end_ns > done:
                draw.rectangle((x(done), top, x(span.end_ns), bottom), WAITS)
            draw.rectangle((x(span.end_ns), top, x(span.end_ns + tail_ns), bottom), TAIL)
    _labels(draw, shown, ranks, line)
    for at in range(8):
        time_ns = begin + (end - begin) * at // 8
        draw.text((x(time_ns), TOP + ranks * line + 8), f"{time_ns / MS:.1f} ms", fill=INK)
    image.save(path)


def _labels(draw: ImageDraw, shown: list[StepSpan], ranks: int, line: int) -> None:
    title = f"{ranks} ranks, group steps {shown[0].group_step} to {shown[-1].group_step}"
    draw.text((LEFT, 10), title, fill=INK)
    names = [(kind.name.lower(), colour) for kind, colour in COLOURS.items()]
    for at, (name, colour) in enumerate([*names, ("waits for the slowest", WAITS), ("tail", TAIL)]):
        left = LEFT + 170 * at
        draw.rectangle((left, 32, left + 14, 46), colour)
        draw.text((left + 20, 33), name, fill=INK)
    each = max(1, -(-14 // line))
    for rank in range(0, ranks, each):
        draw.text((8, TOP + rank * line), f"rank {rank}", fill=INK)
