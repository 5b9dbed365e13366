"""What goes to the tokenizers: tokens by absolute position, one terminal message per request."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Failed, Finished, FinishReason, Generate, TokenBatch, TokenRow

from .events import Action, Note, Outgoing, RequestEnded, Send
from .group import group_step_of
from .readers import Readers
from .request import Request
from .token_rows import encode_rows, join_rows

Terminal = Finished | Failed


class Outbox:
    """Collects the actions of one event. Token rows of a tokenizer go out as one batch."""

    def __init__(self, *, encodes_rows: bool = False) -> None:
        """`encodes_rows`: plain rows leave in the form of the wire; nobody can read them here."""
        self.actions: list[Action] = []
        self.fingerprint = ""  # of the engine, once there is one
        self._rows: dict[str, list[TokenRow]] = {}
        self._encodes_rows = encodes_rows
        self._encoded: dict[str, tuple[int, bytes]] = {}  # number of rows, and they
        self.readers = Readers()

    def send(self, peer: str, message: Outgoing) -> None:
        """One message, behind everything collected before it; none where nobody reads (what is
        computed for another group has no client)."""
        if peer:
            self.actions.append(Send(peer, message))

    def note(self, level: str, text: str, **fields: str | int | float) -> None:
        """A line for the log."""
        self.actions.append(Note(level, text, fields))

    def add_row(self, peer: str, row: TokenRow) -> None:
        """Tokens of one request; they leave with the batch of their tokenizer."""
        rows = self._rows.get(peer)
        if rows is None:
            self._rows[peer] = [row]
        else:
            rows.append(row)

    def add_tokens(
        self,
        peer: str,
        rids: NDArray[np.void],
        positions: NDArray[np.int64],
        ids: NDArray[np.int32],
    ) -> None:
        """One token each of many requests of a tokenizer, before any other rows of the step."""
        rows = self._rows.setdefault(peer, [])
        if self._encodes_rows:
            self._encoded[peer] = (len(ids), encode_rows(rids, positions, ids))
            return
        as_bytes: list[bytes] = rids.tolist()
        words: list[bytes] = ids.astype("<i4").view("V4").tolist()
        rows += map(TokenRow, as_bytes, positions.tolist(), words)

    def flush_rows(self, step_id: int, now: int) -> None:
        """Close the batches of this step."""
        for peer, rows in self._rows.items():
            if peer in self._encoded:
                rows = join_rows(*self._encoded.pop(peer), rows)
            if not peer:
                continue
            self.readers.sent(peer, group_step_of(step_id))
            self.actions.append(Send(peer, TokenBatch(group_step_of(step_id), now, rows)))
        self._rows = {}

    def replay(
        self,
        request: Request,
        ids: NDArray[np.int32],
        from_pos: int,
        now: int,
    ) -> None:
        """Send the confirmed output tokens from `from_pos` on again, with all logprobs known."""
        output = ids[request.prompt_len + from_pos :]
        if len(output) == 0:
            return
        end = from_pos + len(output)
        edges = [from_pos, end]
        if request.logprobs and from_pos < request.logprobs_from < end:
            edges.insert(1, request.logprobs_from)  # a predecessor sampled what lies below
        data, rows = output.astype("<i4").tobytes(), list[TokenRow]()
        for start, stop in pairwise(edges):
            at = slice(start - request.logprobs_from, stop - request.logprobs_from)
            probs = _logprobs(request, at) if at.start >= 0 else (b"", b"", b"")
            rows.append(
                TokenRow(
                    request.generate.rid,
                    start,
                    data[4 * (start - from_pos) : 4 * (stop - from_pos)],
                    *probs,
                    cached_tokens=max(0, request.cached_tokens) if start == 0 else 0,
                    prompt=request.prompt_part(start),
                    fingerprint=self.fingerprint if start == 0 else "",
                )
            )
        self.send(request.reply_to, TokenBatch(0, now, rows))

    def ended(self, request: Request, terminal: Terminal, now: int) -> None:
        """The terminal message and what trace and log need of the request."""
        self.send(request.reply_to, terminal)
        outcome, detail = _outcome(terminal)
        self.actions.append(
            RequestEnded(
                rid=request.generate.rid,
                traceparent=request.generate.traceparent,
                outcome=outcome,
                detail=detail,
                prompt_tokens=request.prompt_len,
                cached_tokens=max(0, request.cached_tokens),
                output_tokens=terminal.final_pos,
                preemptions=request.preemptions,
                received_ns=request.received_ns,
                admitted_ns=request.admitted_ns,
                first_token_ns=request.first_token_ns,
                ended_ns=now,
                first_step=request.first_step,
                last_step=request.last_step,
                number=request.rid,
            )
        )

    def refused(self, generate: Generate, terminal: Terminal, now: int) -> None:
        """The end of a request that was never accepted."""
        self.send(generate.reply_to, terminal)
        outcome, detail = _outcome(terminal)
        self.actions.append(
            RequestEnded(
                rid=generate.rid,
                traceparent=generate.traceparent,
                outcome=outcome,
                detail=detail,
                prompt_tokens=generate.prompt_len,
                received_ns=now,
                ended_ns=now,
            )
        )

    def take(self) -> list[Action]:
        """All actions since the last call."""
        actions, self.actions = self.actions, []
        return actions


def _outcome(terminal: Terminal) -> tuple[str, str]:
    """The outcome and its detail, as reported."""
    if isinstance(terminal, Finished):
        return terminal.reason.name.lower(), ""
    return terminal.code.name, terminal.detail


def _logprobs(request: Request, at: slice) -> tuple[bytes, bytes, bytes]:
    """Logprobs, best ids and their logprobs of the tokens `at`, counted from the first known."""
    wide = 4 * max(0, request.generate.n_logprobs)
    tops = slice(wide * at.start, wide * at.stop)
    return (
        bytes(request.logprobs[4 * at.start : 4 * at.stop]),
        bytes(request.top_ids[tops]),
        bytes(request.top_logprobs[tops]),
    )


def finished(request: Request, reason: FinishReason, final_pos: int) -> Finished:
    """The good end of a request."""
    return Finished(
        rid=request.generate.rid,
        reason=reason,
        final_pos=final_pos,
        prompt_tokens=request.prompt_len,
        cached_tokens=max(0, request.cached_tokens),
    )
