"""Which experts a forward really sends its tokens to: seen where the model asks its routers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec

from torch import Tensor

from services.executor.gpu import layers, prefill

_Arguments = ParamSpec("_Arguments")
_MODULES = (layers, prefill)
_ROUTERS = ("route_decode", "route_portable", "choose_experts")  # (ids, shares) of tokens


@contextmanager
def routes_seen() -> Iterator[list[Tensor]]:
    """The ids of each layer of one forward, in order; not for graphs, whose calls were made when
    they were captured."""
    seen: list[Tensor] = []
    held = [
        (module, name, getattr(module, name))
        for module in _MODULES
        for name in _ROUTERS
        if hasattr(module, name)
    ]
    assert {module for module, _, _ in held} == set(_MODULES), "the model asks others now"

    def looking(
        route: Callable[_Arguments, tuple[Tensor, Tensor]],
    ) -> Callable[_Arguments, tuple[Tensor, Tensor]]:
        @wraps(route)
        def call(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> tuple[Tensor, Tensor]:
            ids, shares = route(*arguments, **named)
            seen.append(ids.clone())
            return ids, shares

        return call

    for module, name, route in held:
        setattr(module, name, looking(route))
    try:
        yield seen
    finally:
        for module, name, route in held:
            setattr(module, name, route)


def experts_of(ids: Tensor) -> frozenset[int]:
    """Those that any token goes to."""
    return frozenset(ids[ids >= 0].unique().tolist())
