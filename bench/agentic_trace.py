"""Sessions of agents, made up by a seed in the shape of public traces of coding agents.

Half of the sessions have 33 turns or more. A turn's prompt is everything before it, then new tokens
(what a tool said); answers are short. When a context is full it is cut down to its system prompt
and a summary, so most of what was cached is of no use. In sum about 94 % of all prompt tokens have
been seen before, and there are about 131 of them to each output token.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

MEDIAN_TURNS = 33
SPREAD = 0.45  # of the logarithm of a session's turns
OUTPUT_SHARE = 0.155  # of a turn's new tokens: what the answer has
NEW_SPREAD = 0.6  # of the logarithm of a turn's new tokens
SYSTEM_PROMPTS = 2
SUMMARY_SHARE = 0.12  # of a full context
SKEW = (0.6, 0.15, 0.1)  # share of requests with each beginning; the rest have one of their own
SKEWED_SHARED = 6  # times a turn's new tokens: a beginning
SKEWED_OUTPUT = 0.3  # of a turn's new tokens: an answer
FIRST_ID, LAST_ID = 300, 4000  # plain words of the shipped model's vocabulary


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    prompt: list[int]
    output_id: int  # each token of its answer
    num_output: int

    @property
    def whole(self) -> list[int]:
        """Prompt and answer."""
        return self.prompt + [self.output_id] * self.num_output


@dataclass(frozen=True)
class Shape:
    """Sizes of a trace."""

    sessions: int = 6
    new_tokens: int = 80  # of a turn, in the mean
    context_tokens: int = 3000  # where a context is cut down
    turn_share: float = 1.0  # of each session's turns, for short runs

    @property
    def system_tokens(self) -> int:
        """Of a system prompt."""
        return 6 * self.new_tokens


def make_trace(shape: Shape, seed: int, output_ids: Sequence[int]) -> list[list[Turn]]:
    """The sessions; `output_ids` are tokens that a model is to answer with."""
    draw = random.Random(seed)
    systems = [_ids(draw, shape.system_tokens) for _ in range(SYSTEM_PROMPTS)]
    counts = _turns(shape)
    draw.shuffle(counts)
    return [
        _session(draw, shape, systems[number % SYSTEM_PROMPTS], turns, output_ids)
        for number, turns in enumerate(counts)
    ]


def make_skewed(shape: Shape, seed: int, output_ids: Sequence[int]) -> list[list[Turn]]:
    """As many single requests as a trace has turns at half its sessions: most of them begin alike,
    some like one of a few others, some like none."""
    draw = random.Random(seed)
    beginnings = [_ids(draw, SKEWED_SHARED * shape.new_tokens) for _ in range(len(SKEW))]
    made: list[list[Turn]] = []
    for number in range(round(MEDIAN_TURNS * shape.sessions * shape.turn_share / 2)):
        (which,) = draw.choices(range(len(SKEW) + 1), [*SKEW, 1.0 - sum(SKEW)])
        start = (
            beginnings[which] if which < len(SKEW) else _ids(draw, SKEWED_SHARED * shape.new_tokens)
        )
        prompt = start + _ids(draw, _size(draw, shape.new_tokens))
        output = max(1, round(SKEWED_OUTPUT * _size(draw, shape.new_tokens)))
        made.append([Turn(prompt, output_ids[number % len(output_ids)], output)])
    return made


def ideal_hits(trace: list[list[Turn]], grid: int) -> tuple[int, int]:
    """(prompt tokens that came before, in multiples of `grid`; all prompt tokens).

    With a cache that forgets nothing, and turn by turn in all sessions at once: of each prompt the
    longest beginning of an earlier prompt or its answer. Its last token is always computed, and so
    is what follows the last token of an answer, which has no KV.
    """
    tree = _Prefixes()
    hits = total = 0
    for number in range(max(map(len, trace))):
        for session in trace:
            if number < len(session):
                turn = session[number]
                common = tree.longest(turn.prompt)
                hits += min(common, len(turn.prompt) - 1) // grid * grid
                total += len(turn.prompt)
                tree.add(turn.whole[:-1])
    return hits, total


class _Prefixes:
    """All beginnings of sequences, by their hash."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def add(self, ids: list[int]) -> None:
        """A sequence and its beginnings."""
        self._seen.update(_hashes(ids))

    def longest(self, ids: list[int]) -> int:
        """Tokens of its longest known beginning."""
        count = 0
        for hash_ in _hashes(ids):
            if hash_ not in self._seen:
                break
            count += 1
        return count


def _hashes(ids: list[int]) -> list[int]:
    found: list[int] = []
    last = 0
    for token in ids:
        last = hash((last, token))  # of integers: the same in every process
        found.append(last)
    return found


def _turns(shape: Shape) -> list[int]:
    """Quantiles of a log-normal distribution: the median is exact for any number of sessions."""
    normal = NormalDist()
    places = [(index + 0.5) / shape.sessions for index in range(shape.sessions)]
    turns = [MEDIAN_TURNS * math.exp(SPREAD * normal.inv_cdf(place)) for place in places]
    return [max(2, round(shape.turn_share * count)) for count in turns]


def _session(
    draw: random.Random, shape: Shape, system: list[int], turns: int, output_ids: Sequence[int]
) -> list[Turn]:
    made: list[Turn] = []
    context = list(system)
    for number in range(turns):
        count = _size(draw, shape.new_tokens)
        output = max(1, round(OUTPUT_SHARE * _size(draw, shape.new_tokens)))
        if len(context) + count + output > shape.context_tokens:
            context = system + _ids(draw, round(SUMMARY_SHARE * shape.context_tokens))
        turn = Turn(context + _ids(draw, count), output_ids[number % len(output_ids)], output)
        made.append(turn)
        context = turn.whole
    return made


def _size(draw: random.Random, mean: int) -> int:
    """Log-normal, so that now and then something long comes."""
    size = mean * math.exp(draw.gauss(-(NEW_SPREAD**2) / 2, NEW_SPREAD))
    return max(1, min(round(size), 6 * mean))


def _ids(draw: random.Random, count: int) -> list[int]:
    return draw.choices(range(FIRST_ID, LAST_ID), k=count)
