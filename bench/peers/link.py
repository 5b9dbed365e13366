"""A peer as a process: one JSON object a line to it, one back."""

import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from bench.peers.venvs import HERE, PeerError, recipe

ANSWER_S = 1800.0  # a peer that computes prefixes anew may take minutes for a token
LAST_WORDS = 1500  # of what it printed, for the error


class Peer:
    """A worker that has the model loaded. Ends with `close` or with this process."""

    def __init__(self, name: str, python: Path, model: Path, threads: int) -> None:
        """
        Raises:
            PeerError: it ended, or could not load the model.
        """
        self.name, self.remark = name, recipe(name).remark
        count = str(threads)
        environment = os.environ | dict.fromkeys(
            ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), count
        )
        self._log = tempfile.TemporaryFile(mode="w+", errors="replace")  # noqa: SIM115 until `close`
        self._process = subprocess.Popen(
            [str(python), str(HERE / recipe(name).worker)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name=f"peer-{name}", daemon=True).start()
        try:
            self._ask(op="load", model=str(model.resolve()), threads=threads)
        except PeerError:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def prefill(self, ids: Sequence[int]) -> float:
        """Seconds of one prompt, from nothing to the logits of its last token."""
        return self._ask(op="prefill", ids=[list(ids)])

    def begin(self, case: str, ids: Sequence[Sequence[int]]) -> None:
        """Rows that will decode, at the end of these contexts."""
        self._ask(op="begin", case=case, ids=[list(row) for row in ids])

    def step(self, case: str, ids: Sequence[int]) -> float:
        """Seconds of one token of every row, greedy choice included."""
        return self._ask(op="step", case=case, ids=list(ids))

    def end(self, case: str) -> None:
        """Forget the rows of a case."""
        self._ask(op="end", case=case)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._log):
            if stream is not None:
                stream.close()

    def _ask(self, **order: object) -> float:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
            line = self._answers.get(timeout=ANSWER_S)
        except (OSError, queue.Empty):
            line = ""
        if not line:
            raise PeerError(f"peer {self.name} gave no answer to {order['op']}:\n{self._words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerError(f"peer {self.name}, {order['op']}: {answer['error']}")
        return float(answer["seconds"])

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        for line in stdout:
            self._answers.put(line)
        self._answers.put("")

    def _words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-LAST_WORDS:]
