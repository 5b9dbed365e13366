"""What every executor does, whatever computes its tokens."""

import logging
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from deepmesh.config import Config, ExecutorConfig, SchedulerConfig
from deepmesh.wire.messages import (
    BlockOp,
    Capacity,
    DoneReason,
    GroupFlag,
    Load,
    OpKind,
    Pool,
    RowMode,
    RowSource,
    SamplingParams,
    StepStatus,
)
from deepmesh.wire.packed import ROW, unpack_ids
from services.executor.fake import FakeEngine
from services.executor.interface import Executor
from services.executor.stream import StreamExecutor
from tests.contract.executor_host import GREEDY, Host, Request, broken, prompt, result_rows
from tests.tiny import VOCAB_SIZE

MODEL = Path(__file__).parents[2] / "models/tiny"
CONFIG = Config(
    scheduler=SchedulerConfig(max_rows=8, max_model_len=512),
    executor=ExecutorConfig(global_blocks=64, window_blocks=64),
)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95)


def order(epoch: int = 1) -> Load:
    return Load(epoch, rank=0, ranks=1, model=str(MODEL), numerics="bf16")


@pytest.fixture(
    scope="module",
    params=["fake", "model", "gpu on a host", pytest.param("gpu", marks=pytest.mark.gpu)],
)
def loaded(request: pytest.FixtureRequest) -> Iterator[StreamExecutor]:
    """One executor a kind; each test begins an engine epoch of its own."""
    if request.param == "fake":
        executor = StreamExecutor(FakeEngine(CONFIG))
    elif request.param.startswith("gpu"):
        from services.executor.gpu.engine import GpuEngine

        device = "cuda" if request.param == "gpu" else "cpu"
        executor = StreamExecutor(GpuEngine(CONFIG, device=device))
    else:
        from services.executor.runner import ModelEngine

        executor = StreamExecutor(ModelEngine(CONFIG))
    executor.load(order())
    yield executor
    executor.close()


_epochs = iter(range(2, 10_000))


@pytest.fixture
def new_host(loaded: StreamExecutor) -> Callable[..., Host]:
    """Makes a host with all slots and blocks free, in a new engine epoch."""

    def make(seed: int = 0) -> Host:
        epoch = next(_epochs)
        return Host(loaded, loaded.load(order(epoch)), epoch=epoch, seed=seed)

    return make


def alone(
    new_host: Callable[..., Host],
    ids: list[int],
    count: int,
    *,
    sampling: SamplingParams = GREEDY,
    seed: int = 0,
) -> Request:
    """A request by itself, prompt in one chunk, one step at a time."""
    host = new_host()
    request = host.admit(ids, count, sampling=sampling, seed=seed)
    host.run(request, depth=1)
    return request


def test_capacity_answers_the_order(loaded: StreamExecutor) -> None:
    capacity = loaded.load(order(next(_epochs)))
    assert isinstance(capacity, Capacity)
    assert (capacity.num_global_blocks, capacity.num_window_blocks) == (64, 64)
    assert capacity.num_slots > 8
    assert capacity.num_state_blocks >= capacity.num_slots
    assert (capacity.max_model_len, capacity.vocab_size, capacity.window) == (512, VOCAB_SIZE, 64)
    assert len(capacity.fingerprint) == 16
    assert capacity == loaded.load(order(capacity.engine_epoch))


def test_results_come_once_and_in_order(new_host: Callable[..., Host]) -> None:
    host = new_host()
    request = host.admit(prompt(20), 5)
    steps = [host.submit(host.row(request)) for _ in range(5)]
    results = [host.take() for _ in steps]
    assert [r.step_id for r in results] == steps
    assert [r.engine_epoch for r in results] == [host.epoch] * 5
    assert host.executor.poll(0) is None
    assert host.watermarks[-1] == steps[-1]
    for result in results:
        times = result.times
        assert 0 < times.received_ns <= times.enqueued_ns <= times.begin_ns <= times.end_ns
        assert times.end_ns <= times.copied_ns


