"""Grammars are compiled before their requests enter; nobody waits for them for ever."""

from deepmesh.wire.messages import CompileGrammars, GrammarsCompiled
from services.scheduler.core.grammars import AWAIT_NS
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import EXECUTOR, SECOND, Driver

AWAIT_S = AWAIT_NS / SECOND


def orders(driver: Driver) -> list[int]:
    """Numbers of everything that was ordered."""
    return [number for m in driver.messages(CompileGrammars) for number, _ in m.orders]


def answer(driver: Driver, *numbers: int, epoch: int | None = None) -> None:
    epoch = driver.core.group.engine_epoch if epoch is None else epoch
    driver.mail(GrammarsCompiled(epoch, 0, list(numbers)), EXECUTOR)


def test_a_request_enters_once_its_grammar_is_compiled() -> None:
    driver = Driver(grammars=8)
    request = driver.ask(10, grammar=True)
    driver.tick()
    assert not driver.is_resident(request)
    assert [grammar.text for _, grammar in driver.last(CompileGrammars).orders] == [
        request.generate("").grammar.text  # type: ignore[union-attr]  # it has one
    ]
    answer(driver, *orders(driver))
    driver.tick()
    assert driver.is_resident(request)
    driver.run()
    driver.assert_clean()


def test_others_pass_a_request_that_waits_for_its_grammar() -> None:
    driver = Driver(grammars=8)
    first, second = driver.ask(10, grammar=True), driver.ask(10)
    driver.tick()
    assert (driver.is_resident(first), driver.is_resident(second)) == (False, True)


def test_a_burst_is_ordered_in_one_message() -> None:
    driver = Driver(grammars=64)
    for _ in range(20):
        driver.ask(4, grammar=True)
    driver.tick()
    (message,) = driver.messages(CompileGrammars)
    assert len(message.orders) == 20


def test_an_executor_that_does_not_answer_costs_time_only() -> None:
    driver = Driver(grammars=8)
    request = driver.ask(10, grammar=True)
    driver.tick(seconds=AWAIT_S - 0.1)
    assert not driver.is_resident(request)
    driver.tick(seconds=0.2)
    assert driver.is_resident(request)
    driver.run()
    driver.assert_clean()


def test_a_known_grammar_is_not_ordered_again() -> None:
    driver = Driver(grammars=8)
    first = driver.ask(10, grammar=True)
    driver.tick()
    answer(driver, *orders(driver))
    second = SimRequest(b"s" * 16, [1, 2, 3], 4, seed=first.seed, grammar=True)
    driver.requests[second.rid] = second
    driver.mail(second.generate("tokenizer-0"))
    driver.tick()
    assert driver.is_resident(second)
    assert len(orders(driver)) == 1


def test_an_executor_without_the_order_is_not_asked() -> None:
    driver = Driver()
    request = driver.ask(10, grammar=True)
    driver.tick()
    assert driver.is_resident(request)
    assert not driver.messages(CompileGrammars)


def test_the_next_engine_is_asked_anew_and_old_answers_are_not_heard() -> None:
    driver = Driver(grammars=8)
    request = driver.ask(10, grammar=True)
    driver.tick()
    old = driver.core.group.engine_epoch
    driver.lose_executor()
    driver.load()
    driver.tick()
    assert len(orders(driver)) == 2
    answer(driver, *orders(driver), epoch=old)
    driver.tick()
    assert not driver.is_resident(request)
    answer(driver, orders(driver)[-1])
    driver.tick()
    assert driver.is_resident(request)


def test_no_more_are_ordered_at_once_than_an_executor_keeps() -> None:
    """Else the first would be forgotten before its request is in a step."""
    driver = Driver(grammars=4)
    for _ in range(7):
        driver.ask(4, max_tokens=2, grammar=True)
    driver.tick()
    assert len(orders(driver)) == 2
    for _ in range(7):
        answer(driver, *orders(driver))
        driver.step()
    assert len(orders(driver)) == 7
    driver.run()
    driver.assert_clean()


def test_who_leaves_while_it_waits_holds_up_nobody() -> None:
    driver = Driver(grammars=1)
    gone = driver.ask(4, grammar=True)
    driver.tick()
    driver.abort(gone)
    stays = driver.ask(4, grammar=True)
    driver.tick()
    assert not driver.is_resident(stays)
    driver.tick(seconds=AWAIT_S)  # what was ordered for the other is given up
    driver.tick(seconds=AWAIT_S)
    assert driver.is_resident(stays)
