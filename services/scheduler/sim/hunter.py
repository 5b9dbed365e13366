"""Aborts requests in the very state that they are meant to be aborted in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .coverage import state_of
from .requests import SimRequest

if TYPE_CHECKING:
    from .world import World


class Hunter:
    """Looks at the core each time it has planned; a state may last no longer than that."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._prey: dict[bytes, tuple[SimRequest, str]] = {}
        world.process.behind = self._look

    def want(self, request: SimRequest, state: str) -> None:
        """Abort it once it is in `state`."""
        self._prey[request.rid] = (request, state)

    def _look(self) -> None:
        if not self._prey:
            return
        world = self._world
        for rid, (request, state) in list(self._prey.items()):
            if request.terminals:
                del self._prey[rid]
                continue
            owner = next((t for t in world.tokenizers if t.knows(request)), None)
            if owner is not None and state_of(world.core, rid) == state:
                del self._prey[rid]
                owner.abort_now(request)
