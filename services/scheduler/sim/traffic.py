"""Named workloads: lengths and shared beginnings of requests that arrive at random."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from deepmesh.wire.messages import Capacity, StepCosts

from .requests import SimRequest


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution of token counts, cut at both ends."""

    median: int
    spread: float  # sigma of the logarithm
    least: int
    most: int

    def draw(self, draw: random.Random) -> int:
        """One length."""
        length = self.median * draw.lognormvariate(0.0, self.spread)
        return max(self.least, min(self.most, round(length)))


@dataclass(frozen=True, slots=True)
class Profile:
    """One kind of request."""

    share: float
    prompt: Lengths  # without the shared beginning
    output: Lengths
    shared: int = 0  # tokens of a beginning that many requests have in common
    groups: int = 1  # of such beginnings


_CHAT = Profile(0.7, Lengths(220, 0.9, 8, 2000), Lengths(120, 0.7, 4, 400))
_LONG = Profile(0.2, Lengths(1800, 0.5, 600, 3000), Lengths(60, 0.6, 4, 200))
_TOOLS = Profile(0.1, Lengths(160, 0.6, 16, 600), Lengths(50, 0.6, 4, 160), shared=1024, groups=4)
WORKLOADS: dict[str, tuple[Profile, ...]] = {
    "mixed": (_CHAT, _LONG, _TOOLS),
    "chat": (_CHAT,),
    "long-prompts": (_LONG,),
    "agentic": (_TOOLS,),
    "decode": (Profile(1.0, Lengths(32, 0.3, 8, 96), Lengths(160, 0.4, 32, 320)),),
}
MAX_LEN = 4096  # of prompt and output together, in every named workload
VOCAB = 4096


def work_ns(request: SimRequest, costs: StepCosts, rows: int) -> float:
    """Device time of its rank that a request needs: its tokens, and its share of the steps' fixed
    cost when `rows` requests decode side by side."""
    prefill = len(request.prompt) * costs.prefill_token_ns
    return prefill + request.max_tokens * (costs.decode_row_ns + costs.base_ns / rows)


def arrivals(
    name: str,
    *,
    seed: int,
    ranks: int,
    rows: int,
    costs: StepCosts,
    utilisation: float,
) -> Iterator[SimRequest]:
    """Requests without end, as a Poisson process.

    Args:
        utilisation: the work that arrives, as a share of what the ranks can do with `rows`
            requests decoding on each; above 1 the queue grows for ever.
    """
    profiles, draw = WORKLOADS[name], random.Random(seed)
    shares = [profile.share for profile in profiles]
    sample = [_request(0, 0, _pick(profiles, shares, draw), draw) for _ in range(2000)]
    mean_ns = sum(work_ns(request, costs, rows) for request in sample) / len(sample)
    rate = utilisation * ranks / mean_ns  # requests a ns
    now, number = 0.0, 0
    while True:
        now += draw.expovariate(rate)
        number += 1
        yield _request(number, round(now), _pick(profiles, shares, draw), draw)


def _pick(profiles: tuple[Profile, ...], shares: list[float], draw: random.Random) -> Profile:
    return draw.choices(profiles, shares)[0]


def _request(number: int, arrival_ns: int, profile: Profile, draw: random.Random) -> SimRequest:
    length, output = profile.prompt.draw(draw), profile.output.draw(draw)
    prefix: list[int] = []
    if profile.shared:
        prefix = shared_tokens(draw.randrange(profile.groups), profile.shared)
    prompt = prefix + draw.choices(range(VOCAB), k=length)
    return SimRequest(
        rid=number.to_bytes(16, "big"),
        prompt=prompt,
        max_tokens=output,
        arrival_ns=arrival_ns,
        seed=draw.randrange(1 << 30),
    )


def shared_tokens(group: int | str, count: int) -> list[int]:
    """The first tokens of a beginning that requests share."""
    return random.Random(f"prefix {group}").choices(range(VOCAB), k=count)


def device_of(rows: int, costs: StepCosts) -> Capacity:
    """A rank with room for `rows` requests of MAX_LEN and as much cache again."""
    size, slots = 64, rows + max(4, rows // 4)
    return Capacity(
        engine_epoch=0,
        rank=0,
        num_global_blocks=2 * slots * MAX_LEN // size // 3,
        num_window_blocks=slots * 40,
        num_state_blocks=slots * 6,
        num_slots=slots,
        max_model_len=MAX_LEN,
        vocab_size=VOCAB,
        window=128,
        block_size=size,
        chunk_align=128,
        costs=costs,
    )


DEFAULT_COSTS = StepCosts(
    base_ns=8_000_000,
    prefill_token_ns=12_000,
    decode_row_ns=40_000,
    context_kilotoken_ns=4_000,
)
