"""What a repeated prompt finds: points on the chunk grid, shared blocks, eviction by class."""

from msgspec.structs import replace

from deepmesh.wire.messages import OpKind, Pool
from tests.core.driver import CONFIG, Driver, words


def test_the_same_prompt_resumes_at_the_last_grid_point_below_its_end() -> None:
    driver = Driver()
    prompt = words(60)
    first = driver.ask(prompt, max_tokens=3)
    driver.run()
    second = driver.ask(prompt, max_tokens=3)
    driver.run()
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert second.terminals[0].cached_tokens == 48
    assert driver.core.stats().cached_prompt_tokens == 48
    driver.assert_clean()


def test_a_hit_never_covers_the_last_token() -> None:
    driver = Driver()
    prompt = words(48)
    driver.ask(prompt, max_tokens=2)
    driver.run()
    again = driver.ask(prompt, max_tokens=2)
    driver.run()
    assert again.cached_tokens == 32
    driver.assert_clean()


def test_a_prompt_that_ends_exactly_at_a_point_does_not_resume_there() -> None:
    driver = Driver()
    prompt = words(60)
    driver.ask(prompt, max_tokens=2)
    driver.run()
    shorter = driver.ask(prompt[:48], max_tokens=2)
    driver.run()
    assert shorter.cached_tokens == 0
    driver.assert_clean()


def test_the_point_state_is_copied_before_the_first_row() -> None:
    driver = Driver()
    prompt = words(40)
    driver.ask(prompt, max_tokens=1)
    driver.run()
    driver.ask(prompt, max_tokens=1)
    driver.tick()
    step = driver.steps[0]
    (init,) = step.init
    (copy,) = [op for op in step.ops if not op.after]
    assert init.start == 32
    assert (copy.kind, copy.pool, copy.dst) == (OpKind.COPY, Pool.STATE, init.state_block)
    driver.run()
    driver.assert_clean()


def test_another_salt_or_other_tokens_find_nothing() -> None:
    driver = Driver()
    prompt = words(40)
    driver.ask(prompt, max_tokens=1)
    driver.run()
    salted = driver.ask(prompt, max_tokens=1, salt=b"tenant")
    other = driver.ask([prompt[0] ^ 1, *prompt[1:]], max_tokens=1)
    driver.run()
    assert (salted.cached_tokens, other.cached_tokens) == (0, 0)
    driver.assert_clean()


def test_the_next_turn_resumes_in_the_output_of_the_last() -> None:
    driver = Driver()
    first = driver.ask(20, max_tokens=40)
    driver.run()
    turn = driver.ask(first.prompt + first.output + words(10), max_tokens=4)
    driver.run()
    assert turn.cached_tokens == 48  # 59 positions had KV
    driver.assert_clean()


def test_the_output_is_not_reused_where_kernels_differ_by_class() -> None:
    driver = Driver(one_kernel_class=False)
    first = driver.ask(20, max_tokens=40)
    driver.run()
    turn = driver.ask(first.prompt + first.output + words(10), max_tokens=4)
    driver.run()
    assert turn.cached_tokens == 16
    driver.assert_clean()


def test_only_the_last_point_of_an_output_is_kept() -> None:
    driver = Driver()
    driver.ask(20, max_tokens=100)
    driver.run()
    assert driver.core.engine is not None
    points = driver.core.engine.memories[0].index.points.values()
    assert sorted(point.position for point in points) == [16, 112]


def test_a_shared_beginning_becomes_resumable_when_it_shows_that_it_is_shared() -> None:
    driver = Driver()
    system = words(64)
    for turn in range(2):
        driver.ask(system + words(20, seed=50 + turn), max_tokens=1)
        driver.run()
    third = driver.ask(system + words(20, seed=60), max_tokens=1)
    driver.run()
    assert third.cached_tokens == 64  # the second request met the first one's blocks
    driver.assert_clean()


def test_sharing_starts_while_the_first_request_still_runs() -> None:
    driver = Driver()
    prompt = words(60)
    driver.ask(prompt, max_tokens=60)
    for _ in range(6):
        driver.step()
    second = driver.ask(prompt, max_tokens=3)
    driver.run()
    assert second.cached_tokens == 48
    driver.assert_clean()


