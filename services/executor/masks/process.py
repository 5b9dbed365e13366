"""The mask worker as its executor sees it: a child process that is started again when it ends."""

import contextlib
import logging
import mmap
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from services.executor.masks.ahead import CompileAhead
from services.executor.masks.protocol import Frames, Message, Ready
from services.executor.masks.vocabulary import BITS, Words

_log = logging.getLogger(__name__)
BACKOFF_S, MAX_BACKOFF_S = 0.05, 5.0  # doubles with each early end
STEADY_S = 10.0
SEND_S = 1.0  # a worker that takes nothing for so long hangs
ORDER_S = 0.2  # what it would compile ahead is worth less waiting: tokens pass there, too
UNUSABLE = 2  # exit status: no restart helps
ROOT = Path(__file__).resolve().parents[3]


class _Life:
    """One process and our end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], end: socket.socket, number: int) -> None:
        self.process, self.end, self.number = process, end, number
        self.frames = Frames(end)


class MaskProcess:
    """Owns the child, the socket to it, and the memory that both map.

    A thread starts it, waits for its end and starts it again. All but `start`, `wait_ready` and
    `close` belongs to the device stream's thread. Neither side leaves anything behind when it is
    killed: the memory has no name, and a worker ends with its socket.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        *,
        vocab_size: int,
        num_slots: int,
        cache_size: int,
        compile_s: float,
        threads: int,
        log_level: str = "info",
        draft_len: int = 0,
        ahead: CompileAhead | None = None,
    ) -> None:
        """
        Args:
            draft_len: drafts of a row, which masks are made behind, too.
            ahead: is told of each life, and orders of it what no step needs yet.
        """
        words, rows = -(-vocab_size // BITS), (1 + draft_len) * num_slots
        self._memory_fd = os.memfd_create(f"deepmesh-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self._memory_fd, 4 * rows * words)
        self._memory = mmap.mmap(self._memory_fd, 4 * rows * words)
        self.masks: Words = np.frombuffer(self._memory, np.int32).reshape(rows, words)
        options = {
            "--name": name,
            "--log-level": log_level,
            "--model": model,
            "--vocab-size": vocab_size,
            "--slots": num_slots,
            "--places": 1 + draft_len,
            "--cache-size": cache_size,
            "--compile-s": compile_s,
            "--threads": threads,
        }
        self._argv = [sys.executable, "-m", "services.executor.masks"]
        self._argv += [str(part) for option in options.items() for part in option]
        self._name = name
        self._ahead = ahead or CompileAhead()
        self._changed = threading.Condition()  # guards what follows
        self._life: _Life | None = None
        self._is_ready = False
        self._closing = False
        self._is_over = False  # no further life comes
        self._keeper = threading.Thread(target=self._keep, name="mask-worker", daemon=True)

    # ------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the child, and look after it from now on."""
        self._keeper.start()

    def wait_ready(self, timeout_s: float) -> bool:
        """Whether the first life has loaded its vocabulary."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            with self._changed:
                self._changed.wait_for(lambda: self._life is not None or self._is_over, left_s)
                if self._is_over:
                    return False
            for message in self.receive(min(left_s, 0.2)):
                if isinstance(message, Ready):
                    return True
        return False

    def close(self) -> None:
        """End the child and give its memory back."""
        with self._changed:
            self._closing = True
            life = self._life
            self._changed.notify_all()
        if life is not None:
            self._hang_up(life)
        if self._keeper.is_alive():
            self._keeper.join()
        with self._changed:
            fd, self._memory_fd = self._memory_fd, -1
        if fd >= 0:
            os.close(fd)  # the mapping stays for a step that still runs

    @property
    def pid(self) -> int:
        """0 between two lives."""
        life = self._life
        return life.process.pid if life is not None else 0

    # ------------------------------------------------------------ the device stream's thread

    @property
    def life(self) -> int:
        """Number of the life that can be talked to; 0: none. Another one has forgotten all."""
        life = self._life
        return life.number if life is not None else 0

    def send(self, messages: Sequence[Message]) -> bool:
        """False if the child is gone, or hangs."""
        life = self._life
        if life is None:
            return False
        try:
            life.frames.send(messages)
        except OSError as error:
            self.give_up(f"it takes no messages: {error}", life)
            return False
        return True

    def receive(self, timeout_s: float) -> list[Message]:
        """What it has said; empty after `timeout_s`, or if it is gone."""
        life = self._life
        if life is None:
            return []
        try:
            readable, _, _ = select.select([life.end], [], [], max(0.0, timeout_s))
            return life.frames.receive() if readable else []
        except (EOFError, OSError, ValueError):  # its keeper may have closed the socket already
            self.give_up("", life)
            return []

    def give_up(self, reason: str, life: _Life | None = None) -> None:
        """This life is of no use any more; the next one comes by itself."""
        life = life or self._life
        if life is None:
            return
        if reason:
            _log.error("the mask worker, pid %d: %s; killed", life.process.pid, reason)
        with contextlib.suppress(ProcessLookupError):
            life.process.kill()
        with self._changed:
            if self._life is life:
                self._life = None

    # ------------------------------------------------------------ the keeper's thread

    def _keep(self) -> None:
        number, backoff_s = 0, BACKOFF_S
        while not self._closing:
            number += 1
            began = time.monotonic()
            life = self._begin(number)
            with self._changed:
                self._life = None if self._closing else life
                self._changed.notify_all()
            if self._closing:
                self._hang_up(life)
            status = life.process.wait()
            with self._changed:
                if self._life is life:
                    self._life = None
            life.end.close()
            self._ahead.end_life()
            if self._closing or status == UNUSABLE:
                break
            is_steady = time.monotonic() - began >= STEADY_S
            backoff_s = BACKOFF_S if is_steady else min(2 * backoff_s, MAX_BACKOFF_S)
            _log.warning(
                "the mask worker ended with status %d; it starts again in %.2f s", status, backoff_s
            )
            with self._changed:
                self._changed.wait_for(lambda: self._closing, backoff_s)
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _begin(self, number: int) -> _Life:
        ours, theirs = socket.socketpair()
        orders, their_orders = socket.socketpair()
        with theirs, their_orders:
            passed = (theirs.fileno(), their_orders.fileno(), self._memory_fd)
            options = zip(("--socket", "--orders", "--memory"), map(str, passed), strict=True)
            descriptors = [part for option in options for part in option]
            process = subprocess.Popen(
                [*self._argv, *descriptors],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,  # not the user's: a folder called "services" may lie there
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=passed,
            )
        ours.settimeout(SEND_S)
        orders.settimeout(ORDER_S)
        self._ahead.begin_life(orders)
        return _Life(process, ours, number)

    def _hang_up(self, life: _Life) -> None:
        """It ends when it sees that, or is killed."""
        with contextlib.suppress(OSError):
            life.end.shutdown(socket.SHUT_RDWR)
        try:
            life.process.wait(SEND_S)
        except subprocess.TimeoutExpired:
            life.process.kill()
