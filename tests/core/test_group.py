"""What the ranks of a group run together: one kind, one descriptor, bounded padding."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from deepmesh.wire.messages import StepKind
from services.scheduler.core.alignment import (
    MAX_PAD_SHARE,
    STALL_STEPS,
    Intents,
    KindPolicy,
)
from services.scheduler.core.group import decide
from tests.core.driver import CONFIG, Driver
from tests.core.ranks import ROOMY, Ranks

MIXED, DECODE, PREFILL = StepKind.MIXED, StepKind.DECODE, StepKind.PREFILL
POLICY = KindPolicy(hold_steps=2, decode_itl_ns=50e6)
LONE = ([8, 8, 8, 8], [512, 0, 0, 0])  # 2080 tokens padded, 544 real


@pytest.mark.parametrize(
    ("decode", "prefill", "kind"),
    [
        ([0, 0], [0, 0], DECODE),
        ([8, 8], [0, 0], DECODE),
        ([0, 0], [64, 0], PREFILL),
        ([8], [512], MIXED),  # one rank pads nothing
        ([8, 8], [64, 64], MIXED),
        ([8, 8, 8, 8], [512, 512, 512, 0], DECODE),  # 2080 padded, 1568 real: too many pads
        (*LONE, DECODE),  # a lone prefill waits for others
    ],
)
def test_the_kind_of_a_step(decode: list[int], prefill: list[int], kind: StepKind) -> None:
    assert POLICY.choose(Intents(decode, prefill, room=4096)) == kind


def test_a_lone_prefill_is_held_for_at_most_so_many_steps() -> None:
    kinds = [POLICY.choose(Intents(*LONE, held=held, room=4096)) for held in range(3)]
    assert kinds == [DECODE, DECODE, PREFILL]
    assert KindPolicy(hold_steps=0).choose(Intents(*LONE, room=4096)) == PREFILL


def test_much_waiting_prefill_is_not_held() -> None:
    assert POLICY.choose(Intents(*LONE, waiting_tokens=2047, room=4096)) == DECODE
    assert POLICY.choose(Intents(*LONE, waiting_tokens=2048, room=4096)) == PREFILL


def test_a_run_of_prefill_goes_on_below_the_tokens_that_began_it_and_ends_when_few_are_left() -> (
    None
):
    for waiting, kind in ((512, PREFILL), (511, DECODE)):
        intents = Intents(*LONE, stalled=1, waiting_tokens=waiting, room=4096)
        assert POLICY.choose(intents) == kind


def test_a_run_of_prefill_ends_when_the_decodes_have_waited_long_enough() -> None:
    def kinds(prefill_ns: float) -> list[StepKind]:
        many = {"waiting_tokens": 9999, "room": 4096, "prefill_ns": prefill_ns}
        return [POLICY.choose(Intents(*LONE, stalled=at, **many)) for at in range(1, 6)]  # type: ignore[arg-type]

    assert kinds(0).count(PREFILL) == STALL_STEPS - 1  # nobody knows what a step takes
    assert kinds(10e6) == [PREFILL] * 4 + [DECODE]  # 50 ms of 10 ms each
    assert kinds(80e6) == [DECODE] * 5  # a single step is longer than that


def test_decodes_ride_along_while_recent_steps_padded_little_or_the_prefill_has_waited() -> None:
    uneven = ([8, 8, 8, 8], [512, 512, 512, 0])  # 512 pads of 2080
    full = 512 / MAX_PAD_SHARE - 2080  # tokens without pads that make up for them
    assert POLICY.choose(Intents(*uneven, padded=full + 1)) == MIXED
    assert POLICY.choose(Intents(*uneven, padded=full - 1)) == DECODE
    assert POLICY.choose(Intents(*uneven, held=2)) == MIXED


tokens = st.lists(st.integers(0, 600), min_size=1, max_size=8)


@given(
    st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6),
    st.integers(0, 4),
    st.sampled_from([0.0, 1e6, 30e6, 90e6]),
    st.integers(0, 1 << 16),
)
def test_neither_side_starves_whatever_comes(
    intents: list[tuple[list[int], list[int]]], hold: int, prefill_ns: float, waiting: int
) -> None:
    """Both sides have work in every step, as much of it as hypothesis likes."""
    policy = KindPolicy(hold_steps=hold, decode_itl_ns=50e6)
    patience = STALL_STEPS if prefill_ns == 0 else max(1, int(50e6 // prefill_ns))
    held = stalled = 0
    pads = padded = 0.0
    for step in range(60):
        decode, prefill = intents[step % len(intents)]
        both = [
            (d or int(at == 0), p or int(at == 0))
            for at, (d, p) in enumerate(zip(decode, prefill, strict=False))
        ]
        decode, prefill = [d for d, _ in both], [p for _, p in both]
        kind = policy.choose(
            Intents(
                decode,
                prefill,
                held=held,
                stalled=stalled,
                waiting_tokens=max(waiting, sum(prefill)),
                room=4096,
                prefill_ns=prefill_ns,
                pads=pads,
                padded=padded,
            )
        )
        held = held + 1 if kind == DECODE else 0
        stalled = stalled + 1 if kind == PREFILL else 0
        if kind == MIXED:
            widest = max(d + p for d, p in both) * len(both)
            pads, padded = pads + widest - sum(map(sum, both)), padded + widest
        assert held <= max(1, hold)
        assert stalled <= patience


def test_a_policy_of_ones_own_is_asked_where_there_is_a_choice() -> None:
    asked: list[Intents] = []

    def decode_first(intents: Intents) -> StepKind:
        asked.append(intents)
        return DECODE

    driver = Driver(replace(CONFIG, depth=1), choose_kind=decode_first)
    first = driver.ask(16, max_tokens=8)
    driver.step()
    assert not asked  # nothing decodes yet
    second = driver.ask(16, max_tokens=8)
    while not first.terminals:
        driver.step()
    assert not second.output
    assert asked[0].decode_tokens == [1]
    assert asked[0].prefill_tokens == [16]
    assert [intents.held for intents in asked] == list(range(len(asked)))
    assert [intents.step for intents in asked] == list(range(1, len(asked) + 1))
    driver.run()
    driver.assert_clean()


def test_the_descriptor_has_the_widest_rank() -> None:
    descriptor = decide([3, 5, 0], [3, 4, 0], [0, 64, 0], [3, 2, 0], walks=1)
    assert descriptor.kind == MIXED
    assert (descriptor.padded_tokens, descriptor.padded_rows) == (68, 5)
    assert (descriptor.decode_rows, descriptor.walks, descriptor.prefill_tokens) == (3, 1, 64)
    assert decide([0, 0], [0, 0], [0, 0], [0, 0]).padded_rows == 1


def test_ranks_that_disagree_are_no_replica_that_is_ready() -> None:
    odd = Ranks([ROOMY, replace(ROOMY, fingerprint="other weights")])
    assert odd.core.engine is None
    assert not odd.core.stats().ready
    assert Ranks([ROOMY, ROOMY]).core.stats().ready
