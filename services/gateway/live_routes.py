"""Routes below /ui/api: live data, behind the same keys as the API."""

from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from deepmesh.timeline import chrome
from services.gateway import errors
from services.gateway.auth import Keys
from services.gateway.errors import Problem, ProblemError
from services.gateway.live import Live, waterfall_row

MAX_FEEDS = 32  # open at once
MAX_LAST_S = 60.0
Handler = Callable[[Request, str], Awaitable[Response]]


class LiveRoutes:
    """Questions of the page and of commands; each is answered for the caller's key."""

    def __init__(self, live: Live, keys: Keys, is_ending: Callable[[], bool]) -> None:
        self._live, self._keys, self._is_ending = live, keys, is_ending
        self._num_feeds = 0

    def routes(self) -> list[Route]:
        """To be found before those of the page's files."""
        handlers: dict[str, Handler] = {
            "feed": self._feed,
            "history": self._history,
            "timeline": self._timeline,
            "requests/{id}": self._request,
        }
        return [
            Route(f"/ui/api/{path}", self._guarded(handler), methods=["GET"])
            for path, handler in handlers.items()
        ]

    def _guarded(self, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
        async def guarded(request: Request) -> Response:
            arrival = request.scope["arrival"]
            try:
                return await handler(request, self._keys.check(dict(request.headers.raw)))
            except ProblemError as error:
                body = errors.body(error.problem, arrival.shape, arrival.request_id)
                return _json(body, error.problem.status)

        return guarded

    async def _feed(self, request: Request, key: str) -> Response:
        interval_s = _number(request, "interval", 1.0, 0.25, 10.0)
        if self._num_feeds >= MAX_FEEDS:
            raise ProblemError(Problem(429, "overloaded", f"{MAX_FEEDS} feeds are open already"))
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(
            self._counted(key, interval_s), media_type="text/event-stream", headers=headers
        )

    async def _counted(self, key: str, interval_s: float) -> AsyncIterator[bytes]:
        self._num_feeds += 1
        try:
            async for event in self._live.feed(key, interval_s, self._is_ending):
                yield event
        finally:
            self._num_feeds -= 1

    async def _history(self, request: Request, key: str) -> Response:
        return _json(msgspec.json.encode({"points": list(self._live.figures.points)}))

    async def _timeline(self, request: Request, key: str) -> Response:
        timeline = await self._live.timeline(_number(request, "last", 2.0, 0.1, MAX_LAST_S))
        if request.query_params.get("format") == "chrome":
            return _json(chrome(timeline))
        return _json(msgspec.json.encode(timeline))

    async def _request(self, request: Request, key: str) -> Response:
        wanted = request.path_params["id"]
        seen = self._live.seen.find(wanted, key)
        if seen is None:
            message = f"{wanted!r} is none of this gateway's last requests"
            raise ProblemError(Problem(404, "not_found", message))
        waterfall = await self._live.waterfall(seen) if seen.state != "running" else None
        if waterfall is None:  # it runs, or its last span is on its way: the page asks again
            return _json(b"{}", 202)
        return _json(msgspec.json.encode(waterfall_row(waterfall, seen)))


def _number(request: Request, name: str, default: float, least: float, most: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        message = f"{name} must be a number from {least:g} to {most:g}"
        raise ProblemError(Problem(400, "invalid_request", message, name))
    return value


def _json(body: bytes, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(body, status, media_type="application/json", headers=headers)
