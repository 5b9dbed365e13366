"""Applies step results: moves C and K, walks new tokens to the first stop, ends requests."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    DoneReason,
    ErrorCode,
    FinishReason,
    StepResult,
    TokenRow,
)
from deepmesh.wire.packed import RESULT

from .group import Group, RankStep, StepRecord
from .logprobs import LogProbs
from .outbox import Outbox
from .policy import Geometry
from .registry import Registry
from .request import Phase, Request
from .residency import Residency


class ProtocolError(Exception):
    """A result does not fit the step it answers: this rank's device cannot be trusted."""


class Results:
    """The only place that resolves rows. What a row contributed is read from the step record."""

    def __init__(
        self,
        residency: Residency,
        group: Group,
        outbox: Outbox,
        registry: Registry,
        geometry: Geometry,
    ) -> None:
        self._residency = residency
        self._table = residency.table
        self._group = group
        self._outbox = outbox
        self._registry = registry
        self._geometry = geometry
        self._maybe_stop = np.zeros(geometry.vocab_size, np.bool_)  # a stop id of any request
        self._finished: list[tuple[Request, FinishReason]] = []  # of the result being applied
        self._failed: list[tuple[Request, ErrorCode, str]] = []
        self.output_tokens = 0

    def watch(self, stop_ids: frozenset[int]) -> None:
        """Tokens that may end a request take the careful path."""
        self._maybe_stop[list(stop_ids)] = True

    def apply(self, step: StepRecord, result: StepResult, now: int) -> list[Request]:
        """Apply one rank's result of its oldest step; returns requests ready to be preempted.

        Raises:
            ProtocolError: rows, tokens or positions do not fit the step.
        """
        rank_step = step.ranks[result.rank]
        rows = _read_rows(result, rank_step)
        counts = rows["num_tokens"].astype(np.int64)
        offsets = np.cumsum(counts) - counts
        tokens = np.frombuffer(result.tokens, "<i4")
        if int(counts.sum()) != len(tokens):
            raise ProtocolError(f"{len(tokens)} tokens for {int(counts.sum())} announced")
        alive = self._table.gen[rank_step.index] == rank_step.gen
        self._check(rank_step, rows, tokens, alive)
        self._settle(rank_step, rows, alive)
        fast = self._fast_rows(rank_step, rows, tokens, offsets, alive)
        self._apply_fast(rank_step, np.flatnonzero(fast), tokens, offsets, now)
        probs = LogProbs(result, rank_step, counts)
        for row in np.flatnonzero(alive & ~fast).tolist():
            at = int(offsets[row])
            self._apply_row(rank_step, rows, row, tokens[at : at + int(counts[row])], probs, now)
        self._keep_points(step, rank_step, rows, result.rank)
        self._outbox.flush_rows(step.step_id, now)
        self._end_requests(now)
        live = rank_step.index[self._table.gen[rank_step.index] == rank_step.gen]
        self._residency.prune_windows(live)
        settled = live[self._table.leaving[live] & (self._table.inflight_rows[live] == 0)]
        return [self._table.request_at(i) for i in settled.tolist()]

    def discard(self, step: StepRecord, rank: int) -> None:
        """The step brought nothing on this rank: its rows count as null rows, fences stay."""
        rank_step = step.ranks[rank]
        alive = self._table.gen[rank_step.index] == rank_step.gen
        rows = np.zeros(len(rank_step.index), RESULT)
        rows["kv_len"] = self._table.confirmed_kv[rank_step.index]
        self._settle(rank_step, rows, alive)
        for capture in rank_step.captures:
            self._residency.release_capture(rank, capture.state_block, step.step_id)

    # ------------------------------------------------------------ rows

    def _check(
        self,
        step: RankStep,
        rows: NDArray[np.void],
        tokens: NDArray[np.int32],
        alive: NDArray[np.bool_],
    ) -> None:
        """A decode row gains a position per token; a chunk brings a token at its end only."""
        gained = rows["kv_len"].astype(np.int64) - self._table.confirmed_kv[step.index]
        counts = rows["num_tokens"].astype(np.int64)
        most = np.where(step.is_prefill, step.sampled, gained)
        unlike = ~step.is_prefill & (gained != counts) & (rows["done_reason"] != DoneReason.ERROR)
        wrong = alive & ((gained < 0) | (gained > step.q) | (counts > most) | unlike)
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise ProtocolError(
                f"row {row} of {int(step.q[row])} positions gained {int(gained[row])} "
                f"and brought {int(counts[row])} tokens"
            )
        if len(tokens) and not (
            int(tokens.min()) >= 0 and int(tokens.max()) < self._geometry.vocab_size
        ):
            raise ProtocolError("a sampled token is outside the vocabulary")

    def _settle(self, step: RankStep, rows: NDArray[np.void], alive: NDArray[np.bool_]) -> None:
        """Take back exactly what each row contributed, and move C to what is proven."""
        table, index = self._table, step.index[alive]
        table.inflight_q[index] -= step.q[alive]
        table.inflight_min[index] -= step.least[alive]
        table.inflight_rows[index] -= 1
        table.inflight_tokens[index] -= step.sampled[alive]
        table.confirmed_kv[index] = rows["kv_len"][alive]
        for row in np.flatnonzero(~alive).tolist():
            self._residency.settle_zombie(int(step.rid[row]), int(step.epoch[row]))
        again = index[
            (table.phase[index] == Phase.DECODE)
            & (table.inflight_rows[index] == 0)
            & (table.confirmed_kv[index] < table.target[index])
        ]
        table.phase[again] = Phase.PREFILL  # a null row took the last chunk's token

    def _fast_rows(
        self,
        step: RankStep,
        rows: NDArray[np.void],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        alive: NDArray[np.bool_],
    ) -> NDArray[np.bool_]:
        """Rows of steady decode: one token that ends nothing, no logprobs."""
        table, index = self._table, step.index
        fast = alive & ~step.is_prefill & (rows["num_tokens"] == 1)
        fast &= (rows["done_reason"] == DoneReason.NONE) & (table.num_logprobs[index] < 0)
        fast &= table.confirmed[index] + 1 < table.max_len[index]
        at = np.minimum(offsets, max(0, len(tokens) - 1))
        if len(tokens):
            fast &= ~self._maybe_stop[tokens[at]]
        return fast

    def _apply_fast(
        self,
        step: RankStep,
        rows: NDArray[np.intp],
        tokens: NDArray[np.int32],
        offsets: NDArray[np.int64],
        now: int,
    ) -> None:
        table, index = self._table, step.index[rows]
        new = tokens[offsets[rows]]
        position = table.confirmed[index] - table.prompt_len[index]
        table.ids[index, table.confirmed[index]] = new
        table.confirmed[index] += 1
        table.progress_ns[index] = now
        self.output_tokens += len(rows)
        data, requests = new.tobytes(), [table.request_at(i) for i in index.tolist()]
        ids = [data[at : at + 4] for at in range(0, len(data), 4)]
        rids = [request.generate.rid for request in requests]
        peers = [request.reply_to for request in requests]
        self._outbox.add_rows(peers, list(map(TokenRow, rids, position.tolist(), ids)))

    def _apply_row(
        self,
        step: RankStep,
        rows: NDArray[np.void],
        row: int,
        tokens: NDArray[np.int32],
        probs: LogProbs,
        now: int,
    ) -> None:
        table, index = self._table, int(step.index[row])
        request = table.request_at(index)
        reason = int(rows["done_reason"][row])
        if reason == DoneReason.ERROR:
            detail = "the model's output for this request was not finite"
            self._failed.append((request, ErrorCode.ENGINE_ERROR, detail))
            return
        if step.is_prefill[row]:
            table.progress_ns[index] = now
        if reason == DoneReason.NULL and len(tokens) == 0:
            return
        count, end = self._walk(request, index, tokens)
        if count:
            self._emit(request, index, tokens[:count], probs, row, now)
        if end is not None:
            self._finished.append((request, end))
        elif reason in (DoneReason.EOS, DoneReason.LENGTH):
            detail = "the device ended the request at a token that does not end it"
            self._failed.append((request, ErrorCode.INTERNAL, detail))

    def _end_requests(self, now: int) -> None:
        """Behind the tokens of the step, so that nothing follows a terminal message."""
        finished, self._finished = self._finished, []
        for request, reason in finished:
            self._registry.finish(request, reason, now)
        failed, self._failed = self._failed, []
        for request, code, detail in failed:
            self._registry.fail(request, code, detail, now)

    def _walk(
        self, request: Request, index: int, tokens: NDArray[np.int32]
    ) -> tuple[int, FinishReason | None]:
        """How many tokens to keep, and why the request ends: the earliest position wins, and at
        the same position a stop id beats the length. What follows is overrun."""
        length = int(self._table.confirmed[index])
        first_stop = request.prompt_len + request.generate.min_tokens
        for count, token in enumerate(tokens.tolist(), 1):
            length += 1
            if token in request.stop_ids and length > first_stop:
                return count, FinishReason.STOP
            if length >= request.max_len:
                return count, FinishReason.LENGTH
        return len(tokens), None

    def _emit(
        self,
        request: Request,
        index: int,
        tokens: NDArray[np.int32],
        probs: LogProbs,
        row: int,
        now: int,
    ) -> None:
        table = self._table
        length, count = int(table.confirmed[index]), len(tokens)
        table.ids[index, length : length + count] = tokens
        table.confirmed[index] = length + count
        table.progress_ns[index] = now
        if request.first_token_ns == 0:
            request.first_token_ns = now
        self.output_tokens += count
        pos = length - request.prompt_len
        logprobs, top_ids, top_logprobs = probs.of(row, count)
        request.logprobs += logprobs
        request.top_ids += top_ids
        request.top_logprobs += top_logprobs
        self._outbox.add_row(
            request.reply_to,
            TokenRow(
                rid=request.generate.rid,
                pos=pos,
                ids=tokens.tobytes(),
                logprobs=logprobs,
                top_ids=top_ids,
                top_logprobs=top_logprobs,
                cached_tokens=max(0, request.cached_tokens) if pos == 0 else 0,
            ),
        )

    def _keep_points(
        self, record: StepRecord, step: RankStep, rows: NDArray[np.void], rank: int
    ) -> None:
        """Publish the points that the step reached exactly; the rest of their leases end."""
        for capture in step.captures:
            index = int(step.index[capture.row])
            alive = self._table.gen[index] == step.gen[capture.row]
            reached = int(rows["kv_len"][capture.row])
            if alive:
                self._residency.reached(self._table.request_at(index), capture.position)
            if alive and reached == capture.position <= self._table.confirmed[index]:
                request = self._table.request_at(index)
                self._residency.keep_point(
                    request, capture.position, capture.state_block, record.step_id
                )
            else:
                self._residency.release_capture(rank, capture.state_block, record.step_id)


def _read_rows(result: StepResult, step: RankStep) -> NDArray[np.void]:
    if len(result.rows) % RESULT.itemsize:
        raise ProtocolError("result rows are cut short")
    rows = np.frombuffer(result.rows, RESULT)
    if len(step.index) == 0:
        return rows[:0]  # the answer to a dummy row
    if len(rows) != len(step.index):
        raise ProtocolError(f"{len(rows)} result rows for {len(step.index)} rows of the step")
    if not (np.array_equal(rows["rid"], step.rid) and np.array_equal(rows["epoch"], step.epoch)):
        raise ProtocolError("result rows are not those of the step")
    return rows
