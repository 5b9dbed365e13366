"""`deepmesh simulate --capacity`: how many devices carry a daily load."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepmesh.report import Json
    from services.scheduler.sim.capacity import Answer, DailyLoad, Table

GROUPS = (8, 32, 64, 128)


def run_capacity(
    load: "DailyLoad", *, table_file: Path | None, groups: tuple[int, ...], as_json: bool
) -> int:
    """Plan groups of each size for the load; the exit status."""
    from deepmesh.report import publish, report
    from services.scheduler.sim.capacity import TABLE, plan, read_table

    table = read_table(table_file or TABLE)
    cases: list[dict[str, Json]] = []
    for ranks in groups:
        answer = plan(table, load, ranks)
        cases.append({"ranks": ranks, "fits": False} if answer is None else _case(answer))
    _show(load, table, cases)
    config: dict[str, Json] = {
        "device": table.device,
        "model": table.model,
        "daily_tokens": load.tokens,
        "output_share": load.output_share,
        "cached_share": load.cached_share,
        "context": load.context,
        "itl_ms": load.itl_ms,
        "peak": load.peak,
        "spare": load.spare,
        "kinds": _kinds(table),
    }
    found = report("simulate", config=config, cases=cases, ok=True)
    publish(found, name="capacity", as_json=as_json)
    return 0


def _case(answer: "Answer") -> "dict[str, Json]":
    return {
        "ranks": answer.ranks,
        "fits": True,
        "devices": answer.devices,
        "decode_devices": round(answer.decode_devices, 1),
        "prefill_devices": round(answer.prefill_devices, 1),
        "rows": answer.rows,
        "limited_by": answer.limited_by,
        "step_ms": round(answer.step_ms, 2),
        "tokens_per_s": round(answer.decode_tokens_per_s),
        "prefill_tokens_per_s": round(answer.prefill_tokens_per_s),
        "parts_ms": {name: round(ms, 2) for name, ms in answer.parts_ms.items()},
    }


def _kinds(table: "Table") -> "dict[str, Json]":
    """Where the figures of the table come from."""
    kinds: dict[str, Json] = {op.name: op.kind for op in table.ops}
    return kinds | {
        "routed experts": table.experts.kind,
        "exchange": table.exchange.kind,
        "weights": table.weights.kind,
        "kv": table.kv.kind,
        "prefill": table.prefill.kind,
    }


def _show(load: "DailyLoad", table: "Table", cases: "list[dict[str, Json]]") -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table as Grid

    width = None if sys.stderr.isatty() else 160
    console = Console(stderr=True, highlight=False, width=width)
    console.print(
        f"{load.tokens:.3g} tokens a day on {table.device}, {table.model}: {load.output_share:.0%}"
        f" outputs, {load.cached_share:.0%} of prompts cached, {load.context:g} tokens of context"
    )
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    keys = [key for key in cases[0] if key != "parts_ms"]
    for key in keys:
        grid.add_column(key, justify="right")
    for case in cases:
        grid.add_row(*(_text(case.get(key)) for key in keys))
    console.print(grid)
    console.print("simulated, not measured: --json says where each figure comes from", style="dim")


def _text(value: "Json") -> str:
    if isinstance(value, float):
        return f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