def test_the_watermark_never_moves_back(new_host: Callable[..., Host]) -> None:
    host = new_host()
    requests = [host.admit(prompt(30 + i, i), 6) for i in range(3)]
    host.run(*requests, chunk=16, depth=3)
    assert all(a <= b for a, b in pairwise(host.watermarks))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_tokens_feed_the_next_step_on_the_device(new_host: Callable[..., Host], depth: int) -> None:
    ids = prompt(40)
    expected = alone(new_host, ids, 6, sampling=SAMPLED, seed=3)
    host = new_host(seed=depth)
    request = host.admit(ids, 6, sampling=SAMPLED, seed=3)
    host.run(request, depth=depth)
    assert request.output == expected.output
    assert request.logprobs == expected.logprobs
    assert len(request.output) == 6
    assert request.done == DoneReason.LENGTH


@pytest.mark.parametrize("chunk", [13, 64, 100])
def test_no_split_of_a_prompt_changes_tokens(new_host: Callable[..., Host], chunk: int) -> None:
    ids = prompt(130)
    expected = alone(new_host, ids, 4, sampling=SAMPLED)
    host = new_host(seed=chunk)
    request = host.admit(ids, 4, sampling=SAMPLED)
    host.run(request, chunk=chunk)
    assert (request.output, request.logprobs) == (expected.output, expected.logprobs)


def test_neither_batch_mates_nor_slots_change_tokens(new_host: Callable[..., Host]) -> None:
    prompts = [prompt(length, length) for length in (5, 33, 129)]
    expected = [alone(new_host, ids, 5, sampling=SAMPLED, seed=i) for i, ids in enumerate(prompts)]
    for seed in (1, 2):
        host = new_host(seed=seed)
        together = [host.admit(ids, 5, sampling=SAMPLED, seed=i) for i, ids in enumerate(prompts)]
        mixed = together if seed == 1 else together[::-1]
        host.run(*mixed, chunk=50, depth=seed + 1)
        assert [r.output for r in together] == [r.output for r in expected]
        assert [r.logprobs for r in together] == [r.logprobs for r in expected]


def test_seed_and_sub_index_choose_the_sample(new_host: Callable[..., Host]) -> None:
    host = new_host()
    hot = SamplingParams(temperature=2.0)
    requests = [
        host.admit(prompt(12), 8, sampling=hot, seed=seed, sub_index=sub)
        for seed, sub in ((0, 0), (0, 1), (1, 0), (2**63 - 1, 0), (0, 0))
    ]
    host.run(*requests)
    outputs = [tuple(r.output) for r in requests]
    assert len(set(outputs)) == 4
    assert outputs[0] == outputs[4]


def test_rows_behind_the_length_limit_are_null_rows(new_host: Callable[..., Host]) -> None:
    host = new_host()
    request, other = host.admit(prompt(10), 2), host.admit(prompt(10, 1), 6)
    for _ in range(5):
        host.submit(host.row(request), host.row(other))
    rows = [result_rows(host.take()) for _ in range(5)]
    assert [int(r["done_reason"][0]) for r in rows] == [0, DoneReason.LENGTH] + [
        DoneReason.NULL
    ] * 3
    assert [int(r["num_tokens"][0]) for r in rows] == [1, 1, 0, 0, 0]
    assert [int(r["kv_len"][0]) for r in rows] == [10, 11, 11, 11, 11]
    assert [int(r["kv_len"][1]) for r in rows] == [10, 11, 12, 13, 14]
    assert len(other.output) == 5


def test_a_stop_id_ends_the_request_and_beats_the_length(new_host: Callable[..., Host]) -> None:
    free = alone(new_host, prompt(25), 6, sampling=SAMPLED)
    assert len(set(free.output)) == 6
    host = new_host()
    host_stop = host.admit(prompt(25), 6, sampling=SAMPLED, stop_ids=[free.output[3]])
    for _ in range(6):
        host.submit(host.row(host_stop))
    rows = [result_rows(host.take())[0] for _ in range(6)]
    if host_stop.output == free.output[:4]:  # an engine that samples its stop id as any other
        assert [int(r["done_reason"]) for r in rows] == [0, 0, 0, DoneReason.EOS] + [
            DoneReason.NULL
        ] * 2
    else:  # the fake avoids stop ids
        assert free.output[3] not in host_stop.output


