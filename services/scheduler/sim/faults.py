"""Faults at random moments: processes that die or stall, links that are cut or lose messages,
devices that fail, clocks that jump."""

from collections.abc import Callable

from .clock import MS, SECOND
from .link import MISHAPS, WAYS
from .world import World

FaultKind = str
KINDS: tuple[FaultKind, ...] = (
    "kill executor",
    "kill executor early",
    "cut executor",
    "device error",
    "hang executor",
    "nan row",
    "kill tokenizer",
    "cut tokenizer",
    "slow client",
    "kill scheduler",
    "pause",
    "jump clock",
    "kill matcher",
    "restart masks",
    "lose message",
    "repeat message",
    "overtake message",
    "delay message",
)
STORE_KINDS: tuple[FaultKind, ...] = ("kill kvstore", "cut kvstore", "hang kvstore")
_EARLY_NS = (5 * MS, 9 * MS)  # around the first step's end


def schedule_faults(
    world: World, count: int, *, span_ns: int, kinds: tuple[FaultKind, ...] = KINDS
) -> list[FaultKind]:
    """Draw `count` faults from the world's own generator and let them happen within `span_ns`."""
    draw = world.clock.random
    chosen = [draw.choice(kinds) for _ in range(count)]
    for kind in chosen:
        at = draw.randrange(*_EARLY_NS) if kind.endswith("early") else draw.randrange(span_ns)
        world.clock.at(at, _fault(world, kind))
    return chosen


def _fault(world: World, kind: FaultKind) -> Callable[[], None]:
    draw, process = world.clock.random, world.process
    rank, index = draw.randrange(len(world.executors)), draw.randrange(len(world.tokenizers))
    back_after = draw.randrange(1, 30) * MS
    executor, tokenizer = world.executors[rank], world.tokenizers[index]
    if kind.endswith("message"):
        link, way = draw.choice([executor, tokenizer]).link, draw.choice(WAYS)
        mishap = next(name for name in MISHAPS if kind.startswith(name))
        return lambda: link.spoil(way, mishap)

    def device_error() -> None:
        executor.num_errors_due += 1

    def nan_row() -> None:
        executor.device.nan_rows_due += 1

    def hang() -> None:
        executor.is_hung = True

    def slow_client() -> None:
        tokenizer.read(is_reading=False)
        world.clock.at(10 * back_after, lambda: tokenizer.read(is_reading=True))

    def pause() -> None:
        world.pause()
        world.clock.at(back_after, world.resume)

    jump = draw.randrange(-20, 21) * SECOND

    def jump_clock() -> None:
        process.skew_ns += jump

    def each_store(act: Callable[[int], None]) -> Callable[[], None]:
        def act_on_all() -> None:
            for at in range(len(world.stores)):
                act(at)

        return act_on_all

    def hang_store(at: int) -> None:
        world.stores[at].is_hung = True

    return {
        "kill kvstore": each_store(lambda at: world.kill_store(at, back_after)),
        "cut kvstore": each_store(lambda at: world.disconnect(world.stores[at], back_after)),
        "hang kvstore": each_store(hang_store),
        "kill executor": lambda: world.kill_executor(rank, back_after),
        "kill executor early": lambda: world.kill_executor(rank, back_after),
        "cut executor": lambda: world.disconnect(executor, back_after),
        "device error": device_error,
        "nan row": nan_row,
        "hang executor": hang,
        "kill tokenizer": lambda: world.kill_tokenizer(index, back_after),
        "cut tokenizer": lambda: world.disconnect(tokenizer, back_after),
        "slow client": slow_client,
        "kill scheduler": lambda: world.kill_scheduler(back_after),
        "pause": pause,
        "jump clock": jump_clock,
        "kill matcher": lambda: executor.device.masks.kill_matcher(index),
        "restart masks": lambda: executor.device.masks.restart(back_after),
    }[kind]
