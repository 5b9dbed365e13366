"""A real gateway before a real tokenizer, with an engine that answers everything with one token."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from deepmesh.config import GatewayConfig
from deepmesh.wire.link import LinkEvent, Mail
from deepmesh.wire.messages import Generate
from tests.fakes import FakeScheduler, Stage
from tests.services.gateway_harness import GatewayThread
from tests.services.tokenizer_harness import Running, make_config


class _Engine(FakeScheduler):
    """Answers as soon as it is asked."""

    def take(self, event: LinkEvent) -> None:
        """See `FakePeer`."""
        super().take(event)
        if isinstance(event, Mail) and isinstance(event.message, Generate):
            self.answer(event.message, [5] * max(1, min(event.message.min_tokens, 64)))


class Edge:
    """Serves until `close`."""

    def __init__(self, run_dir: Path, **gateway: object) -> None:
        settings = msgspec.convert({"port": 0, **gateway}, GatewayConfig)
        config = msgspec.structs.replace(make_config(run_dir), gateway=settings)
        self._stage = Stage()
        self._engine = _Engine(self._stage, config.scheduler_address(0))
        self._tokenizer = Running(config)
        self.server = GatewayThread(config, idle_s=2.0)
        self.port = self.server.port
        self._stage.until(lambda: self._engine.is_up, "the engine's link")
        self._is_over = False
        self._thread = threading.Thread(target=self._pump)
        self._thread.start()

    def _pump(self) -> None:
        while not self._is_over:
            self._stage.pump()

    def close(self) -> None:
        """Nothing stays behind."""
        self.server.begin_stop()
        self.server.join()
        self._is_over = True
        self._thread.join()
        self._tokenizer.stop()
        self._stage.close()


@contextmanager
def edge(run_dir: Path, **gateway: object) -> Iterator[Edge]:
    """Of one test, or several."""
    made = Edge(run_dir, **gateway)
    try:
        yield made
    finally:
        made.close()
