"""What a scheduler relies on, of any executor that dials it; bytes alone."""

import itertools
import os
import struct
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from tests.contract.raw import ENUMS, Guest, Wire, make
from tests.contract.raw_executor import RESULT, ROW
from tests.contract.targets import ROOT, Target

DONE, MODE, POOL = ENUMS["DoneReason"], ENUMS["RowMode"], ENUMS["Pool"]
SOURCE, STATUS = ENUMS["RowSource"], ENUMS["StepStatus"]
BLOCK = struct.Struct("<5I")
_epochs = itertools.count(3)


@dataclass
class Request:
    """A request in a slot."""

    slot: int
    gen: int
    prompt: list[int]
    max_len: int
    blocks: bytes
    init: list[object]
    sent: int = 0  # positions of the prompt in steps
    steps: list[int] = field(default_factory=list[int])
    output: list[int] = field(default_factory=list[int])
    done: int = 0


class Host:
    """The scheduler's side: slots and blocks, steps, results."""

    def __init__(self, wire: Wire, target: Target) -> None:
        self.wire = wire
        self.listener = wire.listen(target.dials[0], "scheduler", "scheduler-0")
        self.executor: Guest = self.listener.guest("executor-0-0")
        self.load()

    def load(self) -> SimpleNamespace:
        self.executor = self.listener.guest("executor-0-0")
        self.reset(send=False)
        model = os.environ.get("DEEPMESH_CONTRACT_MODEL", str(ROOT / "models/tiny"))
        order = make("Load", engine_epoch=self.epoch, rank=0, ranks=1, model=model)
        self.executor.send(order)
        self.capacity = self.executor.expect("Capacity")
        return self.capacity

    def reset(self, *, send: bool = True) -> None:
        """A new engine epoch: everything is free."""
        self.epoch = next(_epochs)
        self.step_id = self.epoch << 40
        self.group_step = self.num_admitted = 0
        self.pending: list[Request] = []
        self.in_flight: dict[int, list[Request | None]] = {}
        if send:
            self.executor.send(make("Reset", engine_epoch=self.epoch))

    def admit(self, prompt: list[int], new: int, **fields: object) -> Request:
        number = self.num_admitted
        self.num_admitted += 1
        max_len, size = len(prompt) + new, self.capacity.block_size
        count = -(-max_len // size)
        first = 8 * number  # tests are small: eight blocks for each request
        blocks = b"".join(
            BLOCK.pack(number, number + 1, pool, i, first + i)
            for pool in (POOL.GLOBAL, POOL.WINDOW)
            for i in range(count)
        )
        init = make(
            "SlotInit",
            slot=number,
            gen=number + 1,
            rid=1000 + number,
            epoch=1,
            ids=struct.pack(f"<{len(prompt)}i", *prompt),
            prompt_len=len(prompt),
            max_len=max_len,
            **{"sampling": make("SamplingParams", temperature=1.0), "state_block": number} | fields,
        )
        request = Request(number, number + 1, prompt, max_len, blocks, init)
        self.pending.append(request)
        return request

    def row(self, request: Request, chunk: int = 1 << 20) -> bytes:
        """The next part of the prompt, or one more token."""
        left = len(request.prompt) - request.sent
        ident = [1000 + request.slot, 1, request.slot, request.gen]
        if left > 0:
            start, q = request.sent, min(left, chunk)
            request.sent += q
            head = [MODE.PREFILL, SOURCE.HOST, int(q == left), 0, 0]
            return ROW.pack(*ident, *head, start, start, q, 0)
        request.sent += 1
        head = [MODE.DECODE, SOURCE.DEVICE, 1, 0, request.steps[-1]]
        return ROW.pack(*ident, *head, len(request.prompt), request.sent - 1, 1, 0)

    def submit(
        self, *rows: tuple[Request | None, bytes], epoch: int = 0, skip: bool = False
    ) -> int:
        """Send a step; `skip` leaves no trace here."""
        step_id = self.step_id + 1
        total = sum(ROW.unpack(row)[11] for _, row in rows)
        message = make(
            "SubmitStep",
            engine_epoch=epoch or self.epoch,
            step_id=step_id,
            group_step=self.group_step + 1,
            group_epoch=1,
            descriptor=make("Descriptor", kind=2, padded_tokens=total, padded_rows=len(rows)),
            rows=b"".join(row for _, row in rows),
            init=[request.init for request in self.pending],
            blocks=b"".join(request.blocks for request in self.pending),
        )
        self.executor.send(message)
        if skip:
            return step_id
        self.pending = []
        self.step_id, self.group_step = step_id, self.group_step + 1
        self.in_flight[step_id] = [request for request, _ in rows]
        for request, _ in rows:
            if request is not None:
                request.steps.append(step_id)
        return step_id

    def take(self) -> SimpleNamespace:
        """The next result; it must be of the oldest step in flight."""
        result = self.executor.expect("StepResult")
        assert result.step_id == min(self.in_flight), "results come in the order of their steps"
        assert (result.engine_epoch, result.rank) == (self.epoch, 0)
        requests = self.in_flight.pop(result.step_id)
        tokens = list(struct.unpack(f"<{len(result.tokens) // 4}i", result.tokens))
        result.parts = list(RESULT.iter_unpack(result.rows))
        assert len(result.parts) == len(requests)
        for request, part in zip(requests, result.parts, strict=True):
            mine, tokens = tokens[: part[4]], tokens[part[4] :]
            if request is not None:
                request.output += mine
                request.done = request.done or (part[5] if part[5] != DONE.NULL else 0)
        assert tokens == []
        return result

    def run(self, *requests: Request, chunk: int = 1 << 20, depth: int = 2) -> None:
        """All to their ends, `depth` steps in flight."""
        while self.in_flight or not all(request.done for request in requests):
            going = [request for request in requests if not request.done]
            if going and len(self.in_flight) < depth:
                self.submit(*((request, self.row(request, chunk)) for request in going))
            else:
                result = self.take()
                assert result.status == STATUS.OK, result.error


@pytest.fixture
def host(wire: Wire, executor: Target) -> Host:
    return Host(wire, executor)


def prompt(length: int, seed: int = 1) -> list[int]:
    return [600 + (seed * 7919 + i * 31) % 1400 for i in range(length)]


def alone(host: Host, ids: list[int], new: int, **fields: object) -> list[int]:
    host.reset()
    request = host.admit(ids, new, **fields)
    host.run(request, depth=1)
    return request.output


def test_it_says_what_it_can_hold(host: Host) -> None:
    hello = host.executor.hello
    assert (hello.service, hello.name) == ("executor", "executor-0-0")
    capacity = host.capacity
    assert (capacity.engine_epoch, capacity.rank) == (host.epoch, 0)
    for name in ("num_global_blocks", "num_window_blocks", "num_state_blocks", "num_slots"):
        assert getattr(capacity, name) > 0
    assert capacity.max_model_len > 256
    for progress in [m for m in host.executor.history if m.tag == "Progress"]:
        assert 0 <= progress.done <= progress.total
    again = host.load()
    assert (again.engine_epoch, again.num_slots) == (host.epoch, capacity.num_slots)


def test_a_request_runs_to_its_length_and_then_writes_nothing(host: Host) -> None:
    request = host.admit(prompt(20), 6)
    host.run(request, depth=2)
    assert (len(request.output), request.done) == (6, DONE.LENGTH)
    assert all(0 <= token < host.capacity.vocab_size for token in request.output)
    host.submit((request, host.row(request)))
    ((*_, count, reason, _, _),) = host.take().parts
    assert (count, reason) == (0, DONE.NULL)


def test_company_chunks_and_depth_change_no_token(host: Host) -> None:
    expected = [alone(host, prompt(20, seed), 8, seed=seed) for seed in range(3)]
    assert len({tuple(tokens) for tokens in expected}) == 3
    for chunk, depth in ((1 << 20, 1), (7, 2), (16, 3)):
        host.reset()
        requests = [host.admit(prompt(20, seed), 8, seed=seed) for seed in range(3)]
        host.run(*requests, chunk=chunk, depth=depth)
        assert [request.output for request in requests] == expected


def test_a_stop_id_ends_a_request(host: Host) -> None:
    whole = alone(host, prompt(12), 9)
    host.reset()
    stop = next(token for i, token in enumerate(whole) if i >= 2 and token not in whole[:i])
    request = host.admit(prompt(12), 9, stop_ids=struct.pack("<i", stop))
    host.run(request, depth=2)
    assert stop not in request.output[:-1]
    assert (request.done == DONE.EOS) == (request.output[-1] == stop)
    if request.done == DONE.EOS:  # an executor without a model may avoid stop ids
        assert request.output == whole[: whole.index(stop) + 1]


def test_a_wrong_row_fails_its_step_and_is_named(host: Host) -> None:
    host.reset()
    request, other = host.admit(prompt(10), 4), host.admit(prompt(10, 2), 4)
    host.submit((other, host.row(other)))
    assert host.take().status == STATUS.OK
    values = list(ROW.unpack(host.row(request)))
    values[3] += 50  # another generation
    host.submit((request, ROW.pack(*values)))
    result = host.take()
    assert result.status == STATUS.ERROR
    assert "row 0" in result.error
    assert result.parts[0][4] == 0
    host.run(other)
    assert len(other.output) == 4


def test_dummy_rows_and_empty_steps_are_answered(host: Host) -> None:
    host.reset()
    dummy = ROW.pack(0, 0, 0xFFFFFFFF, 0, MODE.DUMMY, SOURCE.HOST, 0, 0, 0, 0, 0, 1, 0)
    host.submit((None, dummy))
    host.submit()
    assert host.take().parts[0][5] == DONE.NULL
    last = host.take()
    assert (last.status, last.rows) == (STATUS.OK, b"")

    def mark() -> int:
        return [m.gpu_done for m in host.executor.history if hasattr(m, "gpu_done")][-1]

    host.wire.until(lambda: mark() == last.step_id, "the watermark")


def test_reset_abandons_the_epoch_before(host: Host) -> None:
    expected = alone(host, prompt(15), 5)
    host.reset()
    lost = host.admit(prompt(15, 3), 50)
    for _ in range(4):
        host.submit((lost, host.row(lost)))
    old = host.epoch
    host.reset()
    host.submit(epoch=old, skip=True)  # late: dropped
    again = host.admit(prompt(15), 5)
    host.wire.quiet(1.0)
    results = [m for m in host.executor.mail if m.tag == "StepResult"]
    assert {m.engine_epoch for m in results} <= {old}  # of steps that were done before
    assert host.step_id + 1 not in {m.step_id for m in results}
    host.executor.mail.clear()
    host.run(again)
    assert again.output == expected


def test_a_lost_link_is_dialled_again(host: Host, executor: Target) -> None:
    expected = alone(host, prompt(15), 5)
    first = host.executor.hello
    host.listener.close()
    host.listener = host.wire.listen(executor.dials[0], "scheduler", "scheduler-0")
    host.load()
    assert host.executor.hello.incarnation == first.incarnation
    request = host.admit(prompt(15), 5)
    host.run(request)
    assert request.output == expected


def test_garbage_changes_nothing(host: Host) -> None:
    expected = alone(host, prompt(15), 5)
    host.reset()
    for junk in (["Nonsense"], ["Load"], ["SubmitStep", 1], ["Reset", "x"], [], 5, {"a": 1}):
        host.executor.send(junk)  # type: ignore[arg-type]
    request = host.admit(prompt(15), 5)
    host.run(request)
    assert request.output == expected


@pytest.mark.parametrize("order", ["StoreBlocks", "LoadBlocks"])
def test_a_store_or_load_is_answered_once_also_where_no_kvstore_is(host: Host, order: str) -> None:
    """Until then its blocks are pinned. One of an epoch that is over is not answered."""
    kind = ENUMS["KvKind"].BLOCK
    moves = [
        make("KvMove", hash=os.urandom(16), kind=kind, blocks=[(POOL.GLOBAL, n)]) for n in range(3)
    ]
    for op_id, epoch in ((11, host.epoch - 1), (12, host.epoch)):
        given = {"op_id": op_id, "engine_epoch": epoch, "after_step": 0, "moves": moves}
        host.executor.send(make(order, **given))
    done = host.executor.expect("OpDone")
    assert (done.op_id, done.engine_epoch) == (12, host.epoch)
    assert done.status != ENUMS["KvStatus"].OK
    assert done.done == bytes(3)
    request = host.admit([7] * 5, 2)
    host.run(request)
    assert not host.executor.has("OpDone")


def test_grammars_ordered_ahead_are_answered_for_whatever_comes_of_them(host: Host) -> None:
    """Their requests wait meanwhile."""
    texts = ("a+", "(", "b")
    grammars = [make("Grammar", kind="regex", text=text) for text in texts]
    orders = [[5 + n, grammar] for n, grammar in enumerate(grammars)]
    host.executor.send(make("CompileGrammars", engine_epoch=host.epoch, orders=orders))
    answered: list[int] = []
    while len(answered) < len(orders):
        answer = host.executor.expect("GrammarsCompiled")
        assert (answer.engine_epoch, answer.rank) == (host.epoch, 0)
        answered += answer.orders
    assert sorted(answered) == [5, 6, 7]
