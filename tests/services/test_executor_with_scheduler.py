"""The real scheduler and the executor's shadow KV, over a real link, on pools that are too small.

The fake engine keeps the hash of its prefix in every KV cell and reads it back: a block that was
reused too early, a state that was not kept, a wrong table or order fails the step.
"""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

from deepmesh import telemetry
from deepmesh.config import (
    Config,
    ExecutorConfig,
    LinksConfig,
    MeshConfig,
    SchedulerConfig,
    TelemetryConfig,
)
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    Abort,
    Ack,
    AckRow,
    Failed,
    Finished,
    FinishReason,
    Generate,
    Grammar,
    ReplicaStats,
    SamplingParams,
    TokenBatch,
)
from deepmesh.wire.packed import pack_ids, unpack_ids
from deepmesh.wire.sockets import Dialer, Identity, Mail
from services.executor.fake import FakeEngine, Oracle
from services.executor.service import ExecutorService
from services.executor.stream import StreamExecutor
from services.scheduler.service import SchedulerService
from tests.tiny import VOCAB_SIZE

ROOT = Path(__file__).parents[2]
VOCAB = VOCAB_SIZE


def make_config(run_dir: Path, depth: int, **executor: float) -> Config:
    return Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(ROOT / "models/tiny")),
        links=LinksConfig(heartbeat_s=0.05, timeout_s=20.0),
        scheduler=SchedulerConfig(
            depth=depth,
            max_rows=12,
            step_tokens=256,
            chunk_tokens=128,
            max_model_len=640,
            audit=True,
        ),
        executor=ExecutorConfig(kind="fake", global_blocks=24, window_blocks=48, **executor),
        telemetry=TelemetryConfig(enabled=False),
    )


@contextmanager
def mesh(config: Config, *, one_kernel_class: bool = True) -> Iterator[StreamExecutor]:
    """Scheduler and executor, each on a thread of its own."""
    tracer = telemetry.setup("executor", "executor-0-0", config)
    scheduler = SchedulerService(config, index=0, tracer=tracer)
    made: list[StreamExecutor] = []

    def make(on_result, on_progress) -> StreamExecutor:  # noqa: ANN001
        engine = FakeEngine(config, stop_one_in=150, one_kernel_class=one_kernel_class)
        made.append(StreamExecutor(engine, on_result=on_result, on_progress=on_progress))
        return made[0]

    executor = ExecutorService(config, make, index=0, rank=0, tracer=tracer)
    threads = [threading.Thread(target=service.run) for service in (scheduler, executor)]
    for thread in threads:
        thread.start()
    try:
        yield made[0]
    finally:
        for service, thread in zip((scheduler, executor), threads, strict=True):
            service.stop()
            thread.join(60)
            assert not thread.is_alive()


class Client:
    """A tokenizer without text: sends prompts, collects tokens by absolute position."""

    def __init__(self, config: Config) -> None:
        me = Identity.new("tokenizer", "tokenizer-0", config)
        self.link = Dialer(config.scheduler_address(0), me, config.links)
        self.inbox = Inbox(self.link)
        self.output: dict[bytes, list[int]] = {}
        self.ends: dict[bytes, Finished | Failed] = {}

    def send(self, message: Generate | Abort) -> None:
        while not self.link.send(message):
            self._take()

    def run(self, until: int) -> None:
        """Take mail until so many requests have ended."""
        while len(self.ends) < until:
            self._take()

    def final_stats(self, num_requests: int) -> ReplicaStats:
        """What the scheduler's heartbeats say once they count all ends and nothing is fenced."""
        while True:
            assert self.link.peer is not None
            for stats in self.link.peer.stats.replicas:
                held = [
                    sum(pair) for pair in zip(stats.free_blocks, stats.cached_blocks, strict=True)
                ]
                if stats.finished == num_requests and held == list(stats.total_blocks):
                    return stats
            self._take()

    def _take(self) -> None:
        for event in self.inbox.wait(1.0):
            if not isinstance(event, Mail):
                continue
            match event.message:
                case TokenBatch(rows=rows):
                    for row in rows:
                        output = self.output.setdefault(row.rid, [])
                        assert row.pos <= len(output), "a gap in the tokens"
                        output[row.pos :] = unpack_ids(row.ids).tolist()
                case Finished(rid=rid) | Failed(rid=rid) as end:
                    assert rid not in self.ends, "a second end"
                    self.ends[rid] = end
                    self.link.send(Ack([AckRow(rid, len(self.output.get(rid, [])), done=True)]))


