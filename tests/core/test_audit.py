"""The audit sees what it is there for: each line finds a state that somebody broke by hand."""

from collections.abc import Callable

import pytest

from services.scheduler.core.audit import AuditError, audit
from services.scheduler.core.engine import Engine
from services.scheduler.core.group import Group, StepState
from tests.core.driver import Driver


def engine_of(driver: Driver) -> Engine:
    assert driver.core.engine is not None
    return driver.core.engine


def slot_of_a_resident(driver: Driver) -> int:
    return int(engine_of(driver).residency.table.resident()[0])


def add_to(column: str, amount: int = 1) -> Callable[[Driver], None]:
    def corrupt(driver: Driver) -> None:
        table = engine_of(driver).residency.table
        getattr(table, column)[slot_of_a_resident(driver)] += amount

    return corrupt


def free_slot_of_a_resident(driver: Driver) -> None:
    memory = engine_of(driver).memories[0]
    assert memory.take_slot() is not None
    memory.release_slot(slot_of_a_resident(driver), 0)


def expect_what_nobody_computes(driver: Driver) -> None:
    engine_of(driver).residency.expected[0][b"prefix"] += 1


def change_group(change: Callable[[Group], None]) -> Callable[[Driver], None]:
    return lambda driver: change(driver.core.group)


def ask_beyond_the_context(driver: Driver) -> None:
    request = next(iter(driver.core.registry.live.values()))
    request.max_len = 513


@pytest.mark.parametrize(
    ("text", "corrupt"),
    [
        ("I3 more global blocks", add_to("sent_global")),
        ("I3 more window blocks", add_to("sent_window")),
        ("I5 Σq", add_to("inflight_q")),
        ("I5 sure positions", add_to("inflight_min")),
        ("I5 rows in flight", add_to("inflight_rows", -1)),
        ("I5 sure output tokens", add_to("inflight_tokens")),
        ("I15", add_to("producer")),
        ("I16 slots", free_slot_of_a_resident),
        ("I25 prefixes", expect_what_nobody_computes),
        ("I27 a request beyond", ask_beyond_the_context),
        ("I13 an engine without", change_group(lambda group: group.loaded.clear())),
        ("I13 steps out of order", change_group(lambda group: group.unresolved.reverse())),
        ("I13 a step of nobody", change_group(lambda group: group.unresolved[1].pending.clear())),
        (
            "I13 state",
            change_group(lambda group: setattr(group.unresolved[0], "state", StepState.APPLIED)),
        ),
        ("I13 rank 0 applied", change_group(lambda g: g.applied.__setitem__(0, 1 << 40))),
        ("I10 rank 0 is done", change_group(lambda g: g.gpu_done.__setitem__(0, 1 << 40))),
    ],
)
def test_a_broken_state_is_found(text: str, corrupt: Callable[[Driver], None]) -> None:
    driver = Driver()
    driver.ask(20, max_tokens=20)
    driver.step()
    driver.tick()
    assert len(driver.core.group.unresolved) == 2
    audit(driver.core)
    corrupt(driver)
    with pytest.raises(AuditError, match=f"^{text}"):
        audit(driver.core)
