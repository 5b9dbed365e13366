"""The engine with the model that ships and a real mask worker: outputs keep to their grammars."""

import json
import os
import signal
from collections.abc import Iterator

import pytest

from deepmesh.config import Config, ExecutorConfig, SchedulerConfig
from deepmesh.grammars import make_grammar
from deepmesh.wire.messages import (
    DoneReason,
    Grammar,
    Load,
    RowSource,
    SamplingParams,
    StepStatus,
)
from services.executor.gpu.engine import GpuEngine
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.runner import ModelEngine
from services.executor.stream import StreamExecutor
from tests.contract.executor_host import Host, Request
from tests.services.test_executor_generation import rendered
from tests.services.tokenizer_harness import EOS, MODEL, TOKENIZER

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
}
JSON = make_grammar("json_schema", json.dumps(PERSON))
HOT = SamplingParams(temperature=1.5)
PROMPT = rendered("Who are you? Answer in JSON.")


class Rig:
    """An executor with masks, the waits long enough for a busy machine."""

    def __init__(self, kind: str, wait_ms: float = 2000) -> None:
        self.kind = kind
        config = Config(
            scheduler=SchedulerConfig(max_rows=8, max_model_len=512),
            executor=ExecutorConfig(global_blocks=64, window_blocks=64, mask_wait_ms=wait_ms),
        )
        self.masks = GrammarMasks(config, "executor-0-0", lambda *about: None)
        if kind == "cpu":
            self.executor = StreamExecutor(ModelEngine(config, masks=self.masks))
        else:
            device = "cuda" if kind == "gpu" else "cpu"
            self.executor = StreamExecutor(GpuEngine(config, masks=self.masks, device=device))
        self._epoch = 0

    def host(self) -> Host:
        self._epoch += 1
        order = Load(self._epoch, rank=0, ranks=1, model=str(MODEL), numerics="bf16")
        capacity = self.executor.load(order)
        assert capacity.has_masks
        return Host(self.executor, capacity, epoch=self._epoch)


BY_HAND, GPU = pytest.mark.large, pytest.mark.gpu
KINDS = ("cpu", pytest.param("gpu on a host", marks=BY_HAND), pytest.param("gpu", marks=GPU))


