"""A tokenizer that says how far it has read is not sent much more than that."""

from deepmesh.wire.messages import Ack, TokenBatch, TokenRow
from services.scheduler.core.readers import MAX_BEHIND
from tests.core.driver import TOKENIZER, Driver


def batches(driver: Driver) -> list[TokenBatch]:
    """Those of steps."""
    return [batch for batch in driver.messages(TokenBatch) if batch.group_step]


def test_a_tokenizer_that_says_nothing_is_never_waited_for() -> None:
    driver = Driver()
    request = driver.ask(4, max_tokens=5 * MAX_BEHIND)
    driver.run()
    assert len(request.output) == 5 * MAX_BEHIND


def test_rows_of_a_tokenizer_that_is_behind_wait_until_it_has_read() -> None:
    driver = Driver()
    request = driver.ask(4, max_tokens=5 * MAX_BEHIND)
    driver.step()
    driver.mail(Ack([], 1))  # from here on it is counted
    driver.run()
    depth = driver.core.config.depth
    assert MAX_BEHIND <= len(batches(driver)) <= 1 + MAX_BEHIND + depth
    assert not request.terminals

    seen = len(request.output)
    driver.mail(Ack([], batches(driver)[-1].group_step))
    driver.run()
    assert seen + MAX_BEHIND <= len(request.output) <= seen + MAX_BEHIND + depth

    while not request.terminals:
        driver.mail(Ack([], batches(driver)[-1].group_step))
        driver.run()
    driver.assert_clean()


def test_others_go_on_meanwhile_and_a_prompt_is_computed() -> None:
    driver = Driver()
    slow = driver.ask(4, max_tokens=4 * MAX_BEHIND)
    driver.step()
    driver.mail(Ack([], 1))
    driver.run()
    seen = len(slow.output)
    other = driver.ask(40, max_tokens=4 * MAX_BEHIND)
    driver.attach(other, 0, "tokenizer-1")
    driver.run()
    assert other.terminals
    assert len(slow.output) == seen


def test_a_lost_link_ends_the_count() -> None:
    driver = Driver()
    request = driver.ask(4, max_tokens=4 * MAX_BEHIND)
    driver.step()
    driver.mail(Ack([], 1))
    driver.run()
    assert not request.terminals
    driver.lose_tokenizer()  # its requests go on as orphans
    driver.run()
    driver.regain_tokenizer()
    assert request.terminals
    driver.assert_clean()


def test_what_is_sent_again_does_not_count() -> None:
    driver = Driver()
    request = driver.ask(4, max_tokens=MAX_BEHIND)
    driver.step()
    driver.mail(Ack([], 1))
    for _ in range(2 * MAX_BEHIND):
        driver.attach(request, 0)
    rows: list[TokenRow] = [row for batch in driver.messages(TokenBatch) for row in batch.rows]
    assert len(rows) > MAX_BEHIND
    driver.run()
    assert request.terminals
    assert TOKENIZER not in driver.core.outbox.readers.behind
