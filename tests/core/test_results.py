"""Results of several ranks: applied in one pass or one by one, it is the same."""

from collections import deque

import numpy as np
import pytest
from msgspec.structs import replace

from deepmesh.wire import codec
from deepmesh.wire.messages import (
    Finished,
    GpuDone,
    GroupFlag,
    Load,
    Pause,
    RowMode,
    Shutdown,
    StepKind,
    StepResult,
    StepStatus,
    SubmitStep,
    TokenBatch,
)
from deepmesh.wire.packed import RESULT, ROW, pack_ids, unpack_ids
from services.scheduler.core.audit import audit
from services.scheduler.core.events import (
    Event,
    ExecutorUp,
    Mail,
    Note,
    Send,
    StepResults,
    Tick,
    TokenizerUp,
)
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.sim.device import Device
from services.scheduler.sim.requests import SimRequest
from tests.core.driver import CAPACITY, CONFIG, SECOND, VOCAB, words

RANKS = 3


def over_the_wire(send: Send) -> Send:
    """What the peer reads, if it came over the wire."""
    message = codec.decode(codec.encode(send.message, seq=0, sent_ns=0)).message
    return Send(send.peer, message)  # type: ignore[arg-type]


class Group:
    """One core and a device for each of its ranks; results arrive when the test says."""

    def __init__(self, num_requests: int = 7, *, encodes_rows: bool = False) -> None:
        self.core = Scheduler(
            CONFIG, name="scheduler-0", model="m", ranks=RANKS, encodes_rows=encodes_rows
        )
        self.devices = [Device(CAPACITY, rank) for rank in range(RANKS)]
        self.steps: list[deque[SubmitStep]] = [deque() for _ in range(RANKS)]
        self.requests: dict[bytes, SimRequest] = {}
        self.sent: list[Send] = []
        self.notes: list[Note] = []
        self.now = SECOND
        for number in range(2):
            self.feed(TokenizerUp(f"tokenizer-{number}", b"t"))
        for rank in range(RANKS):
            self.feed(ExecutorUp(f"executor-0-{rank}", rank))
        for rank in range(RANKS):
            epoch = self.messages(Load)[rank].engine_epoch
            capacity = replace(CAPACITY, rank=rank, engine_epoch=epoch)
            self.feed(Mail(f"executor-0-{rank}", capacity))
        for number in range(num_requests):
            rid = number.to_bytes(16, "big")
            request = SimRequest(rid, words(20 + 5 * number, number), 9 + number, seed=number)
            self.requests[rid] = request
            self.feed(Mail("", request.generate(f"tokenizer-{number % 2}")))

    def feed(self, event: Event) -> None:
        """One event, with all checks behind it."""
        for action in self.core.handle(event, self.now):
            if isinstance(action, Send):
                action = over_the_wire(action)
            match action:
                case Send(peer, SubmitStep() as step):
                    self.steps[int(peer[-1])].append(step)
                case Send(peer, TokenBatch(rows=rows)):
                    for row in rows:
                        request = self.requests[row.rid]
                        assert peer == f"tokenizer-{int.from_bytes(row.rid, 'big') % 2}"
                        request.take(row, self.now)
                case Send(_, Finished(rid=rid) as message):
                    self.requests[rid].end(message)
                case Note():
                    self.notes.append(action)
                case _:
                    pass
            if isinstance(action, Send):
                self.sent.append(action)
        audit(self.core)

    def messages(self, kind: type[Load]) -> list[Load]:
        """All messages of a kind."""
        return [send.message for send in self.sent if isinstance(send.message, kind)]

    def body(self, rank: int) -> StepResult:
        """A rank runs its oldest step to the end; nobody is told yet."""
        self.now += 1_000_000
        result = self.devices[rank].body(self.steps[rank].popleft())
        self.devices[rank].tail()
        return replace(result, gpu_done=self.devices[rank].gpu_done)

    def tell(self, *results: StepResult) -> None:
        """Results arrive together."""
        pairs = [(f"executor-0-{result.rank}", result) for result in results]
        self.feed(StepResults(pairs))

    def outputs(self) -> list[list[int]]:
        """Tokens of all requests."""
        return [request.output for request in self.requests.values()]


def run(group: Group, *, together: bool, backwards: bool = False) -> list[list[int]]:
    while True:
        group.feed(Tick())
        if not any(group.steps):
            return group.outputs()
        results = [group.body(rank) for rank in range(RANKS)]
        if backwards:
            results.reverse()
        if together:
            group.tell(*results)
        else:
            for result in results:
                group.feed(Mail(f"executor-0-{result.rank}", result))


def test_results_bring_the_same_together_one_by_one_and_in_any_order() -> None:
    whole = run(Group(), together=True)
    assert run(Group(), together=False) == whole
    assert run(Group(), together=True, backwards=True) == whole
    expected = Group()
    for request in expected.requests.values():
        request.output = request.expected(VOCAB)[0]
    assert whole == expected.outputs()


def test_some_ranks_of_two_steps_in_one_event_are_applied_in_step_order() -> None:
    group = Group()
    group.feed(Tick())
    assert [len(steps) for steps in group.steps] == [2, 2, 2]
    first, second = [group.body(rank) for rank in (0, 1)], group.body(0)
    group.tell(first[1], first[0], second)
    ids = [step.step_id for step in group.core.group.unresolved]
    assert len(ids) == 2  # rank 2 owes both
    assert group.core.group.applied == [second.step_id, first[1].step_id, 0]
    group.tell(group.body(2), group.body(1))
    assert [step.step_id for step in group.core.group.unresolved] == ids[1:]
    group.tell(group.body(2))
    assert not group.core.group.unresolved
    run(group, together=True)
    assert all(request.terminals for request in group.requests.values())


