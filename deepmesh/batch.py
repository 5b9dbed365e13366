"""Offline batches in OpenAI's format: lines of requests in, lines of answers out.

A batch may be killed at any moment and started again: what stands in the output is not asked
again, a line that was not written to its end is cut off, and every input line gets exactly one.
What failed for a reason that may pass (no answer, a busy or broken mesh, a wrong API key) is taken
out of the output by the next run and asked again; a request that was refused as wrong stays so.
"""

import asyncio
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec

from deepmesh.async_client import RETRIED, AsyncClient
from deepmesh.client_errors import ClientError
from deepmesh.errors import UserError

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
Json = dict[str, object]
_HEAD = b'{"id":"batch_req_'  # what a line of an output begins with


class BatchError(UserError):
    """The batch cannot be run; the text names the file and the line."""


class Line(msgspec.Struct):
    """One request."""

    custom_id: str
    url: str
    body: Json
    method: str = "POST"


class _Response(msgspec.Struct):
    status_code: int


class _Done(msgspec.Struct):
    """A line of an output, as far as the next run must know it."""

    custom_id: str
    response: _Response | None = None

    @property
    def status(self) -> int:
        """Of HTTP; 0 without an answer."""
        return self.response.status_code if self.response else 0


class Totals(msgspec.Struct):
    """How a batch went."""

    lines: int = 0
    resumed: int = 0  # answered by an earlier run
    succeeded: int = 0
    failed: int = 0  # refused (by an earlier run, too), or without an answer; their lines say why

    @property
    def done(self) -> int:
        """Lines that have their answer."""
        return self.resumed + self.succeeded + self.failed


class Output:
    """The file of answers; one process at a time."""

    def __init__(self, path: Path) -> None:
        """Open or create it, cut off a last line without its end, take out what may pass.

        Raises:
            BatchError: another run writes it, it cannot be opened, or it is not of a batch.
        """
        self._path = path.resolve()  # a link stays one when the file is replaced
        self.answered: set[str] = set()  # ids
        self.refused: set[str] = set()  # ids of requests that would be refused again
        self._fd = self._open(self._path, os.O_CREAT)
        try:
            if self._read():
                self._take_out_what_may_pass()
        except OSError as error:
            os.close(self._fd)
            raise BatchError(f"{path}: {error.strerror}") from error
        except BatchError:
            os.close(self._fd)
            raise

    def write(self, line: Json) -> None:
        """Append an answer, whole: a kill leaves it there or not there."""
        data = memoryview(msgspec.json.encode(line) + b"\n")
        while data:  # a full disk raises; the rest of a short write follows
            data = data[os.write(self._fd, data) :]

    def close(self) -> None:
        """Everything is on the disk."""
        os.fsync(self._fd)
        os.close(self._fd)

    @staticmethod
    def _open(path: Path, flags: int) -> int:
        """A descriptor that appends and holds the lock of the file at `path`."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | flags, 0o644)
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fd), path.stat()):
                raise BlockingIOError  # another run replaced it in between
        except OSError as error:
            os.close(fd)
            raise BatchError(f"{path}: another batch writes it") from error
        return fd

    def _read(self) -> bool:
        """Note what is done; whether there are lines to take out."""
        end, stale = 0, False
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if not line.startswith(_HEAD[: len(line)]):
                        self._refuse(number, "it ends in something else")
                    break
                end += len(line)
                try:
                    done = msgspec.json.decode(line, type=_Done)
                except msgspec.DecodeError as error:
                    self._refuse(number, str(error))
                if done.status == 200:
                    self.answered.add(done.custom_id)
                elif _may_pass(done.status):
                    stale = True
                else:
                    self.refused.add(done.custom_id)
        os.ftruncate(self._fd, end)
        return stale

    def _take_out_what_may_pass(self) -> None:
        """Replace the file by one without such lines, at once: a kill leaves either of them."""
        beside = self._path.with_name(f".{self._path.name}.new")
        fd = self._open(beside, os.O_CREAT)
        try:
            os.ftruncate(fd, 0)  # of a run that was killed here
            os.fchmod(fd, os.fstat(self._fd).st_mode & 0o777)
            with self._path.open("rb") as file, os.fdopen(fd, "wb", closefd=False) as kept:
                for line in file:
                    if not _may_pass(msgspec.json.decode(line, type=_Done).status):
                        kept.write(line)
            os.fsync(fd)
            beside.replace(self._path)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd = fd

    def _refuse(self, number: int, why: str) -> NoReturn:
        raise BatchError(f"{self._path}:{number}: no line of a batch: {why}")


def read_lines(path: Path) -> Iterator[Line]:
    """The requests of a batch.

    Raises:
        BatchError: a line is wrong; names it.
    """
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield _line(raw, f"{path}:{number}")
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error


def check_lines(path: Path) -> int:
    """Look at all lines before the first request; returns how many there are.

    Raises:
        BatchError: a line is wrong, or has the id of another one.
    """
    seen: set[str] = set()
    for line in read_lines(path):
        if line.custom_id in seen:
            raise BatchError(f"{path}: custom_id {line.custom_id!r} is there twice")
        seen.add(line.custom_id)
    return len(seen)


async def run_batch(
    source: Path,
    output: Output,
    client: AsyncClient,
    *,
    concurrency: int,
    on_progress: Callable[[Totals], None] = lambda totals: None,
) -> Totals:
    """Answer every line that has no answer yet; `source` has been checked."""
    totals = Totals(lines=check_lines(source), resumed=0)
    room = asyncio.Semaphore(concurrency)

    async def answer(line: Line) -> None:
        try:
            written, status = await _ask(client, line)
            output.write(written)
            good = status == 200
            totals.succeeded += good
            totals.failed += not good
            on_progress(totals)
        finally:
            room.release()

    async with asyncio.TaskGroup() as tasks:
        for line in read_lines(source):
            if line.custom_id in output.answered or line.custom_id in output.refused:
                is_answered = line.custom_id in output.answered
                totals.resumed += is_answered
                totals.failed += not is_answered
                on_progress(totals)
                continue
            await room.acquire()  # so that a large file is not read into memory
            tasks.create_task(answer(line))
    return totals


async def _ask(client: AsyncClient, line: Line) -> tuple[Json, int]:
    """The line to write, and the HTTP status; 0 without an answer."""
    written: Json = {
        "id": f"batch_req_{os.urandom(12).hex()}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    try:
        response = await client.post(line.url, msgspec.json.encode(line.body))
    except ClientError as error:
        return {**written, "error": {"code": "no_answer", "message": str(error)}}, 0
    try:
        body: object = msgspec.json.decode(response.content)
    except msgspec.DecodeError:
        body = response.text
    request_id = response.headers.get("x-request-id", "")
    answer = {"status_code": response.status_code, "request_id": request_id, "body": body}
    return {**written, "response": answer}, response.status_code


def _may_pass(status: int) -> bool:
    """Whether the same request may be answered another time: the fault is not in itself."""
    return status in (0, 401, 403, *RETRIED) or status >= 500


def _line(raw: bytes, where: str) -> Line:
    try:
        line = msgspec.json.decode(raw, type=Line)
    except msgspec.DecodeError as error:
        raise BatchError(f"{where}: {error}") from error
    if line.method != "POST" or line.url not in PATHS:
        raise BatchError(f"{where}: url must be POST to one of {', '.join(PATHS)}")
    if line.body.get("stream"):
        raise BatchError(f"{where}: body.stream: a batch does not stream")
    return line