def test_the_same_prompt_at_the_same_time_is_computed_once() -> None:
    driver = Driver()
    prompt = words(60)
    requests = [driver.ask(prompt, max_tokens=3) for _ in range(4)]
    other = driver.ask(20, max_tokens=3)
    driver.run()
    assert [request.cached_tokens for request in requests] == [0, 48, 48, 48]
    assert other.first_token_ns < requests[1].first_token_ns  # it did not wait for them
    computed = sum(report.num_tokens for report in driver.steps_ended())
    assert computed == 60 + 3 * 12 + 20 + 5 * 2
    driver.assert_clean()


def test_nobody_waits_for_a_prefix_that_will_not_come() -> None:
    driver = Driver()
    prompt = words(60)
    first, second = driver.ask(prompt, max_tokens=3), driver.ask(prompt, max_tokens=3)
    driver.tick()
    driver.abort(first)
    driver.run()
    assert second.terminals
    assert driver.core.engine is not None
    assert not any(driver.core.engine.residency.expected)
    driver.assert_clean()


def test_without_a_state_block_for_the_point_nobody_waits_for_it() -> None:
    driver = Driver(num_state_blocks=2)
    prompt = words(60)
    blocker = driver.ask(4, max_tokens=60)
    driver.step()
    first, second = driver.ask(prompt, max_tokens=30), driver.ask(prompt, max_tokens=3)
    driver.run()
    assert blocker.terminals
    assert first.terminals
    assert second.terminals
    driver.assert_clean()


def test_cached_blocks_are_evicted_on_demand_least_recently_used_first() -> None:
    driver = Driver(num_global_blocks=16)
    old, new = words(32, seed=1), words(32, seed=2)
    for prompt in (old, new):
        driver.ask([*prompt, 1], max_tokens=1)
        driver.run()
    driver.ask(words(70, seed=3), max_tokens=1)  # 9 blocks; 8 are free
    driver.run()
    assert driver.ask([*new, 2], max_tokens=1).output == []
    driver.run()
    again_old = driver.ask([*old, 2], max_tokens=1)
    driver.run()
    found = [r.cached_tokens for r in driver.requests.values()]
    assert found[3] == 32
    assert again_old.cached_tokens == 0
    driver.assert_clean()


def test_without_window_or_state_blocks_to_spare_points_go_first() -> None:
    driver = Driver(num_state_blocks=1)
    prompt = words(40)
    for _ in range(2):
        request = driver.ask(prompt, max_tokens=2)
        driver.run()
    assert request.cached_tokens == 0  # the only state block is the request's own
    driver.assert_clean()


def test_a_hit_gives_way_when_pinning_it_would_leave_no_room() -> None:
    driver = Driver(num_global_blocks=9, num_state_blocks=2)
    prompt = words(40)
    driver.ask(prompt, max_tokens=20)
    driver.run()
    second = driver.ask(prompt, max_tokens=20)
    driver.run()
    assert second.terminals
    driver.assert_clean()


def test_the_cache_can_be_switched_off() -> None:
    driver = Driver(replace(CONFIG, prefix_cache=False))
    prompt = words(60)
    for _ in range(2):
        request = driver.ask(prompt, max_tokens=3)
        driver.run()
    assert request.cached_tokens == 0
    assert driver.blocks(Pool.GLOBAL)[1] == 0
    driver.assert_clean()


def test_overrun_tokens_are_never_published() -> None:
    driver = Driver()
    request = driver.ask(20, max_tokens=60)
    for _ in range(20):
        driver.step()
    driver.stop_at(request, 4)  # the output has passed the grid point at 32 by now
    driver.run()
    assert driver.core.engine is not None
    points = driver.core.engine.memories[0].index.points.values()
    assert [point.position for point in points] == [16]
    request.stop_at = 4
    driver.assert_clean()


def test_an_output_is_found_from_when_its_request_leaves() -> None:
    driver = Driver()
    first = driver.ask(20, max_tokens=60)
    for _ in range(40):
        driver.step()
    assert driver.core.engine is not None
    index = driver.core.engine.memories[0].index
    kept = [point.position for point in index.points.values()]
    assert sorted(kept) == [16, 48]
    early = driver.ask(first.prompt + first.output + words(10), max_tokens=1)
    driver.step()
    driver.abort(first)
    driver.run()
    late = driver.ask(first.prompt + first.output + words(10), max_tokens=1)
    driver.run()
    assert (early.cached_tokens, late.cached_tokens) == (16, 48)
    driver.assert_clean()
