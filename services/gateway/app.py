"""The HTTP application: routes, request ids on every answer, JSON errors."""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deepmesh import __version__
from services.gateway import errors, exposition, openapi, pages
from services.gateway.arrival import Arrival, arrive
from services.gateway.cors import Origins
from services.gateway.errors import Problem, Shape
from services.gateway.exposition import Exposition
from services.gateway.forward import Edge, Forward
from services.gateway.hosts import Hosts
from services.gateway.relay import send_problem
from services.gateway.tokenizers import Tokenizers

POST_ROUTES = {  # path: protocol as it is called in `Submit`
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count_tokens",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
MODEL_ROUTES = ("/v1/models", "/v1/models/{id:path}")
RESPONSE_ROUTES = (  # path, method, protocol
    ("/v1/responses/{id}", "GET", "response"),
    ("/v1/responses/{id}", "DELETE", "response_delete"),
    ("/v1/responses/{id}/cancel", "POST", "response_cancel"),
    ("/v1/responses/{id}/input_items", "GET", "response_items"),
)

Handler = Callable[[Request], Awaitable[Response]]


class Stamp:
    """Outermost layer: makes the `Arrival` and puts its ids on the answer, and what lets a page of
    another origin read it. A page that has come under a name of its own gets nothing."""

    def __init__(self, app: ASGIApp, origins: Origins, hosts: Hosts) -> None:
        self._app = app
        self._origins = origins
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, with `scope["arrival"]`."""
        arrival = arrive(scope["path"], scope["headers"])
        scope["arrival"] = arrival
        if b"origin" in arrival.headers:
            arrival.headers_out = self._origins.headers(arrival.headers)
            if scope["method"] == "OPTIONS":
                arrival.headers_out += self._origins.preflight(arrival.headers)

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                arrival.status = message["status"]
                message["headers"] = [*message["headers"], *_id_headers(arrival)]
            await send(message)

        if problem := self._hosts.problem(arrival.headers):
            await send_problem(stamped, Problem(403, "unknown_host", problem), arrival)
            return
        await self._app(scope, receive, stamped)


def make_app(
    edge: Edge,
    tokenizers: Tokenizers,
    figures: Exposition,
    origins: Origins,
    hosts: Hosts,
    live: list[Route],
) -> Starlette:
    """The application; it owns nothing. `live`: routes of live data."""
    routes = [
        Route(path, Forward(edge, protocol, path), methods=["POST"])
        for path, protocol in POST_ROUTES.items()
    ]
    routes += [Route(path, Forward(edge, "models", path), methods=["GET"]) for path in MODEL_ROUTES]
    routes += [
        Route(path, Forward(edge, protocol, path), methods=[method])
        for path, method, protocol in RESPONSE_ROUTES
    ]

    async def health(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        if reason := edge.gate.closed_because:
            return _problem(request, Problem(503, "draining", reason))
        if tokenizers.is_ready:
            return _json({"status": "ready"})
        return _problem(request, Problem(503, "not_ready", tokenizers.problem))

    async def version(request: Request) -> Response:
        return _json({"version": __version__})

    async def metrics(request: Request) -> Response:
        return Response(figures.text(), media_type=exposition.CONTENT_TYPE)

    described = msgspec.json.encode(openapi.document())

    async def description(request: Request) -> Response:
        return Response(described, media_type="application/json")

    async def load(request: Request) -> Response:
        return _json({"server_load": len(edge.streams)})

    plain: dict[str, Handler] = {
        "/health": health,
        "/ping": health,
        "/ready": ready,
        "/version": version,
        "/metrics": metrics,
        "/load": load,
        "/openapi.json": description,
    }
    routes += [Route(path, handler) for path, handler in plain.items()]
    routes += live
    routes += pages.routes()
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Stamp, origins=origins, hosts=hosts)],
        exception_handlers={404: _not_found, 405: _wrong_method, Exception: _broken},
    )
    app.router.redirect_slashes = False  # a redirected POST is a puzzle; a 404 is not
    return app


def _id_headers(arrival: Arrival) -> list[tuple[bytes, bytes]]:
    request_id = arrival.request_id.encode()
    headers = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff")]
    if arrival.shape is Shape.ANTHROPIC:
        headers.append((b"request-id", request_id))
    if arrival.trace_id:
        headers.append((b"x-trace-id", arrival.trace_id.encode()))
    return headers + arrival.headers_out


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def _problem(request: Request, problem: Problem) -> Response:
    arrival: Arrival = request.scope["arrival"]
    body = errors.body(problem, arrival.shape, arrival.request_id)
    response = Response(body, problem.status, media_type="application/json")
    if seconds := errors.retry_after(problem):
        response.headers["retry-after"] = seconds
    return response


async def _not_found(request: Request, error: Exception) -> Response:
    message = f"there is no route {request.url.path!r} here"
    return _problem(request, Problem(404, "unknown_route", message))


async def _wrong_method(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    allowed = sorted((error.headers or {}).get("Allow", "").replace(" ", "").split(","))
    allow = ", ".join([*allowed, "OPTIONS"])
    if request.method == "OPTIONS":
        return Response(status_code=204, headers={"allow": allow})
    message = f"{request.method} does not go with {request.url.path!r}; use {allowed[0]}"
    response = _problem(request, Problem(405, "method_not_allowed", message))
    response.headers["allow"] = allow
    return response


async def _broken(request: Request, error: Exception) -> Response:
    """A bug of ours; the traceback goes to the log, the caller gets an id to ask with."""
    response = _problem(request, Problem(500, "internal_error", "the gateway failed; see its log"))
    for name, value in _id_headers(request.scope["arrival"]):
        response.headers[name.decode()] = value.decode()
    return response
