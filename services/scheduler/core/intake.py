"""What tokenizers ask: new requests, attaching, acknowledging, stopping, aborting."""

import numpy as np

from deepmesh.prefix_hash import root_hash
from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    Attach,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    StopAt,
)
from deepmesh.wire.packed import unpack_ids

from .checks import (
    Refusal,
    check_engine,
    check_grammar,
    check_probs,
    check_tokens,
    check_values,
    check_vocabulary,
)
from .outbox import Outbox
from .policy import Geometry, least_alone
from .prompt_probs import PromptProbs
from .registry import Registry
from .request import Ended, Request
from .waiting import WaitingQueue

ANY_ATTEMPT = 1 << 62  # of an Abort that names none
CLASSES = ("global", "window", "state")

MAX_MARKS = 4  # points that one prompt may ask for beside its end


class Intake:
    """Answers tokenizers at once; never plans."""

    def __init__(
        self,
        registry: Registry,
        waiting: WaitingQueue,
        outbox: Outbox,
        *,
        replica: str,
        max_waiting: int,
        max_unacked: int,
    ) -> None:
        self._registry = registry
        self._waiting = waiting
        self._outbox = outbox
        self._replica = replica
        self._max_waiting = max_waiting
        self._max_unacked = max_unacked
        self._next_rid = 1
        self.geometry: Geometry | None = None  # known once an engine was loaded
        self.totals: tuple[int, int, int] = (0, 0, 0)  # the least blocks of any rank, by class
        self.fingerprint = ""
        self.vocabulary = ""  # digest of the engine's
        self.has_masks = False  # the executors can keep an output to a grammar
        self.draining = False
        self.prompt_tokens = 0

    def generate(self, message: Generate, now: int) -> Request | None:
        """Accept, refuse or recognise a request; the new one if it was queued."""
        registry, rid = self._registry, message.rid
        if rid in registry.live:
            self._again(registry.live[rid], message, now)
            return None
        buried = registry.tombstones.get(rid)
        if buried is not None and message.attempt <= buried[0]:
            aborted = Finished(rid, FinishReason.ABORT, 0)
            if rid in registry.ended:  # its end has been reported
                self._outbox.send(message.reply_to, aborted)
            else:
                self._outbox.refused(message, aborted, now)
            return None
        ended = registry.ended.get(rid)
        if ended is not None and (message.attempt <= ended.request.attempt or ended.is_complete):
            self._replay_ended(ended, message.reply_to, len(message.confirmed_ids) // 4, now)
            return None
        try:
            request = self._check(message, now)
            self.check_fit(request)
        except Refusal as refusal:
            registry.num_failed += 1
            failed = Failed(rid, refusal.code, refusal.detail, refusal.param, refusal.retry_after_s)
            self._outbox.refused(message, failed, now)
            return None
        registry.ended.pop(rid, None)
        registry.live[rid] = request
        self._waiting.add(request)
        self._next_rid += 1
        self.prompt_tokens += request.prompt_len
        self._outbox.send(message.reply_to, self._accepted(request))
        self._end_if_complete(request, now)
        return request

    def attach(self, message: Attach, now: int) -> None:
        """Move a request to another tokenizer and send it everything from `from_pos` on."""
        request = self._registry.live.get(message.rid)
        if request is not None:
            self._rehome(request, message.reply_to, message.attempt)
            self._outbox.send(message.reply_to, self._accepted(request))
            self.replay(request, message.from_pos, now)
            return
        ended = self._registry.ended.get(message.rid)
        if ended is not None:
            ended.request.attempt = max(ended.request.attempt, message.attempt)
            self._replay_ended(ended, message.reply_to, message.from_pos, now)
            return
        detail = "no such request here; send Generate with the confirmed tokens"
        self._outbox.send(message.reply_to, Failed(message.rid, ErrorCode.UNKNOWN, detail))

    def ack(self, message: Ack, peer: str, now: int) -> None:
        """Tokens that the client took, and ends that arrived."""
        registry = self._registry
        for row in message.rows:
            request = registry.live.get(row.rid)
            if request is not None:
                self._take(request, row.pos, now)
            elif row.done:
                ended = registry.ended.get(row.rid)
                if ended is not None and ended.request.reply_to == peer:
                    del registry.ended[row.rid]

    def stop_at(self, message: StopAt, peer: str, now: int) -> None:
        """A stop string was found: the output ends at `n_keep`, whatever is in flight."""
        request = self._registry.live.get(message.rid)
        if request is not None and request.reply_to == peer:
            self._registry.finish(request, FinishReason.STOP, now, keep=max(0, message.n_keep))

    def abort(self, message: Abort, peer: str, now: int) -> None:
        """End a request for its client at once; idempotent, also before its Generate.

        Without an attempt it comes from a tokenizer that does not know the request, and means it
        wherever it is; with one, from a tokenizer that may have lost it to another.
        """
        request = self._registry.live.get(message.rid)
        if request is not None and message.attempt and request.reply_to != peer:
            return
        if message.rid not in self._registry.ended:
            self._registry.bury(message.rid, message.attempt or ANY_ATTEMPT, now)
        if request is not None:
            self._registry.finish(request, FinishReason.ABORT, now)

    def recheck(self, now: int) -> None:
        """An engine is loaded: requests that came before it, or for another one, must fit it."""
        for request in list(self._registry.live.values()):
            try:
                self.check_fit(request)
            except Refusal as refusal:
                self._registry.fail(
                    request,
                    refusal.code,
                    refusal.detail,
                    now,
                    param=refusal.param,
                    retry_after_s=refusal.retry_after_s,
                )

    def abandon(self, request: Request, now: int) -> None:
        """Nobody came for an orphan; who comes later starts it anew."""
        self._registry.finish(request, FinishReason.ABORT, now)
        del self._registry.ended[request.generate.rid]

    def replay(self, request: Request, from_pos: int, now: int) -> None:
        """Send a live request's confirmed output again from `from_pos` on.

        The log-probabilities of its prompt go with its first token: that waits for them.
        """
        if from_pos <= 0 and request.lacks_prompt_probs:
            request.owes_all = True
            return
        residency = self._registry.residency
        length = self._registry.confirmed_len(request)
        ids = request.ids
        if request.slot >= 0 and residency is not None:
            ids = residency.table.ids[request.slot]
        self._outbox.replay(request, ids[:length], max(0, from_pos), now)

    # ------------------------------------------------------------ parts

    def _again(self, request: Request, message: Generate, now: int) -> None:
        """The same request once more: acknowledged again, or taken over by another tokenizer.

        Attempts of two tokenizers cannot be compared; what arrives comes from a living one.
        """
        same = message.reply_to == request.reply_to and message.attempt == request.attempt
        moved = not same or request.orphaned_ns
        self._rehome(request, message.reply_to, message.attempt)
        self._outbox.send(message.reply_to, self._accepted(request))
        if moved:
            self.replay(request, len(message.confirmed_ids) // 4, now)

    def _take(self, request: Request, pos: int, now: int) -> None:
        """A client took output tokens below `pos`. One that was too far behind goes on from here,
        and so does its clock: the stop was its own."""
        pos = min(pos, request.max_len - request.prompt_len)
        if pos <= request.acked:
            return
        length = self._registry.confirmed_len(request) - request.prompt_len
        goes_on = length - request.acked >= self._max_unacked > length - pos
        request.acked = pos
        request.is_parked &= not goes_on
        if goes_on:
            request.progress_ns = now
        residency = self._registry.residency
        if request.slot >= 0 and residency is not None:
            residency.table.acked_len[request.slot] = request.prompt_len + pos
            if goes_on:
                residency.table.progress_ns[request.slot] = now

    def _accepted(self, request: Request) -> Accepted:
        cached = max(0, request.cached_tokens)
        return Accepted(request.generate.rid, request.attempt, self._replica, cached)

    def _rehome(self, request: Request, reply_to: str, attempt: int) -> None:
        request.reply_to = reply_to
        if request.slot >= 0 and self._registry.residency is not None:
            self._registry.residency.table.home(request.slot, reply_to)
        request.attempt = attempt or request.attempt
        request.orphaned_ns = 0

    def _replay_ended(self, ended: Ended, reply_to: str, from_pos: int, now: int) -> None:
        ended.request.reply_to = reply_to
        self._outbox.replay(ended.request, ended.request.ids, max(0, from_pos), now)
        self._outbox.send(reply_to, ended.terminal)

    def _end_if_complete(self, request: Request, now: int) -> None:
        """A continuation may bring all the tokens there will be."""
        output = len(request.ids) - request.prompt_len
        may_stop = output > request.generate.min_tokens
        if may_stop and int(request.ids[-1]) in request.stop_ids:
            self._registry.finish(request, FinishReason.STOP, now)
        elif len(request.ids) >= request.max_len:
            self._registry.finish(
                request, FinishReason.LENGTH, now, keep=request.max_len - request.prompt_len
            )

    def _check(self, message: Generate, now: int) -> Request:
        """A request record for a valid message.

        Raises:
            Refusal: with the field at fault.
        """
        if self.draining:
            detail = "this replica is draining; send the request to another one"
            raise Refusal(ErrorCode.OVERLOADED, detail, retry_after_s=1.0)
        if len(self._waiting) >= self._max_waiting:
            detail = f"{self._max_waiting} requests wait already; try again later"
            raise Refusal(ErrorCode.OVERLOADED, detail, retry_after_s=self._retry_after())
        if len(message.prompt_ids) % 4 or len(message.confirmed_ids) % 4:
            raise Refusal(ErrorCode.INVALID, "token ids are not whole int32s", "prompt")
        prompt, output = unpack_ids(message.prompt_ids), unpack_ids(message.confirmed_ids)
        if not 1 <= message.prompt_len <= len(prompt):
            detail = f"the prompt length {message.prompt_len} does not fit {len(prompt)} token ids"
            raise Refusal(ErrorCode.INVALID, detail, "prompt")
        check_values(message)
        if len(message.marks) % 4:
            raise Refusal(ErrorCode.INVALID, "marks are not whole int32s", "prompt")
        if len(message.stop_ids) % 4:
            raise Refusal(ErrorCode.INVALID, "stop ids are not whole int32s", "stop_token_ids")
        ids = np.concatenate([prompt, output]).astype(np.int32)
        num_known = check_probs(message, len(output))
        return Request(
            rid=self._next_rid,
            generate=message,
            stop_ids=frozenset(unpack_ids(message.stop_ids).tolist()),
            max_len=message.prompt_len + message.max_tokens,
            received_ns=now,
            ids=ids,
            marks=tuple(unpack_ids(message.marks)[:MAX_MARKS].tolist()),
            reply_to=message.reply_to,
            attempt=message.attempt,
            progress_ns=now,
            acked=len(ids) - message.prompt_len,
            logprobs=bytearray(message.confirmed_logprobs),
            top_ids=bytearray(message.confirmed_top_ids),
            top_logprobs=bytearray(message.confirmed_top_logprobs),
            logprobs_from=len(ids) - message.prompt_len - num_known,
            prompt_probs=PromptProbs(message.prompt_len, message.n_prompt_logprobs)
            if message.n_prompt_logprobs >= 0
            else None,
        )

    def check_fit(self, request: Request) -> None:
        """What only a loaded engine can tell; before that the request waits unchecked.

        Raises:
            Refusal: with the field at fault.
        """
        geometry, message = self.geometry, request.generate
        if geometry is None:
            return
        check_tokens(message, self.vocabulary, self._replica)
        check_engine(request, self.fingerprint, self._replica)
        request.fingerprint = self.fingerprint
        vocab_size = geometry.vocab_size
        if int(request.ids.min()) < 0 or int(request.ids.max()) >= vocab_size:
            detail = f"token ids must lie in 0..{vocab_size - 1}"
            raise Refusal(ErrorCode.INVALID, detail, "prompt")
        check_vocabulary(message, request.stop_ids, vocab_size)
        request.generate = check_grammar(message, has_masks=self.has_masks)
        self._check_lengths(message.prompt_len, message.max_tokens, geometry)
        request.root = root_hash(message.salt, self.fingerprint)
        request.chain = []
        request.awaited = b""  # until a step of the engine that is gone

    def _check_lengths(self, prompt_len: int, max_tokens: int, geometry: Geometry) -> None:
        limit = geometry.max_model_len
        if prompt_len >= limit:
            detail = (
                f"the prompt has {prompt_len} tokens; the context holds {limit}, "
                "one of them for the output: shorten the prompt"
            )
            raise Refusal(ErrorCode.TOO_LONG, detail, "prompt")
        if prompt_len + max_tokens > limit:
            detail = (
                f"max_tokens is {max_tokens}, but behind {prompt_len} prompt tokens "
                f"the context of {limit} has room for {limit - prompt_len}"
            )
            raise Refusal(ErrorCode.INVALID, detail, "max_tokens")
        need = least_alone(geometry, prompt_len + max_tokens)
        for name, blocks, total in zip(CLASSES, need, self.totals, strict=True):
            if blocks > total:
                detail = (
                    f"prompt and max_tokens need {blocks} {name} KV blocks, the pool has "
                    f"{total}: shorten the prompt or lower max_tokens"
                )
                raise Refusal(ErrorCode.TOO_LONG, detail, "max_tokens")

    def _retry_after(self) -> float:
        """A guess that grows with the queue; the true wait depends on output lengths."""
        return float(min(30.0, 1.0 + len(self._waiting) / 512))
