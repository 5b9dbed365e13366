"""Faults at random moments: processes that die or stall, links that are cut, devices that fail."""

from collections.abc import Callable

from .clock import MS
from .world import World

FaultKind = str
KINDS: tuple[FaultKind, ...] = (
    "kill executor",
    "cut executor",
    "device error",
    "hang executor",
    "kill tokenizer",
    "cut tokenizer",
    "slow client",
    "kill scheduler",
)
STORE_KINDS: tuple[FaultKind, ...] = ("kill kvstore", "cut kvstore", "hang kvstore")


def schedule_faults(
    world: World, count: int, *, span_ns: int, kinds: tuple[FaultKind, ...] = KINDS
) -> list[FaultKind]:
    """Draw `count` faults from the world's own generator and let them happen within `span_ns`."""
    draw = world.clock.random
    chosen = [draw.choice(kinds) for _ in range(count)]
    for kind in chosen:
        world.clock.at(draw.randrange(span_ns), _fault(world, kind))
    return chosen


def _fault(world: World, kind: FaultKind) -> Callable[[], None]:
    draw = world.clock.random
    rank, index = draw.randrange(len(world.executors)), draw.randrange(len(world.tokenizers))
    back_after = draw.randrange(1, 30) * MS
    executor, tokenizer = world.executors[rank], world.tokenizers[index]

    def device_error() -> None:
        executor.num_errors_due += 1

    def hang() -> None:
        executor.is_hung = True

    def slow_client() -> None:
        tokenizer.read(is_reading=False)
        world.clock.at(10 * back_after, lambda: tokenizer.read(is_reading=True))

    def hang_store() -> None:
        for store in world.stores:
            store.is_hung = True

    def kill_stores() -> None:
        for at in range(len(world.stores)):
            world.kill_store(at, back_after)

    def cut_stores() -> None:
        for store in world.stores:
            world.disconnect(store, back_after)

    return {
        "kill kvstore": kill_stores,
        "cut kvstore": cut_stores,
        "hang kvstore": hang_store,
        "kill executor": lambda: world.kill_executor(rank, back_after),
        "cut executor": lambda: world.disconnect(executor, back_after),
        "device error": device_error,
        "hang executor": hang,
        "kill tokenizer": lambda: world.kill_tokenizer(index, back_after),
        "cut tokenizer": lambda: world.disconnect(tokenizer, back_after),
        "slow client": slow_client,
        "kill scheduler": lambda: world.kill_scheduler(back_after),
    }[kind]