def make_request(number: int, draw: random.Random, grammar: Grammar | None = None) -> Generate:
    """Three families of prompts that share prefixes; some have a minimum, some want logprobs."""
    family = np.random.default_rng(number % 3).integers(600, VOCAB, 400).tolist()
    ids = family[: draw.randrange(1, 400)]
    if draw.random() < 0.5:
        ids += [draw.randrange(600, VOCAB) for _ in range(draw.randrange(1, 60))]
    max_tokens = draw.randrange(1, 160)
    return Generate(
        rid=number.to_bytes(16, "little"),
        attempt=0,
        reply_to="tokenizer-0",
        prompt_ids=pack_ids(ids),
        prompt_len=len(ids),
        sampling=SamplingParams(temperature=0.0),
        seed=number // 2,
        stop_ids=pack_ids([1]),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, draw.choice([0, 0, 20])),
        n_logprobs=draw.choice([-1, 0, 3]),
        grammar=grammar,
    )


@pytest.mark.parametrize(
    ("depth", "draft_len", "one_kernel_class"),
    [
        (1, 0, True),
        (2, 0, True),
        (3, 0, True),
        (1, 3, True),
        (2, 3, True),
        (3, 3, True),
        (2, 0, False),
        (2, 3, False),
    ],
)
def test_tokens_follow_the_oracle_on_pools_that_are_too_small(
    tmp_path: Path, depth: int, draft_len: int, one_kernel_class: bool
) -> None:
    """With two kernel classes the device refuses rows that compute a position by the other."""
    config = make_config(tmp_path, depth, fake_draft_len=draft_len, fake_tail_ms=0.2)
    draw = random.Random(depth)
    requests = [make_request(number, draw) for number in range(60)]
    aborted = {r.rid for r in requests if draw.random() < 0.15}
    with mesh(config, one_kernel_class=one_kernel_class) as executor:
        client = Client(config)
        for request in requests:
            client.send(request)
        for rid in aborted:
            client.send(Abort(rid))
        client.run(until=len(requests))
        stats = client.final_stats(len(requests))
        client.inbox.close()
        assert executor.counters["failed_steps"] == 0
    oracle = Oracle(VOCAB, stop_one_in=150)
    for request in requests:
        end, output = client.ends[request.rid], client.output.get(request.rid, [])
        expected = oracle.generate(
            unpack_ids(request.prompt_ids).tolist(),
            request.max_tokens,
            seed=request.seed,
            stop_ids=[1],
            min_len=request.prompt_len + request.min_tokens,
        )
        assert isinstance(end, Finished)
        if end.reason == FinishReason.ABORT:
            assert request.rid in aborted
            assert output == expected[: len(output)]
        else:
            assert output == expected, msgspec.to_builtins(end)
            stopped = expected[-1] == 1
            assert end.reason == (FinishReason.STOP if stopped else FinishReason.LENGTH)
    assert stats.preemptions > 0
    assert stats.cached_prompt_tokens > 0


@pytest.mark.parametrize("draft_len", [0, 3])
def test_no_token_is_sampled_without_its_mask(tmp_path: Path, draft_len: int) -> None:
    """Masks come later than the step that needs them: its row gives nothing and is repeated."""
    config = make_config(tmp_path, 2, fake_draft_len=draft_len, fake_step_ms=1.0, fake_mask_ms=1.5)
    draw = random.Random(7)
    requests = [make_request(number, draw, Grammar("regex", ".*")) for number in range(12)]
    with mesh(config) as executor:
        client = Client(config)
        for request in requests:
            client.send(request)
        client.run(until=len(requests))
        client.inbox.close()
        assert executor.counters["failed_steps"] == 0
    oracle = Oracle(VOCAB, stop_one_in=150)
    for request in requests:
        expected = oracle.generate(
            unpack_ids(request.prompt_ids).tolist(),
            request.max_tokens,
            seed=request.seed,
            stop_ids=[1],
            min_len=request.prompt_len + request.min_tokens,
            masked=True,
        )
        assert isinstance(client.ends[request.rid], Finished)
        assert client.output[request.rid] == expected
