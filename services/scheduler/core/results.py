"""Applies step results: moves C and K, walks new tokens to the first stop, ends requests."""

from itertools import pairwise

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

from .answers import Answers, ProtocolError, join
from .group import Group, StepRecord, StepRows
from .logprobs import LogProbs
from .outbox import Outbox
from .policy import Geometry
from .registry import Registry
from .request import Phase, Request
from .residency import Residency


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
        self._finished: list[tuple[Request, FinishReason]] = []  # of the results being applied
        self._failed: list[tuple[Request, ErrorCode, str]] = []
        self.output_tokens = 0

    def watch(self, stop_ids: frozenset[int]) -> None:
        """Tokens that may end a request take the careful path."""
        self._maybe_stop[list(stop_ids)] = True

    def apply(self, step: StepRecord, results: list[StepResult], now: int) -> list[Request]:
        """Apply the results of some ranks, or all, of their oldest step in one pass.

        Returns:
            requests ready to be preempted.
        Raises:
            ProtocolError: rows, tokens or positions of a rank do not fit the step; nothing has
                been applied then.
        """
        answers = join(step, results)
        rows, found = answers.rows, answers.found
        alive = self._table.gen[rows.index] == rows.gen
        self._check(answers, alive)
        self._take_prompts(answers, alive)
        self._settle(rows, found, alive)
        self._group.waste.overrun_tokens += int(answers.counts[~alive].sum())
        self._group.waste.null_rows += int(
            np.count_nonzero(found["done_reason"] == DoneReason.NULL)
        )
        if self._geometry.decode_width > 1:
            self._group.drafts.add(found["num_verified"], answers.counts)
        fast = self._fast_rows(answers, alive)
        self._apply_fast(answers, np.flatnonzero(fast & (answers.counts == 1)), now)
        self._apply_runs(answers, np.flatnonzero(fast & (answers.counts > 1)), now)
        probs = LogProbs(answers)
        for row in np.flatnonzero(alive & ~fast).tolist():
            self._apply_row(answers, row, probs, now)
        self._keep_points(step, answers)
        self._outbox.flush_rows(step.step_id, now)
        self._end_requests(now)
        live = rows.index[self._table.gen[rows.index] == rows.gen]
        self._residency.prune_windows(live)
        return self._leaving(live)

    def discard(self, step: StepRecord, rank: int) -> list[Request]:
        """The step brought nothing on this rank: its rows count as null rows, fences stay.

        Returns:
            requests ready to be preempted.
        """
        rows = step.part(rank)
        alive = self._table.gen[rows.index] == rows.gen
        found = np.zeros(len(rows.index), RESULT)
        found["kv_len"] = self._table.confirmed_kv[rows.index]
        self._settle(rows, found, alive)
        self._group.waste.null_rows += len(rows.index)
        captures = step.captures_of(rank)
        index = step.rows.index[captures.row]
        self._residency.release_states(index, captures.state_block, step.step_id)
        return self._leaving(rows.index[alive])

    def _leaving(self, live: NDArray[np.intp]) -> list[Request]:
        """Those that wait to be preempted and have nothing in flight any more."""
        settled = live[self._table.leaving[live] & (self._table.inflight_rows[live] == 0)]
        return [self._table.request_at(i) for i in settled.tolist()]

    # ------------------------------------------------------------ rows

    def _check(self, answers: Answers, alive: NDArray[np.bool_]) -> None:
        """A decode row gains a position per token; a chunk brings its token at its end only, and
        is whole unless it is a null row."""
        rows, counts, tokens = answers.rows, answers.counts, answers.tokens
        reasons = answers.found["done_reason"]
        gained = answers.found["kv_len"].astype(np.int64) - self._table.confirmed_kv[rows.index]
        most = np.where(rows.is_prefill, rows.sampled, gained)
        failed = (reasons == DoneReason.ERROR) | (reasons == DoneReason.GRAMMAR_ERROR)
        unlike = ~rows.is_prefill & (gained != counts) & ~failed
        wrong = alive & ((gained < 0) | (gained > rows.q) | (counts > most) | unlike)
        if rows.is_prefill.any():
            whole = (gained == rows.q) & (counts == rows.sampled)
            null = (reasons == DoneReason.NULL) & (counts == 0) & (gained <= rows.q - rows.sampled)
            ends = failed | (reasons == DoneReason.GRAMMAR)
            wrong |= alive & rows.is_prefill & ~(whole | null | ends)
        if wrong.any():
            row = int(wrong.argmax())
            raise answers.fault(
                row,
                f"of {int(rows.q[row])} positions gained {int(gained[row])} "
                f"and brought {int(counts[row])} tokens",
            )
        unknown = (tokens < 0) | (tokens >= self._geometry.vocab_size)
        if unknown.any():
            at = int(unknown.argmax())
            row = int(np.searchsorted(answers.offsets, at, side="right")) - 1
            raise answers.fault(row, f"sampled {int(tokens[at])}, outside the vocabulary")

    def _take_prompts(self, answers: Answers, alive: NDArray[np.bool_]) -> None:
        """Log-probabilities of prompts, of the requests that asked for them."""
        for place, result in enumerate(answers.results):
            if not result.prompt:
                continue
            start, end = answers.starts[place : place + 2].tolist()
            for part in result.prompt:
                row = start + part.row
                if not start <= row < end:
                    raise ProtocolError(result.rank, f"log-probabilities of a row {part.row}")
                if not alive[row]:
                    continue
                probs = self._table.request_at(int(answers.rows.index[row])).prompt_probs
                if probs is not None and not probs.add(part):
                    raise answers.fault(row, "has log-probabilities that do not fit its prompt")

    def _settle(self, rows: StepRows, found: NDArray[np.void], alive: NDArray[np.bool_]) -> None:
        """Take back exactly what each row contributed, and move C to what is proven."""
        table, all_alive = self._table, bool(alive.all())
        live = rows if all_alive else rows.take(alive)
        index = live.index
        self._group.inflight_tokens -= int(rows.q.sum())
        table.inflight_q[index] -= live.q
        table.inflight_min[index] -= live.least
        table.inflight_rows[index] -= 1
        table.inflight_tokens[index] -= live.sampled
        reached = found["kv_len"] if all_alive else found["kv_len"][alive]
        if live.is_prefill.any():  # what is in flight behind a short chunk begins beyond its end
            is_short = live.is_prefill & (reached < table.confirmed_kv[index] + live.least)
            table.leaving[index[is_short & (table.inflight_rows[index] > 0)]] = True
        table.confirmed_kv[index] = reached
        for row in np.flatnonzero(~alive).tolist():
            self._residency.settle_zombie(int(rows.rid[row]), int(rows.epoch[row]))
        again = index[
            (table.phase[index] == Phase.DECODE)
            & (table.inflight_rows[index] == 0)
            & (table.confirmed_kv[index] < table.target[index])
        ]
        table.phase[again] = Phase.PREFILL  # a null row took the last chunk's token

    def _fast_rows(self, answers: Answers, alive: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows of steady decode: tokens that end nothing and are not the first, no logprobs."""
        rows, table, index = answers.rows, self._table, answers.rows.index
        length = table.confirmed[index]
        fast = alive & ~rows.is_prefill & (answers.counts > 0)
        fast &= (answers.found["done_reason"] == DoneReason.NONE) & (rows.num_logprobs < 0)
        fast &= (length > table.prompt_len[index]) & ~table.is_odd[index]
        fast &= length + answers.counts < table.max_len[index]
        stops = np.flatnonzero(self._maybe_stop[answers.tokens])
        fast[np.searchsorted(answers.offsets, stops, side="right") - 1] = False
        return fast

    def _apply_fast(self, answers: Answers, fast: NDArray[np.intp], now: int) -> None:
        table, index = self._table, answers.rows.index[fast]
        homes = table.tokenizer[index]
        if len(table.tokenizers) > 1:  # those of one tokenizer side by side
            order = np.argsort(homes, kind="stable")
            fast, index, homes = fast[order], index[order], homes[order]
        new, length = answers.tokens[answers.offsets[fast]], table.confirmed[index]
        table.ids[index, length] = new
        table.confirmed[index] = length + 1
        table.progress_ns[index] = now
        self.output_tokens += len(fast)
        rids, positions = table.wire_rid.take(index), length - table.prompt_len[index]
        edges = np.flatnonzero(np.diff(homes, prepend=-1)).tolist()
        for start, end in pairwise([*edges, len(fast)]):
            peer, part = table.tokenizers[int(homes[start])], slice(start, end)
            self._outbox.add_tokens(peer, rids[part], positions[part], new[part])

    def _apply_runs(self, answers: Answers, runs: NDArray[np.intp], now: int) -> None:
        """Fast rows that bring several tokens each: accepted drafts."""
        if not len(runs):
            return
        table, index = self._table, answers.rows.index[runs]
        counts, length = answers.counts[runs], table.confirmed[index]
        ends = np.cumsum(counts)
        place = np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)  # within its row
        new = answers.tokens[np.repeat(answers.offsets[runs], counts) + place]
        table.ids[np.repeat(index, counts), np.repeat(length, counts) + place] = new
        table.confirmed[index] = length + counts
        table.progress_ns[index] = now
        self.output_tokens += len(new)
        data, cuts = new.tobytes(), [0, *(4 * ends).tolist()]
        positions = (length - table.prompt_len[index]).tolist()
        for at, position, (start, end) in zip(
            index.tolist(), positions, pairwise(cuts), strict=True
        ):
            request = table.request_at(at)
            row = TokenRow(request.generate.rid, position, data[start:end])
            self._outbox.add_row(request.reply_to, row)

    def _apply_row(self, answers: Answers, row: int, probs: LogProbs, now: int) -> None:
        table, index = self._table, int(answers.rows.index[row])
        request = table.request_at(index)
        reason, at = int(answers.found["done_reason"][row]), int(answers.offsets[row])
        tokens = answers.tokens[at : at + int(answers.counts[row])]
        if reason == DoneReason.ERROR:
            detail = (
                "no token can be sampled: the model's output for this request was not finite, "
                "or its parameters ban every token"
            )
            self._failed.append((request, ErrorCode.ENGINE_ERROR, detail))
            return
        if answers.rows.is_prefill[row]:
            table.progress_ns[index] = now
        if reason == DoneReason.NULL and len(tokens) == 0:
            return
        count, end = self._walk(request, index, tokens)
        is_whole = reason == DoneReason.GRAMMAR and table.grammar[index] and count == len(tokens)
        if is_whole and end != FinishReason.STOP:
            end = FinishReason.GRAMMAR  # no length cuts what is complete
        if count:
            self._emit(request, index, tokens[:count], probs, row, now)
        self._group.waste.overrun_tokens += len(tokens) - count
        if end is not None:
            self._finished.append((request, end))
        elif reason == DoneReason.GRAMMAR_ERROR:
            detail = "the output left the grammar, or the grammar's matcher failed"
            self._failed.append((request, ErrorCode.GRAMMAR, detail))
        elif reason in (DoneReason.EOS, DoneReason.LENGTH, DoneReason.GRAMMAR):
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
        if request.owes_all:
            request.owes_all = False
            self._outbox.replay(request, table.ids[index, : length + count], 0, now)
            return
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
                prompt=request.prompt_part(pos),
                fingerprint=self._outbox.fingerprint if pos == 0 else "",
            ),
        )

    def _keep_points(self, step: StepRecord, answers: Answers) -> None:
        """Keep the points that the step reached exactly; the rest of their leases end."""
        captures, rows = answers.captures(step)
        if not len(rows):
            return
        table, residency, of = self._table, self._residency, answers.rows
        index, position, blocks = of.index[rows], captures.position, captures.state_block
        alive = table.gen[index] == of.gen[rows]
        reached, confirmed = answers.found["kv_len"][rows], table.confirmed[index]
        kept = alive & (reached == position) & (position <= confirmed)
        residency.release_states(index[~kept], blocks[~kept], step.step_id)
        is_prompt = of.is_prefill[rows]
        for at in np.flatnonzero(alive & is_prompt).tolist():
            request, end = table.request_at(int(index[at])), int(position[at])
            residency.reached(request, end)
            if kept[at]:
                residency.keep_point(request, end, int(blocks[at]), step.step_id)
        output = kept & ~is_prompt
        residency.keep_outputs(index[output], position[output], blocks[output], step.step_id)
