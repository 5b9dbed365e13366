"""When memory is free again: only behind the device's own watermark."""

from msgspec.structs import replace

from deepmesh.wire.messages import Pool
from tests.core.driver import CONFIG, Driver

SLOW = replace(CONFIG, prefix_cache=False)


def test_tokens_ready_frees_nothing_and_gpu_done_does() -> None:
    driver = Driver(SLOW)
    request = driver.ask(20, max_tokens=1)
    driver.tick()
    driver.body()
    driver.tail()
    driver.body()
    assert request.terminals
    assert driver.blocks(Pool.GLOBAL)[2] == 3
    assert driver.blocks(Pool.STATE)[2] == 1
    driver.tail()
    assert driver.blocks(Pool.GLOBAL)[2] == 0
    driver.assert_clean()


def test_a_slot_is_not_given_away_before_its_fence() -> None:
    driver = Driver(replace(SLOW, max_rows=1), num_slots=1)
    driver.ask(10, max_tokens=1)
    late = driver.ask(10, max_tokens=1)
    driver.tick()
    driver.body()
    driver.tick()
    assert not driver.is_resident(late)
    driver.tail()
    driver.tick()
    assert driver.is_resident(late)
    (init,) = driver.steps[0].init
    assert (init.slot, init.gen) == (0, 1)
    driver.run()
    driver.assert_clean()


def test_blocks_of_an_aborted_request_wait_for_all_steps_that_had_its_rows() -> None:
    driver = Driver(replace(SLOW, depth=3))
    request = driver.ask(10, max_tokens=50)
    driver.tick()
    assert len(driver.steps) == 3
    driver.abort(request)
    assert request.terminals
    fenced = [driver.blocks(pool)[2] for pool in range(3)]
    assert min(fenced) > 0
    for _ in range(2):
        driver.body()
        driver.tail()
        assert [driver.blocks(pool)[2] for pool in range(3)] == fenced
    driver.body()
    driver.tail()
    assert [driver.blocks(pool)[2] for pool in range(3)] == [0, 0, 0]
    driver.assert_clean()


def test_window_blocks_are_given_back_behind_the_window_and_global_ones_kept() -> None:
    driver = Driver(SLOW)
    driver.ask(20, max_tokens=100)
    most = 0
    for _ in range(80):
        driver.step()
        most = max(most, driver.blocks(Pool.WINDOW)[3])
    held = driver.blocks(Pool.GLOBAL)[3]
    assert held >= 12
    # the prompt in one chunk; then W = 16 rows and two in flight touch at most 4 blocks of 8
    assert most <= 4
    driver.run()
    driver.assert_clean()


def test_a_window_pool_far_smaller_than_the_context_is_enough() -> None:
    driver = Driver(SLOW, num_window_blocks=6)
    driver.ask(200, max_tokens=100)
    driver.run()
    driver.assert_clean()


def test_two_finish_paths_release_once() -> None:
    driver = Driver()
    request = driver.ask(10, max_tokens=10)
    for _ in range(4):
        driver.step()
    driver.stop_at(request, 2)
    driver.abort(request)
    driver.stop_at(request, 1)
    driver.run()
    assert len(request.terminals) == 1
    assert request.terminals[0].final_pos == 2


def test_a_request_that_ends_with_rows_in_flight_leaves_a_zombie_until_they_are_resolved() -> None:
    driver = Driver(replace(SLOW, depth=2))
    request = driver.ask(10, max_tokens=50)
    driver.tick()
    driver.abort(request)
    engine = driver.core.engine
    assert engine is not None
    assert sum(zombie.rows for zombie in engine.residency.zombies.values()) == 2
    assert driver.core.stats().inflight_tokens == 11
    driver.run()
    assert not engine.residency.zombies
    driver.assert_clean()


def test_the_canceled_row_is_named_in_the_next_step() -> None:
    driver = Driver(SLOW)
    victim, other = driver.ask(10, max_tokens=50), driver.ask(10, max_tokens=4)
    driver.tick()
    driver.body()
    driver.abort(victim)
    driver.tick()
    assert driver.steps[-1].cancel
    assert driver.steps[-1].close
    driver.run()
    assert other.terminals
    driver.assert_clean()
