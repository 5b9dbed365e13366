"""Log-probabilities of a prompt on their way from the ranks to the tokenizer."""

import hashlib

import numpy as np
from msgspec.structs import replace

from deepmesh.wire.messages import Attach, PromptLogprobs, StepResult, TokenBatch
from deepmesh.wire.packed import ROW, pack_ids
from services.scheduler.core.prompt_probs import PromptProbs
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import EXECUTOR, TOKENIZER, Driver, words

TOP = 2


def part(first: int, count: int, row: int = 0) -> PromptLogprobs:
    """Of ids first, first + 1, …: minus their positions, and made-up best ids."""
    positions = np.arange(first, first + count)
    return PromptLogprobs(
        first,
        (-positions).astype("<f4").tobytes(),
        pack_ids(np.repeat(positions, TOP).astype(np.int32)),
        np.repeat(-positions, TOP).astype("<f4").tobytes(),
        row,
        positions.astype("<i4").tobytes(),
    )


def ask(
    driver: Driver, prompt: list[int], n_prompt_logprobs: int = TOP, known: list[int] | None = None
) -> SimRequest:
    rid = hashlib.blake2b(f"asked {len(driver.requests)}".encode(), digest_size=16).digest()
    request = SimRequest(rid, prompt, 4)
    driver.requests[rid] = request
    message = replace(
        request.generate(TOKENIZER),
        n_prompt_logprobs=n_prompt_logprobs,
        confirmed_ids=pack_ids(known or []),
    )
    driver.mail(message)
    return request


def run_step(driver: Driver) -> StepResult:
    """One step; its rows of prompts bring what they were asked for."""
    driver.tick()
    step = driver.steps.popleft()
    driver.now += 1_000_000
    result = driver.device.body(step)
    asked = {init.slot for init in driver.all_steps[0].init if init.n_prompt_logprobs >= 0}
    parts: list[PromptLogprobs] = []
    for number, row in enumerate(np.frombuffer(step.rows, ROW)):
        start, end = int(row["start_lo"]), int(row["start_lo"] + row["q"])
        if int(row["slot"]) in asked and start < 39:
            parts.append(part(start + 1, min(end, 39) - start, number))
    driver.tails.append(step)
    driver.mail(replace(result, prompt=parts), EXECUTOR)
    driver.tail()
    return result


def first_rows(driver: Driver) -> list[PromptLogprobs | None]:
    """What came with the first output tokens."""
    batches = driver.messages(TokenBatch)
    return [row.prompt for batch in batches for row in batch.rows if row.pos == 0]


def test_they_come_whole_with_the_first_output_token() -> None:
    driver = Driver()
    request = ask(driver, words(40))  # two chunks
    while not request.output:
        run_step(driver)
    assert first_rows(driver) == [part(1, 39)]
    assert all(row.fingerprint == "weights" for b in driver.messages(TokenBatch) for row in b.rows)


def test_they_are_sent_again_to_whoever_attaches() -> None:
    driver = Driver()
    request = ask(driver, words(40))
    while not request.output:
        run_step(driver)
    driver.mail(Attach(request.rid, 1, TOKENIZER, 0))
    assert first_rows(driver) == [part(1, 39)] * 2


def test_who_comes_before_they_are_known_again_gets_them_with_the_first_token() -> None:
    """Scheduler and tokenizer are lost one after the other: nobody has them."""
    before = Driver()
    request = ask(before, words(40))
    while len(request.output) < 2:
        run_step(before)
    driver = Driver()
    ask(driver, words(40), known=request.output[:2])
    driver.mail(Attach(request.rid, 1, TOKENIZER, 0))
    assert not driver.messages(TokenBatch)
    run_step(driver)
    driver.mail(Attach(request.rid, 1, TOKENIZER, 0))
    assert not driver.messages(TokenBatch)
    while not driver.messages(TokenBatch):
        run_step(driver)
    assert first_rows(driver) == [part(1, 39)]
    run_step(driver)
    assert [row.pos for batch in driver.messages(TokenBatch) for row in batch.rows] == [0, 3]


def test_a_cached_prefix_is_computed_again_for_them() -> None:
    driver = Driver()
    driver.ask(words(40), 4)
    driver.run()
    plain = driver.ask(words(40), 4)
    driver.run()
    assert plain.cached_tokens > 0
    request = ask(driver, words(40))
    driver.tick()  # plans both chunks
    assert (int(driver.rows(-2)[0]["start_lo"]), request.cached_tokens) == (0, 0)
    assert driver.all_steps[-2].init[0].n_prompt_logprobs == TOP


def test_once_they_are_known_a_recompute_need_not_bring_them() -> None:
    driver = Driver()
    request = ask(driver, words(40))
    while not request.output:
        run_step(driver)
    driver.lose_executor()
    driver.load()
    driver.run()
    inits = [init.n_prompt_logprobs for step in driver.all_steps for init in step.init]
    assert inits == [TOP, -1]
    driver.assert_clean()


def test_parts_must_follow_one_another_and_fit() -> None:
    probs = PromptProbs(prompt_len=40, num_top=TOP)
    assert probs.add(part(1, 16))
    assert not probs.add(part(18, 4))  # a gap
    assert not probs.add(part(17, 24))  # beyond the prompt
    assert not probs.add(replace(part(17, 4), top_ids=b""))
    assert not probs.add(replace(part(17, 4), ranks=b"1234"))
    assert probs.add(part(9, 16))  # computed before, and more
    assert probs.add(part(1, 4))  # nothing new
    assert not probs.is_complete
    assert probs.add(part(25, 15))
    assert probs.is_complete
    assert probs.whole() == part(1, 39)


def test_ranks_that_an_executor_does_not_bring_are_left_out() -> None:
    probs = PromptProbs(prompt_len=40, num_top=TOP)
    assert probs.add(part(1, 16))
    assert probs.add(replace(part(17, 23), ranks=b""))
    assert probs.whole() == replace(part(1, 39), ranks=b"")
