"""How many devices carry a daily load: sums over a table of kernel times. Pure arithmetic.

Nothing here has seen a cluster: the table (`h200.json`) says of each figure whether it was
measured, is a floor, was published by others or is assumed, and the answer inherits that.
"""

import json
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path

import msgspec

from deepmesh.errors import UserError
from deepmesh.wire.messages import StepCosts

TABLE = Path(__file__).with_name("h200.json")
DAY_S = 86_400.0
MAX_ROWS = 1024  # decode rows of a rank that are looked at


class Op(msgspec.Struct, frozen=True):
    """A kernel: its time at each of the table's batches, and how often a step runs it."""

    name: str
    us: list[float]
    count: int
    kind: str
    context: int = 0  # positions that it was measured with, if its time grows with them


class Experts(msgspec.Struct, frozen=True):
    """Routed experts, bound by their bytes or by their operations."""

    layers: int
    experts: int
    top_k: int
    bytes: float  # of one expert
    flops_per_row: float
    share_of_read: float
    share_of_flops: float
    imbalance: float  # of the slowest rank over the mean
    kind: str


class Exchange(msgspec.Struct, frozen=True):
    """Dispatch and combine of a layer, by ranks of the group."""

    layers: int
    us_at_128_tokens: list[tuple[int, float]]
    fixed_share: float  # of it, whatever the tokens
    kind: str


class Weights(msgspec.Struct, frozen=True):
    """What lies on a device."""

    dense_bytes: float  # on each
    experts_bytes: float  # on all of a group together
    kind: str


class Kv(msgspec.Struct, frozen=True):
    """What a request takes."""

    bytes_per_token: float
    bytes_per_request: float
    kind: str


