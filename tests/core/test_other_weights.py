"""An executor comes back with other weights: no answer holds tokens of two models."""

import pytest
from msgspec.structs import replace

from deepmesh.wire.messages import ErrorCode, Failed, Finished
from tests.core.driver import TOKENIZER, Driver

OLD, NEW, NEW_BUILD = "old.1", "new.1", "old.2"


def begun(driver: Driver) -> None:
    """One request has answered some tokens, another one waits for its first."""
    driver.ask(10, max_tokens=30)
    for _ in range(6):
        driver.step()
    driver.ask(10, max_tokens=3)


def come_back(driver: Driver, fingerprint: str) -> None:
    driver.lose_executor()
    driver.capacity = replace(driver.capacity, fingerprint=fingerprint)
    driver.load()


def test_what_was_begun_is_refused_and_what_was_not_is_answered() -> None:
    driver = Driver(fingerprint=OLD)
    begun(driver)
    first, second = driver.requests.values()
    assert first.output
    come_back(driver, NEW)
    (failed,) = first.terminals
    assert isinstance(failed, Failed)
    assert failed.code is ErrorCode.MISMATCH  # the tokenizer looks for a replica with the old ones
    assert failed.final_pos == len(first.output)
    assert failed.retry_after_s > 0
    assert OLD in failed.detail
    driver.run()
    assert isinstance(second.terminals[0], Finished)
    driver.assert_clean()


def test_the_same_weights_in_another_build_go_on() -> None:
    driver = Driver(fingerprint=OLD)
    begun(driver)
    come_back(driver, NEW_BUILD)
    driver.run()
    for request in driver.requests.values():
        assert isinstance(request.terminals[0], Finished)
        request.verify(97)
    driver.assert_clean()


@pytest.mark.parametrize(
    ("theirs", "is_taken"), [(OLD, True), (NEW_BUILD, True), ("", True), (NEW, False)]
)
@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_continuation_from_elsewhere_must_be_of_these_weights(
    theirs: str, is_taken: bool, is_loaded: bool
) -> None:
    driver = Driver(fingerprint=OLD, load=is_loaded)
    request = driver.ask(10, max_tokens=30)
    driver.abort(request)
    whole = Driver(fingerprint=OLD).ask(10, max_tokens=30)
    generate = replace(
        request.generate(TOKENIZER), rid=b"c" * 16, confirmed_ids=b"\1\0\0\0", fingerprint=theirs
    )
    request.rid, request.output, request.terminals = b"c" * 16, [1], []
    driver.requests = {request.rid: request}
    driver.mail(generate)
    if not is_loaded:
        driver.load()
    refused = [m for m in driver.messages(Failed) if m.rid == request.rid]
    assert bool(refused) is not is_taken
    assert all(m.code is ErrorCode.MISMATCH for m in refused)
    assert whole.prompt == request.prompt


def test_a_prefix_of_other_weights_is_not_hit() -> None:
    driver = Driver(fingerprint=OLD)
    prompt = list(range(1, 61))
    driver.ask(prompt, max_tokens=2)
    driver.run()
    come_back(driver, NEW)
    again = driver.ask(prompt, max_tokens=2)
    driver.run()
    end = again.terminals[0]
    assert isinstance(end, Finished)
    assert end.cached_tokens == 0
