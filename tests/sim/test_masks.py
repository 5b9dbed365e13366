"""Grammar rows: masks by tag, rows without their mask sample nothing, and how grammars end."""

from msgspec.structs import replace

from deepmesh.wire.messages import ErrorCode, Failed, Finished, FinishReason
from services.scheduler.sim.clock import MS, Times
from services.scheduler.sim.requests import SimRequest
from services.scheduler.sim.world import World
from tests.sim.test_world import CONFIG, ROOMY


def grammars(world: World, count: int, grammar_len: int = 0) -> list[SimRequest]:
    """Requests that run side by side, each with a grammar of its own."""
    found: list[SimRequest] = []
    for number in range(count):
        request = SimRequest(
            rid=number.to_bytes(16, "big"),
            prompt=[(7 * number + at) % 97 for at in range(5 + number)],
            max_tokens=24,
            seed=number,
            grammar=True,
            grammar_len=grammar_len,
        )
        world.submit(request)
        found.append(request)
    return found


def test_rows_take_the_masks_of_their_own_tags_however_late_they_are() -> None:
    for draft_len in (0, 3):
        capacity = replace(ROOMY, draft_len=draft_len)
        world = World(replace(CONFIG, depth=3), capacity, seed=1, mask_miss=0.3)
        grammars(world, 6)
        world.run()
        world.verify()
        assert world.num_failed == 0
        assert world.covered().counts["missed masks"] > 5


def test_an_output_ends_where_its_grammar_is_complete() -> None:
    world = World(CONFIG, ROOMY, seed=2)
    for request in grammars(world, 4, grammar_len=9):
        request.stop_ids = frozenset()
    world.run()
    world.verify()
    for request in world.requests.values():
        (end,) = request.terminals
        assert isinstance(end, Finished)
        assert (end.reason, end.final_pos) == (FinishReason.GRAMMAR, 9)


def test_a_matcher_that_dies_costs_its_own_request_only() -> None:
    world = World(CONFIG, ROOMY, seed=3)
    grammars(world, 4)
    world.clock.at(12 * MS, lambda: world.executors[0].device.masks.kill_matcher(1))
    world.run()
    world.verify()
    failed = [r.terminals[0] for r in world.requests.values() if isinstance(r.terminals[0], Failed)]
    assert [end.code for end in failed if isinstance(end, Failed)] == [ErrorCode.GRAMMAR]


def test_a_mask_worker_that_restarts_costs_time_only() -> None:
    world = World(CONFIG, ROOMY, seed=4)
    grammars(world, 4)
    world.clock.at(12 * MS, lambda: world.executors[0].device.masks.restart(20 * MS))
    world.run()
    world.verify()
    assert world.num_failed == 0


def test_rows_of_new_grammars_sit_out_no_step_where_they_are_compiled_ahead() -> None:
    missed: list[int] = []
    for kept in (0, 64):
        times = Times(compile=20 * MS)
        world = World(CONFIG, replace(ROOMY, grammars=kept), seed=5, times=times)
        grammars(world, 6)
        world.run()
        world.verify()
        missed.append(world.covered().counts["missed masks"])
    assert missed[0] > 6
    assert missed[1] == 0


def test_grammars_that_nobody_answers_for_hold_up_nothing_for_ever() -> None:
    times = Times(compile=5 * MS)
    capacity = replace(ROOMY, grammars=4)
    world = World(CONFIG, capacity, seed=6, ranks=2, times=times, deaf=0.4)
    grammars(world, 12)
    world.clock.at(30 * MS, lambda: world.kill_executor(1, 20 * MS))
    world.run()
    world.verify()
    assert world.num_failed == 0