def test_cancelled_rows_become_null_rows(new_host: Callable[..., Host]) -> None:
    host = new_host()
    request, other = host.admit(prompt(10), 20), host.admit(prompt(10, 1), 20)
    host.submit(host.row(request), host.row(other))
    host.take()
    host.submit(host.row(request), host.row(other), cancel=[request])
    host.submit(host.row(request), host.row(other))
    for _ in range(2):
        row = result_rows(host.take())
        assert row["done_reason"].tolist() == [DoneReason.NULL, DoneReason.NONE]
        assert row["num_tokens"].tolist() == [0, 1]


def test_a_slot_serves_the_next_request(new_host: Callable[..., Host]) -> None:
    expected = alone(new_host, prompt(60, 5), 4)
    host = new_host()
    first = host.admit(prompt(200), 3)
    host.run(first)
    host.slots.append(first.init.slot)
    host.submit(close=[first])
    second = host.admit(prompt(60, 5), 4)
    assert second.init.slot == first.init.slot
    host.run(second)
    assert second.output == expected.output


def test_a_recomputed_request_goes_on_with_the_same_tokens(new_host: Callable[..., Host]) -> None:
    ids = prompt(30)
    penalised = SamplingParams(temperature=0.8, presence_penalty=1.0, frequency_penalty=0.5)
    expected = alone(new_host, ids, 6, sampling=penalised)
    host = new_host(seed=4)
    request = host.admit(ids + expected.output[:3], 6, prompt_len=30, sampling=penalised)
    host.run(request, chunk=13)
    assert request.output == expected.output[3:]
    assert request.logprobs == expected.logprobs[3:]


def copy_ops(source: dict[Pool, list[int]], copies: dict[Pool, list[int]], after: bool) -> list:
    pairs = [
        (pool, src, dst)
        for pool in source
        for src, dst in zip(source[pool], copies[pool], strict=True)
    ]
    return [
        BlockOp(100 + i, OpKind.COPY, pool, src, dst, after)
        for i, (pool, src, dst) in enumerate(pairs)
    ]


@pytest.mark.parametrize("point", [128, 129])
def test_a_request_resumes_from_copies_of_blocks(new_host: Callable[..., Host], point: int) -> None:
    """An odd point also needs the open pair of the state block."""
    ids = prompt(180)
    expected = alone(new_host, ids, 6)
    host = new_host()
    first = host.admit(ids, 6)
    kept = {
        pool: [host.free[pool].pop() for _ in range(count)]
        for pool, count in ((Pool.GLOBAL, 3), (Pool.WINDOW, 3), (Pool.STATE, 1))
    }
    host.reserve(first, 180)
    own = first.tables | {Pool.STATE: [first.init.state_block]}
    saved = host.submit(host.prefill_row(first, point), ops=copy_ops(own, kept, after=True))
    host.submit(host.row(first), close=[])
    host.take()
    host.take()
    assert host.watermarks[-1] >= saved
    assert [status for _, status in host.ops_done] == [0] * 7
    host.submit(close=[first])
    host.take()
    fresh = {pool: [host.free[pool].pop() for _ in kept[pool]] for pool in kept}
    second = host.admit(
        ids,
        6,
        start=point,
        tables={pool: fresh[pool] for pool in (Pool.GLOBAL, Pool.WINDOW)},
        state_block=fresh[Pool.STATE][0],
    )
    host.submit(host.row(second), ops=copy_ops(kept, fresh, after=False))
    assert host.take().status == StepStatus.OK
    host.run(second)
    assert second.output == expected.output
    assert second.logprobs == expected.logprobs


def test_the_watermark_waits_for_operations_behind_the_rows(
    new_host: Callable[..., Host],
) -> None:
    host = new_host()
    request = host.admit(prompt(10), 4)
    first = host.submit(host.row(request))
    host.take()
    op = BlockOp(7, OpKind.COPY, Pool.STATE, request.init.state_block, 0, after=True)
    second = host.submit(host.row(request), ops=[op])
    assert host.take().gpu_done == first
    assert host.ops_done == []
    host.take_watermark(second)
    assert host.ops_done == [(7, 0)]