def test_a_result_twice_in_one_event_counts_once() -> None:
    group = Group()
    group.feed(Tick())
    result = group.body(1)
    group.tell(result, result)
    group.tell(result)
    assert group.core.group.applied[1] == result.step_id
    assert not group.notes or group.notes[-1].text != "step failed"


def broken(result: StepResult, how: str) -> StepResult:
    """The result of a device that cannot be trusted."""
    rows = np.frombuffer(result.rows, RESULT).copy()
    match how:
        case "rows cut short":
            return replace(result, rows=result.rows[:-1])
        case "a row too few":
            return replace(result, rows=result.rows[: -RESULT.itemsize])
        case "another's row":
            rows["rid"][0] += 1
        case "tokens missing":
            return replace(result, tokens=result.tokens[:-4])
        case "half a token":
            return replace(result, tokens=result.tokens[:-1])
        case "too far":
            rows["kv_len"] += 999
        case "no such token":
            tokens = unpack_ids(result.tokens).copy()
            tokens[-1] = VOCAB
            return replace(result, tokens=pack_ids(tokens))
        case _:
            return replace(result, status=StepStatus.ERROR, rows=b"", tokens=b"", error=how)
    return replace(result, rows=rows.tobytes())


@pytest.mark.parametrize(
    "how",
    [
        "rows cut short",
        "a row too few",
        "another's row",
        "tokens missing",
        "half a token",
        "too far",
        "no such token",
        "out of memory",
    ],
)
def test_an_error_is_that_of_its_rank_and_the_others_results_count(how: str) -> None:
    group = Group()
    while not all(len(request.output) > 2 for request in group.requests.values()):
        group.feed(Tick())
        group.tell(*[group.body(rank) for rank in range(RANKS)])
    group.feed(Tick())
    before = group.core.stats().output_tokens
    results = [group.body(rank) for rank in range(RANKS)]
    good = sum(len(unpack_ids(result.tokens)) for result in results if result.rank != 1)
    results[1] = broken(results[1], how)
    group.tell(*results)
    failed = [note for note in group.notes if note.text == "step failed"]
    assert [note.fields["rank"] for note in failed] == [1]
    assert group.core.stats().output_tokens == before + good
    assert group.core.stats().inflight_tokens == 0
    assert group.core.group.engine_epoch == 2


def test_late_results_of_an_older_epoch_move_counters_only() -> None:
    group = Group()
    for _ in range(6):
        group.feed(Tick())
        group.tell(*[group.body(rank) for rank in range(RANKS)])
    group.feed(Tick())
    late = group.body(0)
    group.tell(broken(group.body(1), "out of memory"))
    outputs = [list(output) for output in group.outputs()]
    group.tell(late)
    stats = group.core.stats()
    assert stats.late_results == 1
    assert stats.overrun_tokens == len(unpack_ids(late.tokens))
    assert group.outputs() == outputs


def test_ranks_without_rows_run_a_dummy_and_it_is_counted() -> None:
    group = Group(num_requests=1)
    group.feed(Tick())
    rows = [np.frombuffer(steps[0].rows, ROW) for steps in group.steps]
    assert sum(row["mode"][0] == RowMode.DUMMY for row in rows) == RANKS - 1
    step = group.steps[0][0]
    stats = group.core.stats()
    num_steps = len(group.steps[0])
    assert stats.dummy_tokens == (RANKS - 1) * num_steps
    padded = sum(part.descriptor.padded_tokens for part in group.steps[0]) * RANKS
    real = sum(int(np.frombuffer(p.rows, ROW)["q"].sum()) for steps in group.steps for p in steps)
    assert stats.pad_tokens == padded - real
    assert step.descriptor.kind == StepKind.PREFILL


def test_a_rank_whose_step_never_ends_on_the_device_is_taken_for_dead() -> None:
    group = Group(num_requests=1)
    results: list[StepResult] = []
    for _ in range(40):
        group.feed(Tick())
        results = [group.body(rank) for rank in range(RANKS) if group.steps[rank]]
        group.tell(*[replace(r, gpu_done=0) if r.rank == 2 else r for r in results])
        for result in results:  # rank 2 says GPU_DONE of all steps but the last
            done = result.step_id - 1 if result.rank == 2 else result.step_id
            group.feed(Mail("executor-0-2", GpuDone(result.engine_epoch, result.rank, done)))
    assert all(request.terminals for request in group.requests.values())
    assert group.core.group.retiring
    group.now += 61 * SECOND
    group.feed(Tick())
    assert [send.peer for send in group.sent if isinstance(send.message, Shutdown)] == [
        "executor-0-2"
    ]


def test_a_pause_with_nothing_in_flight_is_told_by_a_step_of_dummies() -> None:
    group = Group(num_requests=0)
    group.feed(Mail("operator", Pause()))
    group.feed(Tick())
    parts = [steps.popleft() for steps in group.steps]
    assert {part.descriptor for part in parts} == {parts[0].descriptor}
    descriptor = parts[0].descriptor
    assert (descriptor.kind, descriptor.flags) == (StepKind.DUMMY, GroupFlag.PAUSE)


def test_rows_that_leave_in_the_form_of_the_wire_are_the_same_rows() -> None:
    plain, encoded = Group(), Group(encodes_rows=True)
    outputs = run(plain, together=True)
    assert run(encoded, together=True) == outputs
    batches = [
        [send.message for send in group.sent if isinstance(send.message, TokenBatch)]
        for group in (plain, encoded)
    ]
    assert batches[0] == batches[1]
