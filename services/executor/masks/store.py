"""Compiled grammars: made in threads, within a time, and kept."""

import contextlib
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from llguidance import LLMatcher

from deepmesh.grammars import GrammarError, compile_limits, llguidance_source
from deepmesh.wire.messages import Grammar
from services.executor.masks.vocabulary import MaskVocabulary

COMPILE_NICENESS = 10  # of a thread, on Linux


def _stand_back() -> None:
    """A burst of new grammars must not keep those from their next token that have theirs."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), COMPILE_NICENESS)


class CompiledGrammar:
    """A grammar that is being compiled, or has been."""

    def __init__(self, begin_ns: int) -> None:
        self.begin_ns, self.end_ns = begin_ns, 0
        self.matcher: LLMatcher | None = None  # at the start of an output; never consumes
        self.problem = ""
        self.is_ahead = False  # its first request is to come; the trace of that tells of it

    @property
    def is_done(self) -> bool:
        """Whether there is a matcher, or never will be."""
        return bool(self.end_ns)


class GrammarStore:
    """Grammars by hash, the least recently used forgotten first."""

    def __init__(
        self,
        vocabulary: MaskVocabulary,
        *,
        size: int,
        limit_s: float,
        threads: int,
        wake: Callable[[], None],
    ) -> None:
        """
        Args:
            size: how many compiled ones are kept.
            limit_s: after so long a grammar is given up.
            threads: that compile at the same time.
            wake: called from another thread when one is done.
        """
        self._vocabulary, self._size = vocabulary, size
        self._limit_ns = round(limit_s * 1e9)
        self._wake = wake
        self._kept: OrderedDict[tuple[bytes, str, str], CompiledGrammar] = OrderedDict()
        self._pending: list[CompiledGrammar] = []
        self._threads = ThreadPoolExecutor(
            threads, thread_name_prefix="compile", initializer=_stand_back
        )

    def get(self, grammar: Grammar) -> tuple[CompiledGrammar, bool]:
        """The grammar, and whether it was there already; ordered if not."""
        key = (grammar.hash, grammar.kind, grammar.text)
        if found := self._kept.get(key):
            self._kept.move_to_end(key)
            return found, True
        compiled = self._kept[key] = self.fresh(grammar)
        while len(self._kept) > self._size:
            self._kept.popitem(last=False)
        return compiled, False

    def fresh(self, grammar: Grammar) -> CompiledGrammar:
        """One that is ordered now, and that nobody gets by its hash."""
        compiled = CompiledGrammar(time.time_ns())
        self._pending.append(compiled)
        done = self._threads.submit(self._compile, grammar)
        done.add_done_callback(lambda done: self._finish(compiled, done))
        return compiled

    def drop(self, grammar: Grammar, worn: LLMatcher) -> None:
        """Nobody gets this matcher any more."""
        key = (grammar.hash, grammar.kind, grammar.text)
        found = self._kept.get(key)
        if found is not None and found.matcher is worn:
            del self._kept[key]

    def give_up_late(self) -> None:
        """What has been compiling for too long is a failure, whatever comes of it."""
        now_ns = time.time_ns()
        self._pending = [compiled for compiled in self._pending if not compiled.is_done]
        for compiled in self._pending:
            if self._is_late(compiled, now_ns):
                compiled.end_ns = now_ns

    def close(self) -> None:
        """Compile nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        """In a thread. Its first mask is made here, too: that is the slow one."""
        matcher = LLMatcher(
            self._vocabulary.tokenizer,
            llguidance_source(grammar),
            log_level=0,
            limits=compile_limits(),
        )
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        scratch = np.zeros(self._vocabulary.num_words, np.int32)
        matcher.unsafe_compute_mask_ptr(scratch.ctypes.data, scratch.nbytes)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return matcher

    def _finish(self, compiled: CompiledGrammar, done: "Future[LLMatcher]") -> None:
        if done.cancelled() or compiled.is_done:
            return
        error, now_ns = done.exception(), time.time_ns()
        if error is not None:
            compiled.problem = str(error) or type(error).__name__
        elif not self._is_late(compiled, now_ns):  # nobody may have looked meanwhile
            compiled.matcher = done.result()
        compiled.end_ns = now_ns
        self._wake()

    def _is_late(self, compiled: CompiledGrammar, now_ns: int) -> bool:
        """Whether its time is over; then it is its problem."""
        if now_ns - compiled.begin_ns <= self._limit_ns:
            return False
        limit_s = self._limit_ns / 1e9
        compiled.problem = f"it takes more than {limit_s:g} s to compile: simplify it"
        return True