def test_reset_abandons_steps_and_keeps_the_weights(
    new_host: Callable[..., Host], loaded: StreamExecutor
) -> None:
    expected = alone(new_host, prompt(90), 5)
    host = new_host()
    request = host.admit(prompt(90, 3), 40)
    for _ in range(6):
        host.submit(host.row(request))
    host.take()
    epoch = next(_epochs)
    loaded.reset(epoch)
    late = Host(loaded, host.capacity, epoch=epoch, seed=9)
    again = late.admit(prompt(90), 5)
    late.run(again)
    assert {r.engine_epoch for r in late.results} == {epoch}
    assert again.output == expected.output
    assert loaded.poll(0) is None


def test_steps_of_another_epoch_are_dropped_and_counted(
    new_host: Callable[..., Host], loaded: StreamExecutor
) -> None:
    host = new_host()
    before = loaded.counters["stale_steps"]
    request = host.admit(prompt(10), 2)
    init, blocks = list(host.pending_init), list(host.pending_blocks)
    host.submit(host.row(request), epoch=host.epoch - 1)
    assert loaded.counters["stale_steps"] == before + 1
    host.in_flight.clear()
    request.next_start, host.pending_init, host.pending_blocks = 0, init, blocks
    request.tables = {Pool.GLOBAL: [], Pool.WINDOW: []}
    host.run(request)
    assert len(request.output) == 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"slot": 4000}, "slot 4000"),
        ({"gen": 77}, "generation 77"),
        ({"rid": 5}, "rid 5"),
        ({"epoch": 9}, "epoch 9"),
        ({"producer_step": 1}, "producer step"),
        ({"start_lo": 500, "start_hi": 501}, "bounds"),
        ({"mode": RowMode.VERIFY}, "drafts"),
        ({"grammar": 1}, "grammars"),
        ({"q": 9}, "ids are known"),
    ],
)
def test_a_wrong_row_fails_its_step_and_is_named(
    new_host: Callable[..., Host], fields: dict[str, int], text: str
) -> None:
    host = new_host()
    request, other = host.admit(prompt(10), 8), host.admit(prompt(10, 1), 8)
    host.submit(host.row(request), host.row(other))
    host.take()
    _, row = host.row(request)
    host.submit((request, broken(row, **fields)))
    result = host.take()
    assert result.status == StepStatus.ERROR
    assert result.gpu_done == result.step_id
    assert "row 0" in result.error
    assert text in result.error
    assert result_rows(result)["num_tokens"].tolist() == [0]
    host.submit(host.row(other))
    assert host.take().status == StepStatus.OK


def test_ids_and_blocks_out_of_range_fail_the_step(new_host: Callable[..., Host]) -> None:
    host = new_host()
    host.admit([5, 9000], 3)
    host.submit()
    assert "the id 9000" in host.take().error
    request = host.admit(prompt(5), 3)
    host.reserve(request, 5)
    host.pending_blocks[0] = (*host.pending_blocks[0][:4], 64)
    host.submit(host.row(request))
    assert "GLOBAL block 64 of 64" in host.take().error
    host.submit(ops=[BlockOp(1, OpKind.ZERO, Pool.WINDOW, 0, 64)])
    result = host.take()
    assert "operation 1: WINDOW block 64 of 64" in result.error
    assert result.ops_done == [(1, 1)]


def test_rows_behind_a_failed_one_are_null_rows(new_host: Callable[..., Host]) -> None:
    host = new_host()
    request = host.admit(prompt(10), 8)
    host.submit(host.row(request))
    _, row = host.row(request)
    host.submit((request, broken(row, grammar=1)))
    host.submit(host.row(request))
    statuses = [host.take() for _ in range(3)]
    assert [r.status for r in statuses] == [StepStatus.OK, StepStatus.ERROR, StepStatus.OK]
    assert result_rows(statuses[2])["done_reason"].tolist() == [DoneReason.NULL]


