"""Judges grammars of clients in a child process.

What compiles them is native code, which a grammar can make recurse until its stack is used up: that
ends a process, whatever it was doing. Here it ends a child that does nothing else. The child also
bounds the time and memory that a grammar may take, and gives it half the stack that it has later,
so that what is passed here does not end a mask worker.
"""

import contextlib
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from typing import IO

import msgspec

from deepmesh.grammars import GrammarError, known_problem, problem_of, remember
from deepmesh.wire.messages import Grammar

CPU_S = 1.0  # that a grammar may take
STACK_BYTES = 4 << 20  # a thread elsewhere has 8 MiB
MEMORY_BYTES = 4 << 30
WAIT_S = 20.0  # for an answer, on a machine that has no time for the child
_LENGTH = struct.Struct("<I")
_mine = threading.local()  # a child of each thread: nobody waits for another one's grammar


class _Child:
    """One process that judges one grammar after the other."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "deepmesh.grammar_judge"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def __del__(self) -> None:
        """Its thread has ended."""
        self.end()

    def ask(self, question: bytes) -> str:
        """The problem; empty if there is none.

        Raises:
            GrammarError: no answer came, which the text explains; the child is gone.
        """
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None
        assert pipe_out is not None
        try:
            pipe_in.write(_LENGTH.pack(len(question)) + question)
            pipe_in.flush()
            if select.select([pipe_out], [], [], WAIT_S)[0] and (answer := _read(pipe_out)):
                return msgspec.msgpack.decode(answer, type=str)
        except BrokenPipeError:
            pass
        raise GrammarError(_cause(self.end()))

    def end(self) -> int:
        """Ends it; gives its status."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # at the end of its input it ends
            return self._process.wait(0.2)
        self._process.kill()
        return self._process.wait()


def judge(grammar: Grammar) -> str:
    """Why a grammar cannot be compiled; empty if it can. Safe from any thread.

    Verdicts are kept: clients send the same grammars again and again.
    """
    known = known_problem(grammar)
    if known is not None:
        return known
    question = (grammar.kind, grammar.text.encode("utf-8", "surrogatepass"))
    child: _Child = getattr(_mine, "child", None) or _Child()
    _mine.child = child
    try:
        problem = child.ask(msgspec.msgpack.encode(question))
    except GrammarError as error:
        _mine.child = _Child()  # starts while nobody waits for it
        problem = str(error)
    remember(grammar, problem)
    return problem


def start() -> None:
    """Have a child of this thread ready, so that no client waits for its start."""
    judge(Grammar("regex", "a", b"", b"start of a judge"))


def _cause(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"it takes more than {CPU_S:g} s to compile: simplify it"
    if status in (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS):
        return "it overruns the grammar engine: nest less, and use no number of 19 digits"
    return "the grammar engine gave no answer"


def _read(pipe: IO[bytes]) -> bytes:
    """One message; empty at the end."""
    head = pipe.read(_LENGTH.size)
    return pipe.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""


def _serve() -> None:
    """In the child: until nobody can ask any more."""
    decoder = msgspec.msgpack.Decoder(tuple[str, bytes])
    while question := _read(sys.stdin.buffer):
        kind, text = decoder.decode(question)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)  # the kernel ends us then, wherever we are
        problem = problem_of(Grammar(kind, text.decode("utf-8", "surrogatepass")))
        signal.setitimer(signal.ITIMER_PROF, 0)
        answer = msgspec.msgpack.encode(problem.encode("utf-8", "replace").decode())
        sys.stdout.buffer.write(_LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()


def main() -> None:
    """The child."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's: our parent ends us
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it would hold what clients sent
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    threading.stack_size(STACK_BYTES)
    server = threading.Thread(target=_serve)
    server.start()
    server.join()


if __name__ == "__main__":
    main()
