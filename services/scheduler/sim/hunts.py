"""Worlds in which every request is to be aborted in one and the same state, and often is; and
crowds, in which nobody is and all push each other out."""

import random
from functools import partial

from msgspec.structs import replace

from .clock import MS
from .soak import draw_capacity, draw_config
from .workload import mixed
from .world import World

_REQUESTS = 24
_CROWD = 40
_OF_STORES = ("waiting for a kvstore", "loading")


def draw_hunt(seed: int, state: str, *, depth: int) -> World:
    """A world of one rank that leads its requests into `state`; call `run` and `verify`."""
    draw = random.Random(seed)
    is_crowd = state.startswith("preempt")
    capacity = draw_capacity(draw, ranks=1, is_crowd=is_crowd)
    config = draw_config(draw, depth, is_crowd=is_crowd)
    if state == "waiting for a prefix" or state in _OF_STORES:
        config = replace(config, prefix_cache=True, max_rows=8)
        capacity = replace(capacity, num_slots=8, num_state_blocks=16)
    if state == "decode":  # with nothing in flight: its client takes no tokens
        capacity = replace(capacity, num_slots=11)
        config = replace(config, max_rows=11)
    if state in ("prefill", "prefill in flight"):
        config = replace(config, step_tokens=16, chunk_tokens=16, max_rows=8)
    world = World(
        config,
        capacity,
        seed=seed,
        mask_miss=0.1,
        max_unacked=4 if state in ("parked", "decode") else 2048,
        audit_every=8,
        kvstores=int(state in _OF_STORES),
    )
    span_ns = (150 if state in _OF_STORES else 40) * MS
    requests = mixed(seed, _REQUESTS, capacity, span_ns=span_ns, abort_share=0.0, is_crowd=is_crowd)
    for request in requests:
        world.submit(request)
        world.hunter.want(request, state)
    _prepare(world, state)
    return world


def draw_crowd(seed: int, *, depth: int) -> World:
    """Short prompts and long outputs on a device that holds a few of them."""
    draw = random.Random(seed)
    capacity = draw_capacity(draw, ranks=1, is_crowd=True)
    config = draw_config(draw, depth, is_crowd=True)
    world = World(config, capacity, seed=seed, mask_miss=0.1, audit_every=8)
    for request in mixed(seed, _CROWD, capacity, abort_share=0.0, is_crowd=True):
        world.submit(request)
    return world


def _prepare(world: World, state: str) -> None:
    clock, tokenizer = world.clock, world.tokenizers[0]
    match state:
        case "parked" | "decode":
            clock.at(8 * MS, lambda: tokenizer.read(is_reading=False))
            clock.at(400 * MS, lambda: tokenizer.read(is_reading=True))
        case "orphaned":
            for at in (8, 16, 24, 32):
                clock.at(at * MS, partial(world.disconnect, tokenizer, 4 * MS))
        case "without an engine":
            for at in (12, 30):
                clock.at(at * MS, partial(world.kill_executor, 0, 6 * MS))
        case "loading" | "waiting for a kvstore":  # the store keeps what the device forgets
            for at in (40, 70, 100, 130):
                clock.at(at * MS, partial(world.kill_executor, 0, 2 * MS))
        case _:
            pass