def test_dummy_rows_and_empty_steps_do_nothing(new_host: Callable[..., Host]) -> None:
    host = new_host()
    request = host.admit(prompt(10), 3)
    dummy = np.zeros(1, ROW)[0]
    dummy["mode"], dummy["slot"], dummy["q"] = RowMode.DUMMY, 0xFFFFFFFF, 1
    host.submit((None, dummy), host.row(request))
    host.submit((None, dummy))
    host.submit()
    first, second, third = (host.take() for _ in range(3))
    assert result_rows(first)["num_tokens"].tolist() == [0, 1]
    assert result_rows(second)["done_reason"].tolist() == [DoneReason.NULL]
    assert (third.status, third.rows) == (StepStatus.OK, b"")


def test_logprobs_come_for_those_who_ask(new_host: Callable[..., Host]) -> None:
    host = new_host()
    quiet = host.admit(prompt(10), 2, n_logprobs=-1)
    host.submit(host.row(quiet))
    assert host.take().logprobs == b""
    own, top = host.admit(prompt(11), 2, n_logprobs=0), host.admit(prompt(12), 2, n_logprobs=3)
    host.submit(host.row(own), host.row(quiet), host.row(top))
    result = host.take()
    logprobs = np.frombuffer(result.logprobs, "<f4")
    top_ids, top_logprobs = unpack_ids(result.top_ids), np.frombuffer(result.top_logprobs, "<f4")
    assert len(logprobs) == 3
    assert len(top_ids) == len(top_logprobs) == 3
    assert top_ids[0] == unpack_ids(result.tokens)[2]  # greedy: the best one
    assert top_logprobs[0] == logprobs[2]
    assert (np.diff(top_logprobs) <= 0).all()


def test_a_pause_lets_the_stream_run_dry_and_the_next_step_goes_on(
    new_host: Callable[..., Host], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.executor.stream")
    expected = alone(new_host, prompt(10), 4)
    host = new_host()
    request = host.admit(prompt(10), 4)
    host.submit(host.row(request))
    last = host.submit(host.row(request), flags=GroupFlag.PAUSE)
    host.take()
    assert host.take().gpu_done == last
    assert host.executor.poll(0.05) is None
    host.run(request)
    assert request.output == expected.output
    assert [r.getMessage() for r in caplog.records if "PAUSE" in r.getMessage()]


def test_submit_returns_at_once(new_host: Callable[..., Host]) -> None:
    host = new_host()
    requests = [host.admit(prompt(60, i), 30) for i in range(4)]
    for _ in range(3):
        host.submit(*(host.row(r, 20) for r in requests))
    assert len(host.in_flight) == 3
    first = host.take()
    assert first.times.queue_depth == 0
    assert host.take().times.received_ns < first.times.end_ns


def test_poll_without_a_result_gives_none(new_host: Callable[..., Host]) -> None:
    assert new_host().executor.poll(0.001) is None


def test_close_ends_the_stream_with_steps_in_flight() -> None:
    before = threading.active_count()
    executor: Executor = StreamExecutor(FakeEngine(CONFIG, step_s=30.0))
    host = Host(executor, executor.load(order()))
    request = host.admit(prompt(10), 3)
    host.submit(host.row(request))
    host.submit(host.row(request))
    executor.close()
    assert threading.active_count() == before


# ---------------------------------------------------------------- recomputed output


def test_known_output_is_recomputed_in_wide_verify_rows(new_host: Callable[..., Host]) -> None:
    """Positions from P on, whose ids the scheduler knows, in rows of any width."""
    ids = prompt(30)
    expected = alone(new_host, ids, 12, sampling=SAMPLED)
    for width in (1, 3, 9):
        host = new_host(seed=width)
        request = host.admit(ids + expected.output[:9], 12, prompt_len=30, sampling=SAMPLED)
        host.submit(host.prefill_row(request, 30))
        while request.is_prefill:
            _, row = host.prefill_row(request, width)
            assert row["source"] == RowSource.HOST
            host.submit((request, broken(row, mode=RowMode.VERIFY)))
        for _ in list(host.in_flight):
            assert host.take().status == StepStatus.OK, host.results[-1].error
        host.run(request)
        assert request.output == expected.output[9:]
        assert request.logprobs == expected.logprobs[9:]
