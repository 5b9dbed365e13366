"""A tokenizer service in a thread, between a fake scheduler and a fake gateway."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import uvloop
from tokenizers import Tokenizer

from deepmesh.config import Config, MeshConfig, TelemetryConfig, TokenizerConfig
from deepmesh.telemetry import Tracer, setup
from services.tokenizer.prepare import Preparer
from services.tokenizer.service import Service
from tests.fakes import LINKS, FakeGateway, FakeScheduler, Stage

MODEL = Path(__file__).parents[2] / "models/tiny"
TOKENIZER = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
EOS = TOKENIZER.token_to_id("<｜end▁of▁sentence｜>")
HI = [{"role": "user", "content": "Hi"}]
DEFAULTS = TokenizerConfig()
PLAIN = {"thinking": {"type": "disabled"}}


def ids_of(text: str) -> list[int]:
    """Token ids of an output text, special tokens included."""
    return TOKENIZER.encode(text, add_special_tokens=False).ids


def make_config(run_dir: Path, tokenizer: TokenizerConfig = DEFAULTS) -> Config:
    """A mesh whose sockets lie in `run_dir`."""
    return Config(
        mesh=MeshConfig(model=str(MODEL), run_dir=str(run_dir), aliases=["other-name"]),
        links=LINKS,
        tokenizer=tokenizer,
        telemetry=TelemetryConfig(enabled=False),
    )


class Running:
    """The service's thread."""

    def __init__(
        self,
        config: Config,
        tracer: Tracer | None = None,
        make_preparer: Callable[[Config], Preparer] = Preparer,
    ) -> None:
        self._ready = threading.Event()
        self._make_preparer = make_preparer
        self._config = config
        self._tracer = tracer or setup("tokenizer", "tokenizer-0", config)
        self.service: Service | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=lambda: uvloop.run(self._run()))
        self._thread.start()
        assert self._ready.wait(60)

    def ask_to_stop(self, within_s: float) -> None:
        """Drain for at most `within_s`, then end; as SIGTERM does."""
        assert self._loop is not None
        assert self.service is not None
        self._loop.call_soon_threadsafe(self.service.stop, within_s)

    def stop(self) -> None:
        """End now."""
        if self._thread.is_alive():
            self.ask_to_stop(0.0)
            self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.service = Service(self._config, 0, self._make_preparer(self._config), self._tracer)
        self._ready.set()
        await self.service.run()


class Bench:
    """One tokenizer, one scheduler, one gateway."""

    def __init__(
        self,
        config: Config,
        tracer: Tracer | None = None,
        make_preparer: Callable[[Config], Preparer] = Preparer,
    ) -> None:
        self.config = config
        self.stage = Stage()
        self.scheduler = FakeScheduler(self.stage, config.scheduler_address(0))
        self.running = Running(config, tracer, make_preparer)
        self.gateway = FakeGateway(self.stage, config.tokenizer_address(0))
        self.stage.until(lambda: self.scheduler.is_up, "the scheduler's link")

    def close(self) -> None:
        """Nothing stays behind."""
        self.running.stop()
        self.stage.close()


@contextmanager
def bench(run_dir: Path, tokenizer: TokenizerConfig = DEFAULTS) -> Iterator[Bench]:
    """A bench for one test."""
    made = Bench(make_config(run_dir, tokenizer))
    try:
        yield made
    finally:
        made.close()
