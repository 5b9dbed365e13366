"""A gateway in a thread, and tokenizers that say what the test tells them to."""

import asyncio
import http.client
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvloop

from deepmesh.config import Config, GatewayConfig, LinksConfig, MeshConfig, TokenizerConfig
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.link import Identity, Mail, PeerUp
from deepmesh.wire.messages import (
    DELTA_ADMITTED,
    AnyMessage,
    Delta,
    DeltaBatch,
    ErrorCode,
    ReplicaStats,
    ResponseFailed,
    ResponseFinished,
    ServiceStats,
    Submit,
)
from deepmesh.wire.sockets import Listener
from services.gateway.server import Gateway

PATIENCE_S = 60.0  # bounds every wait; nothing takes nearly so long
LINKS = LinksConfig(heartbeat_s=0.05, timeout_s=20.0)
READY = ServiceStats(
    ready=True,
    replicas=[
        ReplicaStats(
            name="scheduler-0",
            ready=True,
            waiting=3,
            running=2,
            free_blocks=(50, 8, 4),
            cached_blocks=(25, 0, 0),
            total_blocks=(100, 10, 4),
            preemptions=7,
            prompt_tokens=1000,
            cached_prompt_tokens=400,
            output_tokens=200,
            inflight_tokens=6,
            steps=90,
        )
    ],
)

M = TypeVar("M")


class FakeTokenizer:
    """A real tokenizer's place on the wire; answers nothing by itself."""

    def __init__(self, config: Config, index: int = 0, stats: ServiceStats = READY) -> None:
        self.stats = stats
        me = Identity.new("tokenizer", f"tokenizer-{index}", config)
        self._listener = Listener(
            config.tokenizer_address(index), me, config.links, lambda: self.stats
        )
        self._inbox = Inbox(self._listener)
        self._outgoing: deque[AnyMessage] = deque()
        self._mail: queue.Queue[Mail | PeerUp] = queue.Queue()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped:
            for event in self._inbox.wait(1.0):
                if isinstance(event, Mail | PeerUp):
                    self._mail.put(event)
            while self._outgoing:
                assert self._listener.send("gateway-0", self._outgoing.popleft())
        self._inbox.close()

    def kill(self) -> None:
        """Vanish without a word, as a killed process does."""
        if self._stopped:
            return
        self._stopped = True
        self._inbox.wake()
        self._thread.join()

    def send(self, message: AnyMessage) -> None:
        """Send to the gateway, in order."""
        self._outgoing.append(message)
        self._inbox.wake()

    def linked(self) -> None:
        """Wait for the gateway's link."""
        assert isinstance(self._mail.get(timeout=PATIENCE_S), PeerUp)

    def expect_any(self, *kinds: type[M]) -> M:
        """The next message, which must be of one of these kinds."""
        event = self._mail.get(timeout=PATIENCE_S)
        assert isinstance(event, Mail)
        assert isinstance(event.message, kinds), event.message
        return event.message

    def expect(self, kind: type[M], skip: type[AnyMessage] | None = None) -> M:
        """The next message, apart from those to skip; it must be of this kind."""
        while True:
            event = self._mail.get(timeout=PATIENCE_S)
            assert isinstance(event, Mail)
            if skip is None or not isinstance(event.message, skip):
                assert isinstance(event.message, kind), event.message
                return event.message

    @property
    def has_mail(self) -> bool:
        """Whether a message lies there that the test has not asked for."""
        return not self._mail.empty()

    def admit(self, submit: Submit) -> None:
        """Say that headers may go out."""
        self.send(DeltaBatch([Delta(submit.rid, 0, [], DELTA_ADMITTED)]))

    def events(self, submit: Submit, first: int, *events: bytes) -> None:
        """Send events with consecutive indices."""
        self.send(DeltaBatch([Delta(submit.rid, first, list(events), DELTA_ADMITTED)]))

    def finish(self, submit: Submit, first: int, *events: bytes) -> None:
        """End a stream well."""
        self.send(
            ResponseFinished(
                submit.rid,
                200,
                first_event=first,
                events=list(events),
                prompt_tokens=5,
                cached_tokens=1,
                completion_tokens=2,
                finish_reason="stop",
            )
        )

    def answer(self, submit: Submit, body: bytes, status: int = 200) -> None:
        """End a plain request well."""
        self.send(ResponseFinished(submit.rid, status, body))

    def fail(self, submit: Submit, code: ErrorCode, detail: str = "why", param: str = "") -> None:
        """End a request badly."""
        self.send(ResponseFailed(submit.rid, code, detail, param))


