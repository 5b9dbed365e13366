"""The gateway process: links to tokenizers, the HTTP server, draining at the end."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from deepmesh import telemetry
from deepmesh.config import Config
from deepmesh.health import Readiness
from deepmesh.wire.inbox import AsyncInbox
from deepmesh.wire.messages import ErrorCode, ServiceStats
from deepmesh.wire.names import Lookup
from deepmesh.wire.sockets import Dialer, Identity
from services.gateway.admin import Admin, AdminServer
from services.gateway.app import make_app
from services.gateway.auth import Keys
from services.gateway.cors import Origins
from services.gateway.discovery import Discovery
from services.gateway.exposition import Exposition
from services.gateway.forward import Edge, record_hop
from services.gateway.hosts import Hosts
from services.gateway.limits import CLIENT_IDLE_S, BodyReader, Gate
from services.gateway.live import Live
from services.gateway.live_figures import Figures
from services.gateway.live_routes import LiveRoutes
from services.gateway.metrics import Metrics
from services.gateway.protocol import EdgeProtocol
from services.gateway.quotas import Quotas
from services.gateway.streams import StreamLimits, Streams
from services.gateway.tokenizers import Tokenizers

_log = logging.getLogger(__name__)

_BACKLOG = 2048
_LAST_WORDS_S = 1.0  # of a process that ends because of a bug


class BindError(RuntimeError):
    """The address cannot be had; the text names the key."""


class Server(uvicorn.Server):
    """uvicorn's server, which goes on listening while requests run: who comes is told to go
    elsewhere, where a closed port would look like a failure."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], bool]) -> None:
        """`on_exit`: told of the wish to end; says whether nothing is left to wait for."""
        super().__init__(config)
        self._on_exit = on_exit
        self._is_asked = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: open requests go on until the grace is over; once more: none does."""
        is_idle, is_asked_again = self._on_exit(), self._is_asked
        self._is_asked = True
        if is_idle or is_asked_again:
            super().handle_exit(sig, frame)


class Gateway:
    """Everything of one gateway process."""

    def __init__(self, config: Config, name: str, *, idle_s: float = CLIENT_IDLE_S) -> None:
        """Bind and set up; `run` serves.

        `idle_s`: a client that owes headers or a body and sends nothing for so long is given up.

        Raises:
            BindError: the port is taken, or the host is not this machine's.
        """
        self._config = config
        self._name = name
        self._sock = _bind(config.gateway.host, config.gateway.port)
        self.url = _url(self._sock, config.gateway.host)
        self._tracer = telemetry.setup("gateway", name, config)
        self._dialers = self._dial()
        self.tokenizers = Tokenizers(self._dialers)
        self.streams = Streams(
            self.tokenizers,
            _limits(config),
            on_hop=lambda mail, traceparent: record_hop(self._tracer, mail, traceparent),
        )
        self._inbox = AsyncInbox(lambda endpoint, event: self.streams.handle(event))
        self._discovery = self._make_discovery()
        self._pulse = Readiness(config.mesh.run_dir, name, lambda: not self._drain_began_at)
        self._drain_began_at = 0.0
        self._error: BaseException | None = None
        self._gate = Gate(config.gateway.max_requests)
        self._server = self._make_server(idle_s)
        self._admin = self._make_admin()
        self.admin_url = _url(self._admin[1], config.gateway.admin_host) if self._admin else ""

    async def run(self) -> None:
        """Serve until told to end.

        Raises what a callback or a task of ours raised: a bug, and state may be half changed. The
        process ends with it, its supervisor starts another.
        """
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._broken)
        for dialer in self._dialers:
            self._inbox.add(dialer)
        self._inbox.start(loop)
        sweeper = asyncio.create_task(self._sweep())
        sweeper.add_done_callback(self._sweeper_ended)
        _log.info("listening on %s", self.url)
        try:
            with _address_file(self._file(), self.url):
                async with self._serving_admin():
                    await self._server.serve(sockets=[self._sock])
        finally:
            sweeper.cancel()
            self._pulse.close()
            await self._cut()
            self._inbox.close()
            self._tracer.shutdown()
            _log.info("ended")
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Begin to drain, as on SIGTERM; call it on the loop's thread."""
        self._server.handle_exit(signal.SIGTERM, None)

    def _broken(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Something on the loop raised. What one client's connection caused ends that alone."""
        loop.default_exception_handler(context)
        error: object = context.get("exception")
        if "transport" not in context and not isinstance(error, OSError):
            self._end(
                error if isinstance(error, BaseException) else RuntimeError(context["message"])
            )

    def _sweeper_ended(self, sweeper: asyncio.Task[None]) -> None:
        """Without it no clock of any stream runs."""
        if not sweeper.cancelled() and (error := sweeper.exception()) is not None:
            _log.error("the sweeper raised", exc_info=error)
            self._end(error)

    def _end(self, error: BaseException) -> None:
        """End the process soon, with a word to the clients while that is still possible."""
        self._server.should_exit = True
        if self._error is not None:
            return
        _log.error("ends because of a bug: %s: %s", type(error).__name__, error)
        self._error = error
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._force_exit)
        detail = "the gateway restarts; send the request again"
        self.streams.fail_all(ErrorCode.ENGINE_RESTARTED, detail)

    def _force_exit(self) -> None:
        self._server.force_exit = True

    async def _cut(self) -> None:
        """Requests that the server has left behind end before the links do."""
        tasks = list(self._server.server_state.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _dial(self) -> list[Dialer]:
        config = self._config
        me = self._me = Identity.new("gateway", self._name, config)
        if config.finds_tokenizers:
            return []
        indices = range(max(1, config.tokenizer.count))
        addresses = dict.fromkeys(config.tokenizer_address(i) for i in indices)  # one if external
        return [Dialer(address, me, config.links, self._stats) for address in addresses]

    def _make_discovery(self) -> Discovery | None:
        """Where the configuration names one host for all tokenizers."""
        address = self._config.tokenizer.address
        lookup = Lookup.of(address) if self._config.finds_tokenizers else None
        if lookup is None:
            return None

        def dial(target: str) -> Dialer:
            return Dialer(address, self._me, self._config.links, self._stats, target=target)

        return Discovery(lookup, dial, tokenizers=self.tokenizers, inbox=self._inbox)

    def _stats(self) -> ServiceStats:
        return ServiceStats(ready=True, requests=len(self.streams))

    def _make_server(self, idle_s: float) -> Server:
        settings, metrics = self._config.gateway, Metrics()
        keys = Keys(settings.api_keys)
        figures = Exposition(metrics, self.streams, self.tokenizers, self._config.served_model)
        self._live = Live(
            self._config,
            self._me,
            self._tracer,
            tokenizers=self.tokenizers,
            streams=self.streams,
            exposition=figures,
            figures=Figures(metrics),
        )
        live = LiveRoutes(self._live, keys, lambda: bool(self._drain_began_at))
        edge = Edge(
            gate=self._gate,
            quotas=Quotas(keys, settings),
            bodies=BodyReader(settings.max_body_bytes, settings.resume_bytes, idle_s),
            streams=self.streams,
            metrics=metrics,
            tracer=self._tracer,
            seen=self._live.seen,
            keep=self._live.keep,
            slow_s=self._config.telemetry.slow_s,
            model=self._config.served_model,
        )
        origins = Origins(settings.allowed_origins)
        hosts = Hosts(settings, asks_for_keys=bool(settings.api_keys))
        return Server(
            uvicorn.Config(
                make_app(edge, self.tokenizers, figures, origins, hosts, live.routes()),
                http=EdgeProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=idle_s,  # type: ignore[arg-type]  # seconds, passed to call_later
                timeout_graceful_shutdown=max(1, int(self._config.supervisor.stop_timeout_s)),
            ),
            self._note_exit,
        )

    def _make_admin(self) -> tuple[AdminServer, socket.socket] | None:
        settings = self._config.gateway
        if settings.admin_port < 0:
            return None
        keys = Keys(settings.admin_keys)
        server = Admin(self._name, keys, self._gate, self.streams, self.tokenizers).server()
        return server, _bind(settings.admin_host, settings.admin_port, "gateway.admin_port")

    @contextlib.asynccontextmanager
    async def _serving_admin(self) -> AsyncIterator[None]:
        """The admin port, if there is one, as long as the gateway serves."""
        if self._admin is None:
            yield
            return
        server, sock = self._admin
        task = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            with _address_file(self._file().with_suffix(".admin"), self.admin_url):
                yield
        finally:
            server.should_exit = server.force_exit = True
            await task

    def _file(self) -> Path:
        return Path(self._config.mesh.run_dir) / _file_name(self._name)

    def _note_exit(self) -> bool:
        self._drain_began_at = self._drain_began_at or time.monotonic()
        self._gate.is_ending = True
        return not self._gate.num_open

    async def _sweep(self) -> None:
        """Keep the clocks of the streams; near the end of the grace, end those that still run. The
        last one that ends by itself ends the process, too."""
        settings = self._config.gateway
        interval_s = min(0.25, settings.keepalive_s / 4)
        grace_s = 0.7 * self._config.supervisor.stop_timeout_s  # the rest is for the last words
        while True:
            await asyncio.sleep(interval_s)
            self._pulse.look()
            self._live.tick()
            if self._discovery is not None:
                self._discovery.look()
            self.streams.sweep()
            if self._drain_began_at and time.monotonic() - self._drain_began_at > grace_s:
                self.streams.fail_all(ErrorCode.OVERLOADED, "the gateway is shutting down")
                self._server.should_exit = True
            elif self._drain_began_at and not self._gate.num_open:
                self._server.should_exit = True


def _limits(config: Config) -> StreamLimits:
    return StreamLimits(
        keepalive_s=config.gateway.keepalive_s,
        deadline_s=config.gateway.deadline_s,
        stuck_s=10 * config.gateway.deadline_s,
        resume_bytes=config.gateway.resume_bytes,
        credit_events=max(1, min(128, config.tokenizer.unacked_events // 4)),
        max_buffer_events=2 * config.tokenizer.unacked_events,
        slow_s=config.tokenizer.slow_consumer_s,
    )


def _bind(host: str, port: int, name: str = "gateway.port") -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(_BACKLOG)  # from here on clients get through, if only to wait
    except OSError as error:
        sock.close()
        key = "gateway.host" if isinstance(error, socket.gaierror) else name
        raise BindError(f"{key}: {host}:{port}: {error.strerror}; choose another") from error
    return sock


def _url(sock: socket.socket, host: str) -> str:
    """Where a client on this machine finds it."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"


def _file_name(name: str) -> str:
    return "gateway.address" if name == "gateway-0" else f"{name}.address"


@contextlib.contextmanager
def _address_file(path: Path, url: str) -> Iterator[None]:
    """The bound address, for whoever started the gateway with port 0."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_suffix(f".{os.getpid()}")
    new.write_text(url + "\n")
    new.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
