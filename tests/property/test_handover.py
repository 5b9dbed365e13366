"""Any mishaps of two groups at any time: requests end with the oracle's tokens, nothing leaks."""

from collections.abc import Callable
from functools import partial

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from services.scheduler.sim.clock import MS
from services.scheduler.sim.link import MISHAPS, WAYS
from services.scheduler.sim.pair import Pair
from services.scheduler.sim.store import OpFaults
from tests.sim.test_handover import CAPACITY, CONFIG, SMALL, prompts

SPAN_MS = 250
Act = Callable[[Pair], None]
ACTS: dict[str, Act] = {
    "prefill executor": lambda pair: pair.prefill.kill_executor(0, 10 * MS),
    "decode executor": lambda pair: pair.decode.kill_executor(0, 10 * MS),
    "prefill scheduler": lambda pair: pair.prefill.kill_scheduler(10 * MS),
    "decode scheduler": lambda pair: pair.decode.kill_scheduler(10 * MS),
    "cut": Pair.cut,
    "client goes": lambda pair: pair.decode.kill_tokenizer(0, 5 * MS),
}


def spoil(way: str, mishap: str) -> Act:
    """The next message between the schedulers goes wrong."""
    return lambda pair: pair.link.spoil(way, mishap)


ACTS |= {f"{mishap} {way}": spoil(way, mishap) for way in WAYS for mishap in MISHAPS}
shares = st.sampled_from([0.0, 0.0, 0.1, 0.3])


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 10_000),
    depth=st.sampled_from([1, 2, 3]),
    is_small=st.booleans(),
    one_class=st.booleans(),
    faults=st.builds(OpFaults, never=shares, late=shares, twice=shares, lost=shares, full=shares),
    acts=st.lists(st.tuples(st.integers(0, SPAN_MS), st.sampled_from(sorted(ACTS))), max_size=8),
)
@example(3, 2, True, True, OpFaults(never=0.3), [(40, "prefill scheduler"), (41, "cut")])
def test_every_request_ends_right(
    seed: int,
    depth: int,
    is_small: bool,
    one_class: bool,
    faults: OpFaults,
    acts: list[tuple[int, str]],
) -> None:
    capacity = SMALL if is_small else CAPACITY
    pair = Pair(
        replace(CONFIG, depth=depth),
        replace(capacity, one_kernel_class=one_class),
        seed=seed,
        faults=faults,
    )
    for request in prompts(seed, 8, aborts=0.3):
        request.arrival_ns = request.arrival_ns * SPAN_MS // 400
        pair.submit(request)
    for at, act in acts:
        pair.clock.at(at * MS, partial(ACTS[act], pair))
    pair.run()
    pair.verify()
    assert pair.decode.num_failed == 0