class GatewayThread:
    """The real gateway on a loop of its own."""

    def __init__(self, config: Config, idle_s: float) -> None:
        self.gateway = Gateway(config, "gateway-0", idle_s=idle_s)
        self.url = self.gateway.url
        self.port = int(self.url.rpartition(":")[2])
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()), daemon=True)
        self._started = threading.Event()
        self.error: LookupError | None = None
        self._thread.start()
        assert self._started.wait(PATIENCE_S)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        try:
            await self.gateway.run()
        except LookupError as error:  # a bug that a test has put in
            self.error = error

    def begin_stop(self) -> None:
        """What SIGTERM does."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self.gateway.stop)

    def join(self) -> None:
        """Wait for the end."""
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def make_config(
    tmp_path: Path, *, tokenizers: int = 1, slow_consumer_s: float = 60.0, **gateway: object
) -> Config:
    """Short names: a unix socket's path has at most 107 bytes."""
    settings = msgspec.convert({"port": 0, **gateway}, GatewayConfig)
    return Config(
        mesh=MeshConfig(run_dir=str(tmp_path), served_model="tiny"),
        links=LINKS,
        gateway=settings,
        tokenizer=TokenizerConfig(count=tokenizers, slow_consumer_s=slow_consumer_s),
    )


class Mesh:
    """A gateway with its tokenizers, and clients for it."""

    def __init__(
        self, config: Config, tokenizers: list[FakeTokenizer], idle_s: float = PATIENCE_S
    ) -> None:
        self.config = config
        self.tokenizers = tokenizers
        self.server = GatewayThread(config, idle_s)
        self._clients: list[http.client.HTTPConnection] = []

    @property
    def tokenizer(self) -> FakeTokenizer:
        """The only one."""
        (only,) = self.tokenizers
        return only

    def client(self) -> http.client.HTTPConnection:
        """A connection of its own; closed at the end of the test."""
        client = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=PATIENCE_S)
        self._clients.append(client)
        return client

    def post(
        self,
        path: str = "/v1/chat/completions",
        body: bytes = b"{}",
        headers: dict[str, str] | None = None,
    ) -> http.client.HTTPConnection:
        """Send a request; ask the connection for the response."""
        client = self.client()
        client.request("POST", path, body, headers or {})
        return client

    def get(
        self, path: str, headers: dict[str, str] | None = None, method: str = "GET"
    ) -> tuple[http.client.HTTPResponse, bytes]:
        """A whole exchange without a body."""
        client = self.client()
        client.request(method, path, headers=headers or {})
        response = client.getresponse()
        return response, response.read()

    def stop(self) -> None:
        """End everything; open connections are cut first."""
        for client in self._clients:
            client.close()
        self.server.begin_stop()
        self.server.join()
        for tokenizer in self.tokenizers:
            tokenizer.kill()


@contextmanager
def running_mesh(
    tmp_path: Path,
    *,
    tokenizers: int = 1,
    idle_s: float = PATIENCE_S,
    **settings: Any,  # noqa: ANN401
) -> Iterator[Mesh]:
    """A gateway that is linked to all its tokenizers."""
    config = make_config(tmp_path, tokenizers=tokenizers, **settings)
    mesh = Mesh(config, [FakeTokenizer(config, index) for index in range(tokenizers)], idle_s)
    try:
        for tokenizer in mesh.tokenizers:
            tokenizer.linked()
        known = mesh.server.gateway.tokenizers  # its side of the links, a moment later
        until(lambda: sum(peer.stats.ready for peer in known.peers) == tokenizers)
        yield mesh
    finally:
        mesh.stop()


def error_of(response: http.client.HTTPResponse) -> dict[str, str | None]:
    """The error object of an OpenAI-shaped answer."""
    assert response.getheader("content-type") == "application/json"
    (pair,) = json.loads(response.read()).items()
    assert pair[0] == "error"
    assert set(pair[1]) == {"message", "type", "param", "code"}
    return pair[1]


def until(condition: Callable[[], bool]) -> None:
    """Ask again and again, for what only a later heartbeat or scrape can show."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
