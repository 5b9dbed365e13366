"""The admin port: drain, flush the prefix cache, set the log level; each call needs a key."""

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import get_args

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deepmesh import log
from deepmesh.wire.link import Peer
from deepmesh.wire.messages import FlushCache, SetLogLevel
from services.gateway import errors
from services.gateway.auth import Keys
from services.gateway.errors import Problem, ProblemError, Shape
from services.gateway.limits import Gate
from services.gateway.streams import Streams
from services.gateway.tokenizers import Tokenizers

Handler = Callable[[Request], Awaitable[Response]]
_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 4096


_LEVELS = get_args(log.Level)


class _Level(msgspec.Struct, forbid_unknown_fields=True):
    level: str


class AdminServer(uvicorn.Server):
    """A second server in the gateway's process; signals are the first one's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave them alone."""
        yield


class Admin:
    """The orders of an operator. Each answers what holds now."""

    def __init__(
        self, name: str, keys: Keys, gate: Gate, streams: Streams, tokenizers: Tokenizers
    ) -> None:
        """`name`: of this gateway."""
        self._name = name
        self._keys = keys
        self._gate = gate
        self._streams = streams
        self._tokenizers = tokenizers

    def server(self) -> AdminServer:
        """Ready to serve on a socket."""
        routes = {
            ("GET", "/admin/status"): self._status,
            ("POST", "/admin/drain"): self._drain,
            ("POST", "/admin/resume"): self._resume,
            ("POST", "/admin/flush_cache"): self._flush,
            ("POST", "/admin/log_level"): self._set_level,
        }
        app = Starlette(
            routes=[
                Route(path, self._guarded(handler), methods=[method])
                for (method, path), handler in routes.items()
            ],
            exception_handlers={404: _no_route, 405: _no_route},
        )
        config = uvicorn.Config(
            app, ws="none", lifespan="off", log_config=None, access_log=False, server_header=False
        )
        return AdminServer(config)

    def _guarded(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Response:
            try:
                self._keys.check(dict(request.headers.raw))
                return await handler(request)
            except ProblemError as error:
                return _refused(error.problem)

        return guarded

    async def _status(self, request: Request) -> Response:
        return _json(self._state())

    async def _drain(self, request: Request) -> Response:
        """New requests get 503 and /ready says no; what runs goes on to its end."""
        self._gate.is_draining = True
        _log.warning("drains: an operator asked for it")
        return _json(self._state())

    async def _resume(self, request: Request) -> Response:
        self._gate.is_draining = False
        _log.warning("takes requests again: an operator asked for it")
        return _json(self._state())

    async def _flush(self, request: Request) -> Response:
        """Prefixes on the devices; what kvstores hold stays."""
        peers = self._tokenizers.peers
        if not any(self._tokenizers.send(peer.key, FlushCache()) for peer in peers):
            raise ProblemError(Problem(503, "not_ready", "no tokenizer is linked"))
        return _json({"flushed": True})

    async def _set_level(self, request: Request) -> Response:
        """Of this gateway, of the tokenizers, and of the schedulers that they reach."""
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > _MAX_BODY_BYTES:
                raise ProblemError(Problem(413, "request_too_large", "the body is too large"))
        level = _level(bytes(body))
        log.set_level(level)
        told = [peer for peer in self._tokenizers.peers if self._told(peer, level)]
        schedulers = {replica.name for peer in told for replica in peer.stats.replicas}
        names = [self._name, *(peer.name for peer in told), *sorted(schedulers)]
        return _json({"level": level, "told": names})

    def _told(self, peer: Peer, level: str) -> bool:
        """A tokenizer; it passes the order on to the schedulers that it knows."""
        return self._tokenizers.send(peer.key, SetLogLevel(level))

    def _state(self) -> dict[str, object]:
        replicas = {r.name: r for peer in self._tokenizers.peers for r in peer.stats.replicas}
        return {
            "draining": self._gate.is_draining,
            "open_requests": len(self._streams),
            "tokenizers": [peer.name for peer in self._tokenizers.peers],
            "replicas": [
                {
                    "name": name,
                    "ready": replica.ready,
                    "draining": replica.draining,
                    "paused": replica.paused,
                    "running": replica.running,
                    "waiting": replica.waiting,
                    "fingerprint": replica.fingerprint,
                    "cached_blocks": replica.cached_blocks[0],
                }
                for name, replica in sorted(replicas.items())
            ],
        }


def _level(body: bytes) -> str:
    """Out of the body of an order."""
    wanted = f'send {{"level": …}} with one of {", ".join(_LEVELS)}'
    if not body.strip():
        raise ProblemError(Problem(400, "invalid_request", f"the body is empty; {wanted}", "level"))
    try:
        level = msgspec.json.decode(body, type=_Level).level
    except msgspec.DecodeError as error:
        raise ProblemError(
            Problem(400, "invalid_request", f"{error}; {wanted}", "level")
        ) from error
    if level not in _LEVELS:
        message = f"{level!r} is no log level; {wanted}"
        raise ProblemError(Problem(400, "invalid_request", message, "level"))
    return level


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path!r} is no admin route"
    return _refused(Problem(error.status_code, "unknown_route", message))


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _refused(problem: Problem) -> Response:
    body = errors.body(problem, Shape.OPENAI, "")
    return Response(body, problem.status, media_type="application/json")
