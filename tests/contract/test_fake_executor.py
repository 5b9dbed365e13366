"""What only the fake can do so far (tails, drafts, masks): others will do it the same way."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepmesh.config import Config, ExecutorConfig, SchedulerConfig
from deepmesh.wire.messages import DoneReason, GpuDone, Grammar, Load, StepStatus
from services.executor.fake import FakeEngine, Oracle
from services.executor.stream import StreamExecutor
from tests.contract.executor_host import Host, broken, prompt, result_rows
from tests.tiny import VOCAB_SIZE

MODEL = Path(__file__).parents[2] / "models/tiny"


@contextmanager
def fake(**executor: float) -> Iterator[Host]:
    """A host of a fake whose [executor] table has more keys."""
    settings = ExecutorConfig(global_blocks=64, window_blocks=64, **executor)
    scheduler = SchedulerConfig(max_rows=8, max_model_len=512)
    stream = StreamExecutor(FakeEngine(Config(scheduler=scheduler, executor=settings)))
    try:
        yield Host(stream, stream.load(Load(1, rank=0, ranks=1, model=str(MODEL))))
    finally:
        assert stream.close()


def test_tokens_are_told_before_the_step_is_over() -> None:
    with fake(fake_step_ms=1.0, fake_tail_ms=20.0) as host:
        request = host.admit(prompt(10), 4)
        first = host.submit(host.row(request))
        result = host.take()
        assert result.gpu_done < first
        told = host.executor.poll(10)
        assert isinstance(told, GpuDone)
        assert told.gpu_done == first
        second, third = host.submit(host.row(request)), host.submit(host.row(request))
        assert host.take().gpu_done < second
        later = host.take()
        assert second <= later.gpu_done < third
        assert later.times.begin_ns - host.results[-2].times.end_ns >= 20e6


def test_drafts_bring_the_same_tokens_in_fewer_steps() -> None:
    expected = Oracle(VOCAB_SIZE).generate(prompt(20), 40, seed=3)
    with fake(fake_draft_len=3) as host:
        assert host.capacity.draft_len == 3
        request = host.admit(prompt(20), 40, seed=3)
        host.submit(host.row(request))
        while request.done == DoneReason.NONE:
            if len(host.in_flight) < 2:
                host.submit(host.verify_row(request, 3))
            else:
                assert host.take().status == StepStatus.OK, host.results[-1].error
        assert request.output == expected
        widths = [int(result_rows(r)["num_tokens"][0]) for r in host.results[1:]]
        assert set(widths[:-1]) == {1, 2, 3, 4}
        assert request.done == DoneReason.LENGTH
        assert host.take().status == StepStatus.OK
        assert result_rows(host.results[-1])["done_reason"].tolist() == [DoneReason.NULL]


@pytest.mark.parametrize("draft_len", [0, 3])
def test_a_row_without_its_mask_samples_nothing_and_is_repeated(draft_len: int) -> None:
    expected = Oracle(VOCAB_SIZE).generate(prompt(20), 6, seed=3, masked=True)
    with fake(fake_step_ms=8.0, fake_mask_ms=12.0, fake_draft_len=draft_len) as host:
        assert host.capacity.has_masks
        request = host.admit(prompt(20), 6, seed=3, grammar=Grammar("regex", ".*"))
        host.submit((request, broken(host.row(request)[1], grammar=1)))
        while request.done == DoneReason.NONE:
            if len(host.in_flight) < 2:
                _, row = host.verify_row(request, draft_len)
                host.submit((request, broken(row, grammar=1, start_lo=19)))
            else:
                assert host.take().status == StepStatus.OK, host.results[-1].error
        assert request.output == expected
        found = [result_rows(result)[0] for result in host.results]
        null = [row for row in found if row["done_reason"] == DoneReason.NULL]
        assert null
        assert {int(row["num_tokens"]) for row in null} == {0}
        assert int(found[0]["kv_len"]) == 19, "the first mask was late"


@pytest.mark.parametrize(
    ("text", "tokens", "reason"),
    [(".{5}", 5, DoneReason.GRAMMAR), ("(", 0, DoneReason.GRAMMAR_ERROR)],
)
def test_a_grammar_ends_its_request(text: str, tokens: int, reason: DoneReason) -> None:
    with fake(fake_mask_ms=0.0) as host:
        request = host.admit(prompt(20), 9, grammar=Grammar("regex", text))
        while request.done == DoneReason.NONE:
            host.submit((request, broken(host.row(request)[1], grammar=1)))
            assert host.take().status == StepStatus.OK, host.results[-1].error
        assert (len(request.output), request.done) == (tokens, reason)
        host.submit((request, broken(host.row(request)[1], grammar=1)))
        assert result_rows(host.take())["done_reason"].tolist() == [DoneReason.NULL]