@pytest.fixture(scope="module", params=KINDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    rig.executor.close()


@pytest.fixture(scope="module")
def hasty(rig: Rig) -> Iterator[Rig]:
    """Of the same kind; its steps wait for no mask that is not there yet."""
    made = Rig(rig.kind, wait_ms=0)
    yield made
    made.executor.close()


def admit(
    host: Host, grammar: Grammar | None, seed: int = 0, max_new: int = 90, **more: object
) -> Request:
    return host.admit(
        PROMPT, max_new, sampling=HOT, seed=seed, stop_ids=[EOS], grammar=grammar, **more
    )


def submit(host: Host, *requests: Request) -> None:
    """One row of each request; a row that samples does so under its grammar."""
    rows = [host.row(request) for request in requests]
    for request, row in rows:
        row["grammar"] = row["sample"] * (request.init.grammar is not None)
        if row["source"] == RowSource.DEVICE:  # a null row leaves the last position undone
            row["start_lo"] = len(request.prompt) - 1
    host.submit(*rows)


def take(host: Host) -> None:
    assert host.take().status is StepStatus.OK, host.results[-1].error


def step(host: Host, *requests: Request) -> None:
    submit(host, *requests)
    take(host)


def run_ahead(host: Host, *requests: Request) -> None:
    """As `run`, with two steps in flight."""
    for _ in range(10_000):
        going = [request for request in requests if request.done is DoneReason.NONE]
        if going and len(host.in_flight) < 2:
            submit(host, *going)
        elif host.in_flight:
            take(host)
        else:
            return
    raise AssertionError("the requests do not end")


def run(host: Host, *requests: Request) -> None:
    """All of them to their ends."""
    for _ in range(400):
        going = [request for request in requests if request.done is DoneReason.NONE]
        if not going:
            return
        step(host, *going)
    raise AssertionError("the requests do not end")


def text_of(request: Request) -> str:
    return TOKENIZER.decode([token for token in request.output if token != EOS])


def check(request: Request) -> bool:
    """Whether it came to an end of its own; what it is then."""
    if request.done is DoneReason.LENGTH:
        return False
    assert request.done in (DoneReason.GRAMMAR, DoneReason.EOS)
    person = json.loads(text_of(request))
    assert set(person) >= {"name", "age"}
    assert len(person["name"]) <= 12
    assert 0 <= person["age"] <= 130
    return True


def test_hot_outputs_keep_to_the_schema(rig: Rig) -> None:
    host = rig.host()
    requests = [admit(host, JSON, seed) for seed in range(6)]
    free = admit(host, None, seed=7)
    run(host, *requests, free)
    assert sum(map(check, requests)) >= 3
    assert free.done in (DoneReason.EOS, DoneReason.LENGTH)


def test_the_same_tokens_alone_and_beside_others(rig: Rig) -> None:
    host = rig.host()
    alone = admit(host, JSON, seed=5)
    run(host, alone)
    host = rig.host()
    others = [admit(host, JSON if seed % 2 else None, seed) for seed in (1, 2, 3, 4)]
    among = admit(host, JSON, seed=5)
    run(host, among, *others)
    assert among.output == alone.output
    assert among.logprobs == alone.logprobs


def test_a_preempted_output_goes_on_under_its_grammar(rig: Rig) -> None:
    """Recomputed in another slot from its tokens: not a token differs."""
    host = rig.host()
    whole = admit(host, JSON, seed=11)
    run(host, whole)
    cut = len(whole.output) // 2
    host = rig.host()
    again = host.admit(
        PROMPT + whole.output[:cut],
        90,
        prompt_len=len(PROMPT),
        sampling=HOT,
        seed=11,
        stop_ids=[EOS],
        grammar=JSON,
    )
    run(host, again)
    assert whole.output[:cut] + again.output == whole.output


def test_a_killed_mask_worker_costs_null_rows_and_no_token(rig: Rig) -> None:
    host = rig.host()
    calm = admit(host, JSON, seed=3)
    run(host, calm)
    host = rig.host()
    request = admit(host, JSON, seed=3)
    for count in range(400):
        if request.done is not DoneReason.NONE:
            break
        if count == 5:
            os.kill(rig.masks.pid, signal.SIGKILL)
        step(host, request)
    assert request.output == calm.output
    assert request.done is calm.done


def test_a_choice_ends_with_its_last_token(rig: Rig) -> None:
    host = rig.host()
    request = admit(host, make_grammar("lark", 'start: "alpha" | "beta"\n'), seed=2)
    run(host, request)
    assert text_of(request) in ("alpha", "beta")
    assert request.done in (DoneReason.GRAMMAR, DoneReason.EOS)


def test_completion_at_the_last_token_that_fits_is_no_cut(rig: Rig) -> None:
    host = rig.host()
    grammar = make_grammar("regex", "[a-z]{200}")
    probe = admit(host, grammar, seed=4, max_new=60)
    run(host, probe)
    assert probe.done is DoneReason.LENGTH
    word = make_grammar("lark", 'start: "wonderful"\n')
    host = rig.host()
    free = admit(host, word, seed=4)
    run(host, free)
    host = rig.host()
    tight = admit(host, word, seed=4, max_new=len(free.output))
    run(host, tight)
    assert tight.done is DoneReason.GRAMMAR
    assert text_of(tight) == "wonderful"


def test_a_broken_grammar_fails_its_request_alone(rig: Rig) -> None:
    host = rig.host()
    bad = admit(host, make_grammar("regex", "a(?=b)"))
    good = admit(host, JSON, seed=6)
    run(host, bad, good)
    assert bad.done is DoneReason.GRAMMAR_ERROR
    assert bad.output == []
    assert good.done in (DoneReason.GRAMMAR, DoneReason.EOS, DoneReason.LENGTH)


def words(host: Host) -> list[Request]:
    return [
        admit(host, make_grammar("regex", "[a-z]{200}"), seed=4, max_new=10),
        admit(host, make_grammar("lark", 'start: "alpha" | "beta"\n'), seed=2),
        admit(host, None, seed=1, max_new=8),
    ]


def test_neither_steps_in_flight_nor_masks_that_are_missed_change_tokens(
    rig: Rig, hasty: Rig
) -> None:
    host = rig.host()
    calm = words(host)
    run(host, *calm)
    for other in (rig, hasty):
        host = other.host()
        found = words(host)
        run_ahead(host, *found)
        for ours, theirs in zip(found, calm, strict=True):
            assert (ours.output, ours.logprobs, ours.done) == (
                theirs.output,
                theirs.logprobs,
                theirs.done,
            )
