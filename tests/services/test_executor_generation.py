"""The engine with the model that ships: a known answer, and faults that stay where they are."""

from collections.abc import Iterator
from pathlib import Path

import deepseek_recipe
import pytest
from tokenizers import Tokenizer

from deepmesh.config import Config, ExecutorConfig, SchedulerConfig
from deepmesh.wire.messages import DoneReason, Load, Pool, StepStatus
from services.executor.runner import ModelEngine
from services.executor.stream import StreamExecutor
from tests.contract.executor_host import Host

MODEL = Path(__file__).parents[2] / "models/tiny"
EOS = 1


@pytest.fixture(scope="module")
def engine() -> ModelEngine:
    return ModelEngine(
        Config(
            scheduler=SchedulerConfig(max_rows=8, max_model_len=512),
            executor=ExecutorConfig(global_blocks=64, window_blocks=64),
        )
    )


@pytest.fixture(scope="module")
def executor(engine: ModelEngine) -> Iterator[StreamExecutor]:
    executor = StreamExecutor(engine)
    yield executor
    executor.close()


_epochs = iter(range(1, 1000))


@pytest.fixture
def host(executor: StreamExecutor) -> Host:
    epoch = next(_epochs)
    order = Load(epoch, rank=0, ranks=1, model=str(MODEL), numerics="bf16")
    return Host(executor, executor.load(order), epoch=epoch)


def rendered(question: str) -> list[int]:
    """Prompt ids of a chat with thinking off, as the tokenizer service makes them."""
    request = deepseek_recipe.ChatCompletionRequest(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": question}],
            "thinking": {"type": "disabled"},
        }
    )
    version = deepseek_recipe.ModelVersion.DeepseekV41Flash
    options = deepseek_recipe.ConversionOptions().with_model_alias("tiny", version)
    tokenizer = deepseek_recipe.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    encoding = deepseek_recipe.DeepseekV41Encoding().with_tokenizer(tokenizer)
    return list(encoding.encode(request.convert(options).conversation))


def test_the_model_answers_a_sum(host: Host) -> None:
    """Three in one batch, prompts in chunks, two steps in flight."""
    questions = {"What is 417 + 256?": "673", "What is 35 + 61?": "96", "What is 8 + 5?": "13"}
    requests = [host.admit(rendered(text), 16, stop_ids=[EOS]) for text in questions]
    host.run(*requests, chunk=7)
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert [tokenizer.decode(r.output) for r in requests] == list(questions.values())
    assert {r.done for r in requests} == {DoneReason.EOS}


def test_numbers_that_are_not_finite_end_their_request_only(
    host: Host, engine: ModelEngine
) -> None:
    ids = list(range(700, 760))
    alone = host.admit(ids, 6)
    host.run(alone)
    sick, well = host.admit(ids, 6), host.admit(ids, 6)
    host.submit(host.row(sick), host.row(well))
    host.take()
    engine.cache.poison_block(Pool.WINDOW, sick.tables[Pool.WINDOW][0])
    for _ in range(5):
        host.submit(host.row(sick), host.row(well))
    assert {host.take().status for _ in range(5)} == {StepStatus.OK}
    assert (sick.done, len(sick.output), sick.num_null) == (DoneReason.ERROR, 1, 4)
    assert (well.output, well.logprobs) == (alone.output, alone.logprobs)
