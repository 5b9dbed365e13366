"""The mask worker as a real process: kills, hangs, many grammars, and what stays behind."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from deepmesh.grammars import make_grammar
from deepmesh.wire.messages import Grammar
from deepmesh.wire.packed import pack_ids
from services.executor.masks.process import MaskProcess
from services.executor.masks.protocol import (
    ANSWER,
    TOKEN,
    Advance,
    Answers,
    Close,
    MaskState,
    Message,
    Open,
    Opened,
)
from tests.services.tokenizer_harness import EOS, MODEL, ids_of
from tests.tiny import VOCAB_SIZE

WAIT_S = 30.0
WORD = make_grammar("regex", "(ab)+")


def start(tmp_path: Path, *, compile_s: float = 5.0, num_slots: int = 80) -> MaskProcess:
    process = MaskProcess(
        "masks",
        MODEL,
        vocab_size=VOCAB_SIZE,
        num_slots=num_slots,
        cache_size=16,
        compile_s=compile_s,
        threads=1,
    )
    process.start()
    assert process.wait_ready(WAIT_S)
    return process


@pytest.fixture
def process(tmp_path: Path) -> Iterator[MaskProcess]:
    process = start(tmp_path)
    yield process
    process.close()


def open_(slot: int, serial: int, grammar: Grammar = WORD, output: str = "") -> Open:
    ids = ids_of(output) if output else []
    return Open(slot, serial, grammar, pack_ids(ids), 50 + len(ids), 0, pack_ids([EOS]))


def advance(slot: int, serial: int, position: int, token: int) -> Advance:
    return Advance(np.array([(slot, serial, position, token)], TOKEN).tobytes())


class Mail:
    """Everything that a worker has said."""

    def __init__(self, process: MaskProcess) -> None:
        self._process = process
        self.opened: dict[int, Opened] = {}
        self.states: dict[tuple[int, int], MaskState] = {}  # by serial and position

    def until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not what():
            left_s = deadline - time.monotonic()
            assert left_s > 0, (self.opened, self.states)
            for message in self._process.receive(min(left_s, 0.2)):
                self._take(message)

    def _take(self, message: Message) -> None:
        match message:
            case Opened():
                self.opened[message.serial] = message
            case Answers(rows=rows):
                for _, serial, position, state, _ in np.frombuffer(rows, ANSWER).tolist():
                    self.states[serial, position] = MaskState(state)
            case _:
                pass

    def state(self, serial: int, position: int) -> MaskState:
        self.until(lambda: (serial, position) in self.states)
        return self.states[serial, position]


def allowed(process: MaskProcess, slot: int) -> set[int]:
    bits = np.unpackbits(process.masks[slot].view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_masks_come_through_shared_memory(process: MaskProcess) -> None:
    mail = Mail(process)
    process.send([open_(3, 1)])
    assert mail.state(1, 50) is MaskState.MASK
    assert EOS not in allowed(process, 3)
    for position, token in enumerate(ids_of("ab"), 50):
        process.send([advance(3, 1, position, token)])
    assert mail.state(1, 50 + len(ids_of("ab"))) is MaskState.MASK
    assert EOS in allowed(process, 3)


def test_a_killed_worker_comes_back_and_replays(process: MaskProcess) -> None:
    mail = Mail(process)
    process.send([open_(3, 1)])
    mail.state(1, 50)
    old = process.life
    os.kill(process.pid, signal.SIGKILL)
    mail.until(lambda: process.life not in (0, old))
    process.send([open_(3, 2, output="abab")])
    position = 50 + len(ids_of("abab"))
    assert mail.state(2, position) is MaskState.MASK
    assert EOS in allowed(process, 3)


def test_a_worker_that_hangs_is_replaced(process: MaskProcess) -> None:
    mail = Mail(process)
    old = process.life
    os.kill(process.pid, signal.SIGSTOP)
    process.give_up("the test stopped it")
    mail.until(lambda: process.life not in (0, old))
    process.send([open_(0, 1)])
    assert mail.state(1, 50) is MaskState.MASK


def test_nothing_stays_behind(tmp_path: Path) -> None:
    def shared_files() -> set[str]:  # of masks: other tests have theirs meanwhile
        return {path.name for path in Path("/dev/shm").iterdir() if "masks" in path.name}

    before, files = shared_files(), len(os.listdir("/proc/self/fd"))
    process = start(tmp_path)
    pid = process.pid
    assert psutil.pid_exists(pid)
    process.close()
    assert not psutil.pid_exists(pid)
    assert process.life == 0
    assert not process.send([open_(0, 1)])
    assert shared_files() == before
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # the mapping itself


def test_a_grammar_that_cannot_be_compiled_says_why(process: MaskProcess) -> None:
    mail = Mail(process)
    bad = make_grammar("json_schema", '{"type": "object", "not": {}}')
    process.send([open_(0, 1, bad), open_(1, 2)])
    assert mail.state(1, 50) is MaskState.BROKEN
    assert "not" in mail.opened[1].problem
    assert mail.state(2, 50) is MaskState.MASK  # the next one is no worse for it


def test_a_grammar_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    process = start(tmp_path, compile_s=0.05)
    try:
        mail = Mail(process)
        properties = {f"k{n}": {"type": "string", "maxLength": 300 + n} for n in range(1500)}
        slow = make_grammar("json_schema", json.dumps({"type": "object", "properties": properties}))
        process.send([open_(0, 1, slow), open_(1, 2)])
        assert mail.state(1, 50) is MaskState.BROKEN
        assert "compile" in mail.opened[1].problem
        assert mail.state(2, 50) in (MaskState.MASK, MaskState.BROKEN)  # it waited behind it
    finally:
        process.close()


def test_equal_grammars_are_compiled_once(process: MaskProcess) -> None:
    mail = Mail(process)
    process.send([open_(0, 1)])
    mail.state(1, 50)
    process.send([open_(1, 2)])
    mail.state(2, 50)
    assert [mail.opened[serial].from_cache for serial in (1, 2)] == [False, True]
    process.send([advance(0, 1, 50, ids_of("ab")[0])])
    mail.state(1, 51)  # they do not share their state:
    assert mail.states[2, 50] is MaskState.MASK


def test_tokens_may_come_while_a_grammar_is_compiled(process: MaskProcess) -> None:
    mail = Mail(process)
    ids = ids_of("abab")
    process.send([open_(0, 1), *(advance(0, 1, 50 + i, t) for i, t in enumerate(ids))])
    assert mail.state(1, 50 + len(ids)) is MaskState.MASK
    assert EOS in allowed(process, 0)


def test_sixty_four_new_schemas_at_once(process: MaskProcess) -> None:
    mail = Mail(process)
    grammars = [
        make_grammar(
            "json_schema",
            f'{{"type": "object", "properties": {{"k{n}": {{"type": "string", "maxLength": 20}}}},'
            f'"required": ["k{n}"]}}',
        )
        for n in range(64)
    ]
    began = time.monotonic()
    process.send([open_(slot, 1 + slot, grammar) for slot, grammar in enumerate(grammars)])
    mail.until(lambda: len(mail.states) == 64)
    assert set(mail.states.values()) == {MaskState.MASK}
    assert time.monotonic() - began < 10  # 30 ms on an idle core


# The 16 letters before the end matter: nearly each letter of an output is a new state.
STATEFUL = make_grammar("regex", "(a|b)*a(a|b){16}c")
STATES = 50_000  # that an automaton may have


def say(slot: int, serial: int, position: int, text: str) -> Advance:
    """An output's next letters, together."""
    letters = {letter: ids_of(letter)[0] for letter in "ab"}
    rows = [(slot, serial, at, letters[letter]) for at, letter in enumerate(text, position)]
    return Advance(np.array(rows, TOKEN).tobytes())


