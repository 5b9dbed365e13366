"""Grammars that the mask worker compiles ahead of the steps that need them: the executor's side."""

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Sequence

from deepmesh.wire.messages import CompileGrammars, GrammarsCompiled
from services.executor.masks.protocol import Compile, Compiled, Frames, Message

END_S = 1.0  # a thread whose line is cut ends at once
Key = tuple[int, int]  # engine epoch, number of the order


class _Line:
    """Our end of one life's socket for orders."""

    def __init__(self, end: socket.socket) -> None:
        self.end, self.frames = end, Frames(end)


class CompileAhead:
    """Takes orders on the service's thread; a thread of each life hears what came of them.

    Answers are hints: an order counts as done, too, if there is no worker, or if it dies. Whoever
    waits for a grammar would gain nothing by waiting longer, and the next worker compiles it when
    its request is in a step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._wake: Callable[[], None] = lambda: None
        self._line: _Line | None = None
        self._open: set[Key] = set()
        self._done: list[Key] = []
        self._hearing: threading.Thread | None = None  # the keeper's

    # ------------------------------------------------------------ the service's thread

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when there is something to take."""
        with self._lock:
            self._wake = wake

    def order(self, message: CompileGrammars) -> None:
        """Have these compiled."""
        epoch = message.engine_epoch
        keys = [(epoch, number) for number, _ in message.orders]
        with self._lock:
            line = self._line
            if line is None:
                self._done += keys
                return
            self._open.update(keys)
        try:
            line.frames.send([Compile(epoch, number, each) for number, each in message.orders])
        except (OSError, ValueError):  # it takes nothing, or has gone
            self._hang_up(line)

    def take(self, rank: int) -> list[GrammarsCompiled]:
        """What is done since the last call, as this rank's answers."""
        with self._lock:
            done, self._done = self._done, []
        epochs = sorted({epoch for epoch, _ in done})
        return [
            GrammarsCompiled(epoch, rank, [number for of, number in done if of == epoch])
            for epoch in epochs
        ]

    # ------------------------------------------------------------ the keeper's thread

    def begin_life(self, end: socket.socket) -> None:
        """A worker lives whose socket for orders this is; owned from here on."""
        line = _Line(end)
        with self._lock:
            self._line = line
        self._hearing = threading.Thread(
            target=self._hear, args=(line,), name="grammars", daemon=True
        )
        self._hearing.start()

    def end_life(self) -> None:
        """The worker is gone."""
        line = self._line
        if line is not None:
            self._hang_up(line)
        if self._hearing is not None:
            self._hearing.join(END_S)

    # ------------------------------------------------------------ a thread for each life

    def _hear(self, line: _Line) -> None:
        try:
            while True:
                select.select([line.end], [], [])  # its timeout is meant for those that send
                self._note(line.frames.receive())
        except (EOFError, OSError, ValueError):
            pass
        finally:
            self._hang_up(line)
            line.end.close()

    def _note(self, messages: Sequence[Message]) -> None:
        keys = {(m.engine_epoch, m.order) for m in messages if isinstance(m, Compiled)}
        with self._lock:
            self._done += sorted(keys & self._open)
            self._open -= keys
            wake = self._wake
        wake()

    def _hang_up(self, line: _Line) -> None:
        """No answer comes over this line any more."""
        with contextlib.suppress(OSError):
            line.end.shutdown(socket.SHUT_RDWR)  # its thread sees that, and closes it
        with self._lock:
            if self._line is not line:
                return
            self._line = None
            self._done += sorted(self._open)
            self._open.clear()
            wake = self._wake
        wake()
