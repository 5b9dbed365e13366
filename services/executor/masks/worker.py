"""The mask worker's loop: tokens in, masks out. The one owner of grammars and their matchers."""

import contextlib
import logging
import os
import selectors
import socket
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.packed import unpack_ids
from services.executor.masks.constraint import Constraint
from services.executor.masks.protocol import (
    ANSWER,
    TAG,
    TOKEN,
    Advance,
    Answers,
    Close,
    Compile,
    Compiled,
    Drafts,
    Frames,
    MaskState,
    Message,
    Open,
    Opened,
    Ready,
)
from services.executor.masks.store import CompiledGrammar, GrammarStore
from services.executor.masks.vocabulary import MaskVocabulary

_log = logging.getLogger(__name__)
FLUSH_NS = 300_000  # answers that are ready do not wait longer for those behind them
LOOK_S = 0.25  # how often late compilations are looked for
MAX_RENEWALS = 2  # of one output: with others, then alone


class Worker:
    """Serves one executor until its end of the socket closes."""

    def __init__(
        self,
        end: socket.socket,
        orders: socket.socket,
        masks: NDArray[np.int32],
        vocabulary: MaskVocabulary,
        *,
        num_slots: int,
        cache_size: int,
        compile_s: float,
        threads: int,
    ) -> None:
        """
        Args:
            end: to the device stream: outputs, tokens and answers.
            orders: to the executor's service: grammars that no step needs yet.
            masks: [places * num_slots, num_words], the memory that the executor reads.
        """
        self._frames, self._end = Frames(end), end
        self._orders, self._orders_end = Frames(orders), orders
        self._rows = [list(masks[slot::num_slots]) for slot in range(num_slots)]  # by place
        self._vocabulary = vocabulary
        self._awake, self._waker = socket.socketpair()
        self._awake.setblocking(False)
        self._waker.setblocking(False)
        self._store = GrammarStore(
            vocabulary, size=cache_size, limit_s=compile_s, threads=threads, wake=self._wake
        )
        self._open: dict[int, Constraint] = {}  # by serial
        # tokens came meanwhile
        self._compiling: dict[int, tuple[Open, CompiledGrammar, list[int]]] = {}
        self._renewing: dict[int, CompiledGrammar] = {}  # by serial: what it goes on with
        self._ahead: list[tuple[Compile, CompiledGrammar]] = []  # orders that are not done
        self._due: deque[int] = deque()  # serials whose next mask is to be filled
        # serials whose drafts are to be walked, when nothing else is due: (position, drafts)
        self._walks: dict[int, tuple[int, list[int]]] = {}
        self._answers: list[tuple[int, int, int, int, int]] = []

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # awake already
            self._waker.send(b"\0")

    def run(self) -> None:
        """Until the executor is gone."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._end, selectors.EVENT_READ)
            selector.register(self._awake, selectors.EVENT_READ)
            selector.register(self._orders_end, selectors.EVENT_READ)
            try:
                self._frames.send([Ready(os.getpid())])
                while True:
                    # what is due is filled first; mail that is there goes before it
                    waits = self._compiling or self._renewing or self._ahead
                    timeout = 0 if self._due or self._walks else LOOK_S if waits else None
                    readable: set[object] = {key.fileobj for key, _ in selector.select(timeout)}
                    self._turn(readable)
                    if self._orders_end in readable and not self._take_orders():
                        selector.unregister(self._orders_end)
            except (EOFError, BrokenPipeError):
                _log.info("the executor is gone")
            finally:
                self._store.close()

    def _turn(self, readable: set[object]) -> None:
        if self._awake in readable:
            self._awake.recv(4096)
        if self._end in readable:
            for message in self._frames.receive():
                self._on_message(message)
        if self._compiling or self._renewing or self._ahead:
            self._take_compiled()
        self._fill_some()

    def _take_orders(self) -> bool:
        """Begin to compile what is ordered ahead; whether there may be more."""
        try:
            messages = self._orders.receive()
        except (EOFError, OSError):  # it has been given up there: no step misses it
            self._ahead.clear()
            return False
        for message in messages:
            if isinstance(message, Compile):
                compiled, is_known = self._store.get(message.grammar)
                compiled.is_ahead |= not is_known
                self._ahead.append((message, compiled))
        self._answer_orders()
        return True

    def _answer_orders(self) -> None:
        done = [Compiled(o.engine_epoch, o.order) for o, made in self._ahead if made.is_done]
        if not done:
            return
        self._ahead = [(order, made) for order, made in self._ahead if not made.is_done]
        with contextlib.suppress(OSError):  # nobody is there to hear it
            self._orders.send(done)

    # ------------------------------------------------------------ mail

    def _on_message(self, message: Message) -> None:
        match message:
            case Open():
                self._on_open(message)
            case Advance(tokens=tokens, is_urgent=is_urgent):
                rows = np.frombuffer(tokens, TOKEN).tolist()
                for _, serial, position, token in rows:
                    self._on_token(serial, position, token)
                for serial in dict.fromkeys(serial for _, serial, _, _ in rows):
                    if is_urgent:
                        self._fill(serial)
                    else:
                        self._due.append(serial)
                self._send_answers()
            case Drafts(tags=data, ids=ids):
                tags = np.frombuffer(data, TAG).tolist()
                drafts = unpack_ids(ids).reshape(len(tags), -1).tolist()
                for (_, serial, position), own in zip(tags, drafts, strict=True):
                    self._walks[serial] = (position, own)
            case Close(serials=serials):
                for serial in np.frombuffer(serials, "<u4").tolist():
                    self._open.pop(serial, None)
                    self._compiling.pop(serial, None)
                    self._renewing.pop(serial, None)
            case Ready() | Answers() | Opened() | Compile() | Compiled():
                raise AssertionError(f"a {type(message).__name__} is not for a worker")

    def _on_open(self, order: Open) -> None:
        compiled, is_known = self._store.get(order.grammar)
        if compiled.is_done:
            is_known, compiled.is_ahead = is_known and not compiled.is_ahead, False
            self._begin(order, compiled, [], from_cache=is_known)
        else:
            self._compiling[order.serial] = (order, compiled, [])

    def _on_token(self, serial: int, position: int, token: int) -> None:
        if waiting := self._compiling.get(serial):
            waiting[2].append(token)
        elif constraint := self._open.get(serial):
            assert position == constraint.position, (
                f"the token at {position} came when {constraint.position} was expected"
            )
            constraint.consume(token)

    # ------------------------------------------------------------ grammars

    def _take_compiled(self) -> None:
        self._store.give_up_late()
        self._answer_orders()
        done = [serial for serial, (_, compiled, _) in self._compiling.items() if compiled.is_done]
        for serial in done:
            self._begin(*self._compiling.pop(serial), from_cache=False)
        for serial in [serial for serial, made in self._renewing.items() if made.is_done]:
            self._renewed(serial, self._renewing.pop(serial))

    def _begin(
        self, order: Open, compiled: CompiledGrammar, tokens: list[int], *, from_cache: bool
    ) -> None:
        now_ns = time.time_ns()
        begin_ns, end_ns = (now_ns, now_ns) if from_cache else (compiled.begin_ns, compiled.end_ns)
        self._frames.send(
            [Opened(order.serial, begin_ns, end_ns, from_cache, compiled.problem[:1000])]
        )
        if compiled.matcher is None:
            self._answer(order.slot, order.serial, order.position, MaskState.BROKEN)
            return
        constraint = Constraint(order, compiled.matcher, self._vocabulary)
        for token in tokens:
            constraint.consume(token)
        self._open[order.serial] = constraint
        self._due.append(order.serial)

    def _renew(self, constraint: Constraint) -> bool:
        """What many outputs have done to an automaton is nothing that one may fail for: it gets a
        new one, and the last time one of its own. Whether one is to come."""
        if constraint.renewals == MAX_RENEWALS:
            return False
        constraint.renewals += 1
        grammar, is_last = constraint.grammar, constraint.renewals == MAX_RENEWALS
        _log.info("a grammar's automaton is full: %s", constraint.problem[:100])
        self._store.drop(grammar, constraint.base)
        made = self._store.fresh(grammar) if is_last else self._store.get(grammar)[0]
        self._renewing[constraint.serial] = made
        if made.is_done:
            self._wake()
        return True

    def _renewed(self, serial: int, compiled: CompiledGrammar) -> None:
        constraint = self._open[serial]
        if compiled.matcher is None:
            _log.warning("a grammar could not be compiled again: %s", compiled.problem[:200])
            at = (constraint.slot, serial, constraint.position)
            self._answer(*at, MaskState.BROKEN)
            return
        constraint.renew(compiled.matcher)
        self._due.append(serial)

    # ------------------------------------------------------------ masks

    def _fill_some(self) -> None:
        """Fill what is due for a moment, and send what came of it; drafts come behind."""
        until_ns = time.monotonic_ns() + FLUSH_NS
        while self._due or self._walks:
            if self._due:
                self._fill(self._due.popleft())
            else:
                self._walk(serial := next(iter(self._walks)), *self._walks.pop(serial))
            if time.monotonic_ns() >= until_ns:
                break
        self._send_answers()

    def _fill(self, serial: int) -> None:
        constraint = self._open.get(serial)
        if constraint is not None and serial not in self._renewing:
            state = constraint.fill(self._rows[constraint.slot][0])
            if state is MaskState.BROKEN and constraint.is_worn and self._renew(constraint):
                return
            self._answer(constraint.slot, constraint.serial, constraint.position, state)

    def _walk(self, serial: int, position: int, drafts: list[int]) -> None:
        """Of a constraint that has gone on meanwhile nobody waits for it."""
        constraint = self._open.get(serial)
        if constraint is None or constraint.position != position or serial in self._renewing:
            return
        rows = self._rows[constraint.slot]
        num = constraint.walk(drafts[: len(rows) - 1], rows)
        self._answer(constraint.slot, serial, position, constraint.state, num)

    def _send_answers(self) -> None:
        if self._answers:
            rows, self._answers = np.array(self._answers, ANSWER), []
            self._frames.send([Answers(rows.tobytes())])

    def _answer(
        self, slot: int, serial: int, position: int, state: MaskState, num: int = 0
    ) -> None:
        self._answers.append((slot, serial, position, state, num))
