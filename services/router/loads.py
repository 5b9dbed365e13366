"""How much work a replica has, in ms of its device: own counts, corrected by what it says. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

from deepmesh.wire.messages import ReplicaStats

FIRST_OUTPUTS = 64.0  # tokens of an answer, until some have ended
FORGETS = 0.05  # share of the newest answer in the mean
STALE_S = 5.0  # without a heartbeat a load is not known


class Costs(NamedTuple):
    """ms of a prompt token, of a decode row, and of each position that it attends to."""

    token: float = 1.0
    row: float = 4.0
    position: float = 0.0005

    @classmethod
    def of(cls, stats: ReplicaStats) -> "Costs | None":
        """As the replica profiled them; None: not known."""
        if stats.prefill_token_ns <= 0:
            return None
        return cls(
            stats.prefill_token_ns / 1e6,
            stats.decode_row_ns / 1e6,
            stats.context_kilotoken_ns / 1e9,
        )


ALIKE = 1.5  # profiles of equal devices differ by so much at most: one takes their mean


def alike(found: list[Costs]) -> Costs | None:
    """What all of these replicas cost; None: some are slower than noise explains."""
    tokens, rows = [costs.token for costs in found], [costs.row for costs in found]
    if max(tokens) > ALIKE * min(tokens) or max(rows) > ALIKE * min(rows):
        return None
    return Costs(*(sum(column) / len(found) for column in zip(*found, strict=True)))


RELATIVE = Costs()  # where a replica has no profile: only comparisons are made


class Work(NamedTuple):
    """What a request adds where it is sent."""

    prefill_tokens: float
    context: int  # positions that its rows will attend to
    outputs: float  # rows that it will have

    def decode_ms(self, costs: Costs) -> float:
        """All of its decode rows."""
        return self.outputs * (costs.row + self.context * costs.position)

    def prefill_ms(self, costs: Costs) -> float:
        """What of its prompt is to be computed."""
        return self.prefill_tokens * costs.token


class Outputs:
    """How long answers have been lately."""

    def __init__(self) -> None:
        self._mean = FIRST_OUTPUTS

    def ended(self, num_tokens: int) -> None:
        """An answer has so many."""
        self._mean += FORGETS * (num_tokens - self._mean)

    def expected(self, max_tokens: int) -> float:
        """Of the next one."""
        return max(1.0, min(self._mean, max_tokens))


@dataclass(eq=False)
class Load:
    """Of one replica."""

    num_ours: int = 0  # our requests there now
    num_others: int = 0  # further ones, as of its last heartbeat
    costs: Costs | None = None
    _tokens: float = 0.0  # prompt tokens to compute, as of `_at_s`
    _unaccepted: float = 0.0  # of these, those of requests that it may not have got yet
    _at_s: float = 0.0
    _heard_s: float = -1e9
    _context: int = 0  # positions of our requests
    _other_context: int = 0
    _outputs: float = 0.0  # rows and rows x positions that ours have before them
    _row_positions: float = 0.0

    def heard(self, stats: ReplicaStats, requests: int, now: float) -> None:
        """A heartbeat: what it computes is its own count, and what it cannot have counted ours."""
        self.costs = Costs.of(stats)
        self.num_others = max(0, requests - self.num_ours)
        self._other_context = max(0, stats.context_tokens - self._context)
        self._other_context *= self.num_others > 0
        self._tokens = stats.waiting_tokens + self._unaccepted
        self._at_s = self._heard_s = now

    @property
    def num_requests(self) -> int:
        """Everybody's there."""
        return self.num_ours + self.num_others

    def is_known(self, now: float) -> bool:
        """It has told of itself lately."""
        return now - self._heard_s <= STALE_S

    def add(self, work: Work, now: float) -> None:
        """A request is sent there."""
        self._tokens = self._prefill_tokens(now) + work.prefill_tokens
        self._at_s = now
        self._unaccepted += work.prefill_tokens
        self.num_ours += 1
        self._count(work, 1)

    def add_prefill(self, tokens: float, now: float) -> None:
        """It computes a prompt for another replica."""
        self._tokens = self._prefill_tokens(now) + tokens
        self._at_s = now

    def accepted(self, work: Work) -> None:
        """It has the request: its next heartbeat counts it."""
        self._unaccepted = max(0.0, self._unaccepted - work.prefill_tokens)

    def end(self, work: Work, now: float, *, was_accepted: bool) -> None:
        """A request is over, or goes elsewhere."""
        if not was_accepted:
            self.accepted(work)
            self._tokens = max(0.0, self._prefill_tokens(now) - work.prefill_tokens)
            self._at_s = now
        self.num_ours -= 1
        self._count(work, -1)

    def prefill_ms(self, costs: Costs, now: float) -> float:
        """Prompt tokens that wait to be computed."""
        return self._prefill_tokens(now) * costs.token

    def decode_ms(self, costs: Costs, outputs: float) -> float:
        """Rows to come, where `outputs` is what others' requests are taken to have."""
        rows = self._outputs + outputs * self.num_others
        positions = self._row_positions + outputs * self._other_context
        return rows * costs.row + positions * costs.position

    def _prefill_tokens(self, now: float) -> float:
        """Time wears work off; where nobody knows how fast, only heartbeats do."""
        if self.costs is None:
            return self._tokens
        worn = max(0.0, now - self._at_s) * 1e3 / self.costs.token
        return max(0.0, self._tokens - worn)

    def _count(self, work: Work, sign: int) -> None:
        self._context += sign * work.context
        self._outputs += sign * work.outputs
        self._row_positions += sign * work.outputs * work.context
        if self.num_ours == 0:  # no rest stays, of roundings or of prompts that are done with
            self._context, self._outputs, self._row_positions, self._unaccepted = 0, 0.0, 0.0, 0.0
            self._tokens *= self.num_others > 0
