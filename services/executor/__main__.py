"""`python -m services.executor --config mesh.toml`: one executor process."""

import argparse
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from deepmesh import garbage, log, telemetry
from deepmesh.config import Config, ConfigError, load_config
from deepmesh.recorder import Recorder
from deepmesh.start_checks import weights_problem
from deepmesh.telemetry import SPAN_GRAMMAR
from deepmesh.wire.keys import load_keyring
from services.executor.interface import Engine, Executor, OnProgress, Recording
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.service import ExecutorService
from services.executor.stream import StreamExecutor
from services.executor.work import Counting

_log = logging.getLogger(__name__)
SWITCH_S = 0.0005
END_S = 10.0  # the process ends within this time once its loop is over, whatever hangs
HUNG_STATUS = 70
GRACE_S = 3.0  # the scheduler finds a dead peer within links.timeout_s, and says so in this time


def make_engine(config: Config, index: int = 0, masks: GrammarMasks | None = None) -> Engine:
    """The engine that [executor] asks for; only the one with a model imports torch.

    Args:
        index: of the scheduler whose EP group it belongs to.
        masks: keep outputs to grammars; None: there are none.
    Raises:
        ConfigError: there is none for this device, or torch is not installed.
    """
    if config.executor.kind == "fake":
        from services.executor.fake import FakeEngine

        return FakeEngine(config)
    try:
        from services.executor.gpu.engine import GpuEngine
        from services.executor.runner import ModelEngine
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "safetensors"):
            raise
        raise ConfigError(
            f"executor.kind: 'model' needs {error.name}: pip install 'deepmesh[executor]'"
        ) from error
    if config.executor.device == "cpu":
        return ModelEngine(config, index, masks)
    try:
        return GpuEngine(
            config, index, masks, "cpu" if config.executor.device == "host" else "cuda"
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main() -> int:
    """Run until SIGTERM or SIGINT; 0 after an orderly end."""
    parser = argparse.ArgumentParser(prog="python -m services.executor", description=__doc__)
    parser.add_argument("--config", type=Path, default=None, help="mesh.toml")
    parser.add_argument("--index", type=int, default=0, help="of its scheduler")
    parser.add_argument("--rank", type=int, default=0, help="in the scheduler's EP group")
    arguments = parser.parse_args()
    garbage.share_arena()
    name = f"executor-{arguments.index}-{arguments.rank}"

    def on_span(
        parent: str, begin_ns: int, end_ns: int, about: dict[str, str | int | float | bool]
    ) -> None:
        tracer.record(SPAN_GRAMMAR, parent, begin_ns, end_ns, about)

    try:
        config = load_config(arguments.config)
        log.setup(name, config.mesh.log_level, config.mesh.log_format)
        load_keyring(config, "executor")
        if words := weights_problem(config):
            raise ConfigError(words)
        masks = GrammarMasks(config, name, on_span) if config.executor.masks else None
        engine, recorder = make_engine(config, arguments.index, masks), Recorder()
        if isinstance(engine, Recording):
            engine.record = recorder.add
        work = engine.work if isinstance(engine, Counting) else None
    except ConfigError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    # The loop's thread, woken by a result, must not keep the device stream's thread from its
    # next step for Python's 5 ms.
    sys.setswitchinterval(SWITCH_S)
    tracer = telemetry.setup("executor", name, config)

    def make(on_result: Callable[[], None], on_progress: OnProgress) -> Executor:
        return StreamExecutor(
            engine,
            on_result=on_result,
            on_progress=on_progress,
            patience_s=config.links.timeout_s + GRACE_S,
            max_queued=config.executor.max_queued,
        )

    # A thread in C code that holds the interpreter would hold up any timer written in Python.
    service = ExecutorService(
        config,
        make,
        index=arguments.index,
        rank=arguments.rank,
        tracer=tracer,
        recorder=recorder,
        work=work,
        ahead=masks.ahead if masks is not None else None,
        on_end=lambda: faulthandler.dump_traceback_later(END_S, exit=True),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    try:
        service.run()
    except ValueError as error:  # the checkpoint or the configuration is at fault, not the code
        _log.error("%s", error)
        return 2
    finally:
        tracer.shutdown()
    if service.is_hung:
        _end_hung()
    return 0


def _end_hung() -> None:
    """Say where every thread stands, and end: the supervisor starts another process."""
    _log.error("the device hangs; this process ends with status %d, its stacks:", HUNG_STATUS)
    logging.shutdown()
    faulthandler.dump_traceback(all_threads=True)
    os._exit(HUNG_STATUS)


if __name__ == "__main__":
    sys.exit(main())