def letters(num: int, seed: int) -> str:
    bits = np.random.default_rng(seed).integers(0, 2, num)
    return "".join("ab"[bit] for bit in bits)


def test_a_grammar_does_not_wear_out(process: MaskProcess) -> None:
    """All outputs of a grammar share an automaton that grows; each stands for itself all the same.

    The first outlives two automatons, and others that are open, too, have both of them worn.
    """
    mail = Mail(process)
    process.send([open_(0, 1, STATEFUL), open_(1, 2, STATEFUL)])
    said = 0
    for serial in range(3, 50):
        text = letters(4000, serial)
        process.send([open_(2, serial, STATEFUL), say(2, serial, 50, text)])
        if said < 800:
            process.send([say(slot, 1 + slot, 50 + said, text[:20]) for slot in (0, 1)])
            said += 20
            assert mail.state(1, 50 + said) is MaskState.MASK
            assert mail.state(2, 50 + said) is MaskState.MASK
        assert mail.state(serial, 50 + len(text)) is MaskState.MASK, f"output {serial}"
        assert allowed(process, 2) >= {ids_of("a")[0], ids_of("b")[0]}
        process.send([Close(np.array([serial], "<u4").tobytes())])
    assert len(mail.opened) == 49  # nobody hears of it


def test_an_output_that_alone_wants_too_many_states_fails_alone(process: MaskProcess) -> None:
    mail = Mail(process)
    process.send([open_(0, 1, STATEFUL), open_(1, 2, STATEFUL)])
    text = letters(STATES + 30_000, 7)
    process.send([say(0, 1, 50, text), say(1, 2, 50, text[:100])])
    assert mail.state(1, 50 + len(text)) is MaskState.BROKEN
    assert mail.state(2, 150) is MaskState.MASK
    process.send([say(1, 2, 150, "abab"), open_(2, 3, STATEFUL)])
    assert mail.state(2, 154) is MaskState.MASK
    assert mail.state(3, 50) is MaskState.MASK


def test_closed_constraints_are_forgotten(process: MaskProcess) -> None:
    mail = Mail(process)
    process.send([open_(0, 1)])
    mail.state(1, 50)
    process.send([Close(np.array([1], "<u4").tobytes()), advance(0, 1, 50, ids_of("ab")[0])])
    process.send([open_(0, 2)])
    assert mail.state(2, 50) is MaskState.MASK
    assert (1, 51) not in mail.states
