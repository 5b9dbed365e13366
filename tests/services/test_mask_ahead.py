"""Grammars that a real worker compiles ahead of the steps that need them."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from deepmesh.grammars import make_grammar
from deepmesh.wire.messages import CompileGrammars, Grammar, GrammarsCompiled
from services.executor.masks.ahead import CompileAhead
from services.executor.masks.process import MaskProcess
from services.executor.masks.protocol import MaskState
from tests.services.test_mask_process import WAIT_S, Mail, open_
from tests.services.tokenizer_harness import MODEL
from tests.tiny import VOCAB_SIZE

BROKEN = make_grammar("json_schema", '{"type": "object", "not": {}}')


class Rig:
    """A worker, orders to it, and every answer so far."""

    def __init__(self) -> None:
        self.ahead, self.answers = CompileAhead(), list[GrammarsCompiled]()
        self._woken = threading.Event()
        self.ahead.listen(self._woken.set)
        self.process = MaskProcess(
            "masks",
            MODEL,
            vocab_size=VOCAB_SIZE,
            num_slots=8,
            cache_size=16,
            compile_s=5.0,
            threads=1,
            ahead=self.ahead,
        )

    def start(self) -> None:
        self.process.start()
        assert self.process.wait_ready(WAIT_S)

    def order(self, *numbers: int, epoch: int = 1, grammar: Grammar | None = None) -> None:
        grammars = [(n, grammar or make_grammar("regex", f"a{{{n}}}")) for n in numbers]
        self.ahead.order(CompileGrammars(epoch, grammars))

    def answered(self, count: int) -> list[int]:
        """Numbers of the first `count` orders that were answered."""
        while True:
            self._woken.clear()
            self.answers += self.ahead.take(rank=3)
            found = [number for answer in self.answers for number in answer.orders]
            if len(found) >= count:
                return found
            assert self._woken.wait(WAIT_S), found


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.process.close()


def test_what_was_ordered_is_there_when_its_request_comes(rig: Rig) -> None:
    rig.start()
    rig.order(4, 5, epoch=7)
    assert rig.answered(2) == [4, 5]
    assert {(answer.engine_epoch, answer.rank) for answer in rig.answers} == {(7, 3)}
    mail, grammar = Mail(rig.process), make_grammar("regex", "a{5}")
    sent_ns = time.time_ns()
    rig.process.send([open_(0, 1, grammar), open_(1, 2, grammar)])
    assert (mail.state(1, 50), mail.state(2, 50)) == (MaskState.MASK, MaskState.MASK)
    first, second = mail.opened[1], mail.opened[2]
    assert first.begin_ns < first.end_ns < sent_ns  # its trace tells how long it took
    assert (first.from_cache, second.from_cache) == (False, True)


def test_a_grammar_that_cannot_be_compiled_is_answered_for(rig: Rig) -> None:
    """Its request learns why when it is in a step."""
    rig.start()
    rig.order(1, grammar=BROKEN)
    assert rig.answered(1) == [1]


def test_orders_that_come_before_the_worker_has_loaded_wait_for_it(rig: Rig) -> None:
    rig.process.start()
    rig.order(1)
    assert rig.answered(1) == [1]


def test_without_a_worker_nobody_waits(rig: Rig) -> None:
    rig.order(1, 2)
    assert rig.answered(2) == [1, 2]


def test_a_worker_that_is_killed_leaves_no_order_open(rig: Rig) -> None:
    rig.start()
    pid = rig.process.pid
    os.kill(pid, signal.SIGSTOP)
    rig.order(1, 2)
    assert rig.ahead.take(rank=3) == []
    os.kill(pid, signal.SIGKILL)
    assert sorted(rig.answered(2)) == [1, 2]
    rig.order(3)  # of nobody, or of the next one
    assert rig.answered(3)[-1] == 3


def test_orders_that_a_hung_worker_does_not_take_are_given_up(rig: Rig) -> None:
    """And the steps of others go on by their own socket."""
    rig.start()
    os.kill(rig.process.pid, signal.SIGSTOP)
    long = make_grammar("regex", "a" * 400_000)
    rig.order(1, 2, 3, grammar=long)
    assert sorted(rig.answered(3)) == [1, 2, 3]
    os.kill(rig.process.pid, signal.SIGCONT)
    mail = Mail(rig.process)
    rig.process.send([open_(0, 1)])
    assert mail.state(1, 50) is MaskState.MASK
    rig.order(4)
    assert rig.answered(4)[-1] == 4
