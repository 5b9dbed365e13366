"""The executor alone, without a mesh: what it can do at best with the same rows.

`python -m bench.load.offline --config mesh.toml --rows 32 --prompt 32 --outputs 256`: the engine
that the mesh would run, behind the interface that its service uses. All steps of a wave are queued
in advance, so nobody waits for anybody but the device. Prints a `Speed` as JSON.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from deepmesh.config import load_config
from deepmesh.wire.messages import (
    Descriptor,
    Load,
    Pool,
    RowMode,
    RowSource,
    SamplingParams,
    SlotInit,
    StepKind,
    StepResult,
    StepStatus,
    SubmitStep,
)
from deepmesh.wire.packed import BLOCK, ROW, SLOT, pack_ids, unpack_ids
from services.executor.__main__ import SWITCH_S, make_engine
from services.executor.stream import StreamExecutor

EPOCH = 1
FIRST_IDS = 64  # ids below may be special ones
PATIENCE_S = 120.0


class Speed(msgspec.Struct):
    """What was measured; samples in the order of the runs."""

    tokens_per_s: list[float]  # of each wave
    step_ms: list[float]  # median decode step of each wave
    first_token_ms: list[float]  # a prompt alone: step handed over, result there
    cpu_us_per_token: list[float]  # of the process, by wave


class Alone:
    """Plays the scheduler towards one executor; every wave has slots and blocks for itself."""

    def __init__(self, executor: StreamExecutor, capacity_of: Load) -> None:
        self._executor = executor
        self.capacity = executor.load(capacity_of)
        self._step_id = EPOCH << 40
        self._gen = 0
        self._open: list[tuple[int, int]] = []  # slots of the last wave, with their generations
        self._draw = np.random.default_rng(1)

    def wave(self, rows: int, prompt: int, outputs: int) -> tuple[float, float, float]:
        """All prompts in one step, then decode steps: tokens a second, median ms of a step, CPU
        microseconds a token."""
        first = self._prefill(rows, prompt, outputs)
        steps = [first]
        for output in range(1, outputs):
            at = prompt + output - 1
            packed = self._rows(rows, RowMode.DECODE, 1, at, source=RowSource.DEVICE)
            packed["start_lo"], packed["producer_step"] = prompt, steps[-1].step_id
            steps.append(self._step(StepKind.DECODE, packed))
        began, used = time.perf_counter(), time.process_time()
        for step in steps:
            self._executor.submit(step)
        results = [self._take() for _ in steps]
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - used
        tokens = sum(len(unpack_ids(result.tokens)) for result in results)
        if tokens != rows * outputs:
            raise RuntimeError(f"{tokens} tokens came of {rows} x {outputs}")
        times = [result.times for result in results[1:]]
        step_ms = [(t.end_ns - t.begin_ns) / 1e6 for t in times]
        step = statistics.median(step_ms) if step_ms else 0.0
        return tokens / seconds, step, 1e6 * cpu_s / tokens

    def first_token(self, prompt: int) -> float:
        """Milliseconds from handing over a prompt to having its first token."""
        step = self._prefill(1, prompt, 2)
        began = time.perf_counter()
        self._executor.submit(step)
        self._take()
        return 1e3 * (time.perf_counter() - began)

    def _prefill(self, rows: int, prompt: int, outputs: int) -> SubmitStep:
        """A step that opens slots 0 to `rows`, and computes their prompts."""
        closed, self._gen = self._open, self._gen + 1
        self._open = [(slot, self._gen) for slot in range(rows)]
        ids = self._draw.integers(FIRST_IDS, self.capacity.vocab_size, (rows, prompt))
        inits = [
            SlotInit(
                slot,
                self._gen,
                rid=self._rid(slot),
                epoch=0,
                ids=pack_ids(ids[slot].astype(np.int32)),
                prompt_len=prompt,
                max_len=prompt + outputs,
                sampling=SamplingParams(),
                seed=slot,
                state_block=slot,
            )
            for slot in range(rows)
        ]
        packed = self._rows(rows, RowMode.PREFILL, prompt, 0, source=RowSource.HOST)
        return self._step(
            StepKind.PREFILL,
            packed,
            init=inits,
            blocks=self._blocks(rows, prompt + outputs),
            close=np.array(closed, SLOT).tobytes(),
        )

    def _rid(self, slot: int) -> int:
        return self._gen * 1000 + slot

    def _rows(
        self, rows: int, mode: RowMode, width: int, start: int, *, source: RowSource
    ) -> NDArray[np.void]:
        packed = np.zeros(rows, ROW)
        packed["slot"] = np.arange(rows)
        packed["rid"] = self._gen * 1000 + np.arange(rows)
        packed["gen"], packed["mode"], packed["source"] = self._gen, mode, source
        packed["sample"], packed["q"] = 1, width
        packed["start_lo"] = packed["start_hi"] = start
        return packed

    def _blocks(self, rows: int, tokens: int) -> bytes:
        """Blocks for all positions of all rows."""
        each = -(-tokens // self.capacity.block_size)
        if rows * each > min(self.capacity.num_global_blocks, self.capacity.num_window_blocks):
            raise RuntimeError(f"{rows} rows of {tokens} tokens need more blocks than there are")
        found = [
            (slot, self._gen, int(pool), index, slot * each + index)
            for pool in (Pool.GLOBAL, Pool.WINDOW)
            for slot in range(rows)
            for index in range(each)
        ]
        return np.array(found, BLOCK).tobytes()

    def _step(
        self,
        kind: StepKind,
        packed: NDArray[np.void],
        *,
        init: list[SlotInit] | None = None,
        blocks: bytes = b"",
        close: bytes = b"",
    ) -> SubmitStep:
        self._step_id += 1
        return SubmitStep(
            EPOCH,
            self._step_id,
            group_step=self._step_id & 0xFFFFFFFF,
            group_epoch=1,
            descriptor=Descriptor(kind, int(packed["q"].sum()), len(packed)),
            rows=packed.tobytes(),
            init=init or [],
            blocks=blocks,
            close=close,
        )

    def _take(self) -> StepResult:
        while True:
            result = self._executor.poll(PATIENCE_S)
            if result is None:
                raise RuntimeError("the executor does not answer")
            if isinstance(result, StepResult):
                if result.status != StepStatus.OK:
                    raise RuntimeError(f"a step failed: {result.error}")
                return result


def main() -> int:
    """Measure one executor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--outputs", type=int, required=True)
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--firsts", type=int, default=0, help="prompts alone, for the first token")
    arguments = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)  # as the service does
    config = load_config(arguments.config)
    executor = StreamExecutor(make_engine(config), max_queued=1 << 16)
    try:
        order = Load(EPOCH, 0, 1, config.mesh.model, config.executor.numerics)
        alone = Alone(executor, order)
        alone.wave(arguments.rows, arguments.prompt, 4)  # warm
        waves = [
            alone.wave(arguments.rows, arguments.prompt, arguments.outputs)
            for _ in range(arguments.waves)
        ]
        firsts = [alone.first_token(arguments.prompt) for _ in range(arguments.firsts)]
    finally:
        executor.close()
    speeds, steps, used = (list(column) for column in zip(*waves, strict=True))
    found = Speed(speeds, steps, firsts, used)
    print(msgspec.json.encode(found).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
