"""Stands where the tokenizer does: sends requests and acks tokens, makes no text of them."""

import random
import time
from collections.abc import Callable

from bench.rig.cases import MAX_MODEL_LEN, Case
from deepmesh.config import Config
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.messages import (
    Ack,
    AckRow,
    Failed,
    Finished,
    Generate,
    Grammar,
    SamplingParams,
    TokenBatch,
)
from deepmesh.wire.packed import pack_ids
from deepmesh.wire.sockets import Dialer, Identity, LinkEvent, Mail, PeerUp

PROMPT_TOKENS = 48
SHORTEST, LONGEST = 40, 500  # output tokens; a request that ends is replaced by a longest one
SETTLE_STEPS = 5
PATIENCE_S = 60.0
VOCAB_FROM, VOCAB_TO = 600, 4000


class SinkError(RuntimeError):
    """The mesh did not do what a benchmark needs of it."""


class Sink:
    """Keeps `case.rows` requests running."""

    def __init__(self, config: Config, case: Case) -> None:
        me = Identity.new("tokenizer", "tokenizer-0", config)
        self._case = case
        self._link = Dialer(config.scheduler_address(0), me, config.links)
        self._inbox = Inbox(self._link)
        self._draw = random.Random(case.rows)
        self._grammar = Grammar("regex", ".*") if case.grammar else None
        self._num_sent = self._group_step = 0
        self._started: set[bytes] = set()

    def settle(self) -> int:
        """Wait until all requests are under way; the group step to measure from.

        Raises:
            SinkError: a request failed, or nothing moves.
        """
        self._wait(lambda: len(self._started) >= self._case.rows)
        return self._group_step + SETTLE_STEPS

    def run_until(self, group_step: int) -> None:
        """Send and ack until the tokens of this step are there; raises as `settle` does."""
        self._wait(lambda: self._group_step >= group_step)

    def let_go(self, timeout_s: float) -> None:
        """What the scheduler still says: it may end, as far as this side is concerned."""
        for event in self._inbox.wait(timeout_s):
            match event:
                case Mail(message=Finished(rid=rid) | Failed(rid=rid)):
                    self._link.send(Ack([AckRow(rid, MAX_MODEL_LEN, done=True)]))
                case _:
                    pass

    def close(self) -> None:
        """Hang up."""
        self._inbox.close()

    def _wait(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not what():
            for event in self._inbox.wait(1.0):
                self._take(event)
            if time.monotonic() > deadline:
                raise SinkError(f"step {self._group_step}: the next ones do not come")

    def _take(self, event: LinkEvent) -> None:
        match event:
            case PeerUp():
                for number in range(self._case.rows):
                    self._send(self._first_length(number))
            case Mail(message=TokenBatch() as batch):
                self._ack(batch)
                self._group_step = batch.group_step
            case Mail(message=Finished(rid=rid, final_pos=pos)):
                self._link.send(Ack([AckRow(rid, pos, done=True)]))
                self._send(LONGEST)
            case Mail(message=Failed(detail=detail)):
                raise SinkError(f"a request failed: {detail}")
            case _:
                pass

    def _first_length(self, number: int) -> int:
        """Requests are met somewhere in their course; a lone one lasts."""
        if self._case.rows == 1:
            return MAX_MODEL_LEN - PROMPT_TOKENS
        return self._draw.randrange(SHORTEST, LONGEST)

    def _send(self, max_tokens: int) -> None:
        self._num_sent += 1
        ids = [self._draw.randrange(VOCAB_FROM, VOCAB_TO) for _ in range(PROMPT_TOKENS)]
        generate = Generate(
            rid=self._num_sent.to_bytes(16, "little"),
            attempt=1,
            reply_to="tokenizer-0",
            prompt_ids=pack_ids(ids),
            prompt_len=len(ids),
            sampling=SamplingParams(temperature=0.0),
            seed=self._num_sent,
            max_tokens=max_tokens,
            grammar=self._grammar,
        )
        self._link.send(generate)

    def _ack(self, batch: TokenBatch) -> None:
        """What a gateway's credits make a tokenizer send, once per batch."""
        rows = [AckRow(row.rid, row.pos + len(row.ids) // 4) for row in batch.rows]
        if len(self._started) < self._case.rows:
            self._started.update(row.rid for row in rows)
        self._link.send(Ack(rows))