class Prefill(msgspec.Struct, frozen=True):
    """Of one prompt token that is computed."""

    flops_per_token: float
    share_of_flops: float
    kind: str


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One device and one model."""

    device: str
    model: str
    note: str
    memory_bytes: float
    reserve_bytes: float
    read_bytes_per_s: float
    product_flops_per_s: float
    batches: list[int]
    ops: list[Op]
    experts: Experts
    exchange: Exchange
    weights: Weights
    kv: Kv
    prefill: Prefill

    def step_us(self, rows: int, context: float, ranks: int) -> dict[str, float]:
        """Time of a decode step by part, with `rows` on every rank."""
        parts = {op.name: self._op_us(op, rows, context) for op in self.ops}
        parts["routed experts"] = self._experts_us(rows, ranks)
        parts["exchange"] = self._exchange_us(rows, ranks)
        return parts

    def max_rows(self, context: float, ranks: int) -> int:
        """Requests that fit beside the weights; 0 if these do not fit."""
        held = self.weights.dense_bytes + self.weights.experts_bytes / ranks
        free = self.memory_bytes - self.reserve_bytes - held
        each = context * self.kv.bytes_per_token + self.kv.bytes_per_request
        return max(0, int(free // each))

    def prefill_tokens_per_s(self) -> float:
        """Of one device that does nothing else."""
        flops = self.product_flops_per_s * self.prefill.share_of_flops
        return flops / self.prefill.flops_per_token

    def step_costs(self, ranks: int) -> StepCosts:
        """What the simulator counts with: a step of one row, and what the 127 behind it add."""
        context = 8192

        def total(rows: int, context: int) -> float:
            return 1e3 * sum(self.step_us(rows, context, ranks).values())

        row = (total(128, context) - total(1, context)) / 127
        kilotoken = (total(128, 2 * context) - total(128, context)) / (128 * context / 1000)
        return StepCosts(
            base_ns=round(total(1, context) - row),
            prefill_token_ns=round(1e9 / self.prefill_tokens_per_s()),
            decode_row_ns=round(row - kilotoken * context / 1000),
            context_kilotoken_ns=round(kilotoken),
        )

    def _op_us(self, op: Op, rows: int, context: float) -> float:
        us = interpolate([*zip(self.batches, op.us, strict=True)], rows)
        return op.count * us * (context / op.context if op.context else 1.0)

    def _experts_us(self, rows: int, ranks: int) -> float:
        experts = self.experts
        held = max(1.0, experts.experts / ranks)
        arriving = rows * experts.top_k * experts.imbalance
        touched = held * (1.0 - (1.0 - 1.0 / held) ** arriving) if held > 1 else 1.0
        reading = touched * experts.bytes / (self.read_bytes_per_s * experts.share_of_read)
        computing = arriving * experts.flops_per_row
        computing /= self.product_flops_per_s * experts.share_of_flops
        return 1e6 * experts.layers * max(reading, computing)

    def _exchange_us(self, rows: int, ranks: int) -> float:
        exchange = self.exchange
        us = interpolate(exchange.us_at_128_tokens, ranks)
        share = exchange.fixed_share + (1 - exchange.fixed_share) * rows / 128
        return exchange.layers * us * share


def interpolate(points: list[tuple[int, float]], at: float) -> float:
    """Linear between points of ascending places, and beyond the last two as between them."""
    places = [place for place, _ in points]
    right = min(max(1, bisect_left(places, at)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    if at <= places[0]:
        return points[0][1]
    return y0 + (y1 - y0) * (at - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True)
class DailyLoad:
    """What clients send and get in a day, and what they may wait for."""

    tokens: float  # prompts, cached or not, and outputs
    output_share: float  # of the tokens
    cached_share: float  # of prompt tokens
    context: float  # positions that a decode row attends to, on average
    itl_ms: float  # between tokens of a request, at most
    peak: float = 1.5  # the busiest hour over the mean
    spare: float = 0.05  # of the devices, for failures and updates


@dataclass(frozen=True, slots=True)
class Answer:
    """For groups of one size."""

    ranks: int
    rows: int  # decode rows of a device
    step_ms: float
    limited_by: str  # "itl", "memory" or "rows"
    decode_tokens_per_s: float  # of a device
    prefill_tokens_per_s: float
    decode_devices: float
    prefill_devices: float
    devices: int
    parts_ms: dict[str, float]


def plan(table: Table, load: DailyLoad, ranks: int) -> Answer | None:
    """Devices for a load; None: the weights do not fit, or one row is too slow already."""

    def step_us(rows: int) -> float:
        return sum(table.step_us(rows, load.context, ranks).values())

    fitting = min(MAX_ROWS, table.max_rows(load.context, ranks))
    limit_us = 1e3 * load.itl_ms
    rows = fitting
    while rows and step_us(rows) > limit_us:
        rows -= 1
    if not rows:
        return None
    limited = "itl" if rows < fitting else "rows" if rows == MAX_ROWS else "memory"
    a_second = load.tokens / DAY_S * load.peak
    decode_rate = rows / (step_us(rows) / 1e6)
    decode = a_second * load.output_share / decode_rate
    computed = a_second * (1 - load.output_share) * (1 - load.cached_share)
    prefill = computed / table.prefill_tokens_per_s()
    groups = -(-(decode + prefill) * (1 + load.spare) // ranks)
    return Answer(
        ranks=ranks,
        rows=rows,
        step_ms=step_us(rows) / 1e3,
        limited_by=limited,
        decode_tokens_per_s=decode_rate,
        prefill_tokens_per_s=table.prefill_tokens_per_s(),
        decode_devices=decode,
        prefill_devices=prefill,
        devices=int(groups) * ranks,
        parts_ms={n: us / 1e3 for n, us in table.step_us(rows, load.context, ranks).items()},
    )


def read_table(path: Path = TABLE) -> Table:
    """The table of a file.

    Raises:
        UserError: it is not there, or not such a table.
    """
    try:
        return msgspec.convert(json.loads(path.read_text()), Table)
    except (OSError, ValueError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: {error}") from None
