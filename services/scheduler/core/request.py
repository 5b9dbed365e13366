"""A request: what stays true for its whole life, and the columns that move while it is resident."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import (
    Failed,
    Finished,
    FinishReason,
    Generate,
    KvTier,
    PromptLogprobs,
)

from .prompt_probs import PromptProbs
from .token_rows import WIRE_RID


class Phase:
    """Phase of a resident request; plain ints, since enum look-ups cost on the hot path."""

    NONE = 0  # the slot holds no request
    PREFILL = 1
    DECODE = 2
    LOADING = 3  # in no step: its blocks are being filled from a kvstore


@dataclass(slots=True, eq=False)
class Found:
    """What a kvstore said about a request's prefix, or another group that was to compute it; a
    hint, good for one epoch."""

    store: str  # name of the kvstore, or of the other group's executor
    epoch: int
    deadline_ns: int = 0  # of its answer
    is_open: bool = True  # the answer is still to come
    point_blocks: int = 0  # blocks below the deepest point there
    tier: KvTier = KvTier.MEMORY  # the slowest that these are in
    handover: int = 0  # number of the hand-over; 0: a kvstore
    key: bytes = b""  # of a hand-over: hash of the last block
    cached_tokens: int = 0  # of a hand-over: what the other group did not compute for it
    num_moves: tuple[int, int] = (0, 0)  # of its load: global and window blocks
    is_loaded: bool | None = None  # how its load ended


@dataclass(slots=True, eq=False)
class Request:
    """One live request. While it is resident, the table's columns are ahead of `ids`."""

    rid: int  # the core's own number, never reused
    generate: Generate
    stop_ids: frozenset[int]
    max_len: int  # prompt and output tokens at which it ends
    received_ns: int
    ids: NDArray[np.int32]  # confirmed tokens when it is not resident
    reply_to: str
    attempt: int
    share: int = -1  # place on its tenants' line, from when it was first queued
    slot: int = -1  # index into the table; -1: not resident
    epoch: int = 0
    root: bytes = b""  # root of its hash chain
    points: list[int] = field(default_factory=list[int])  # grid points to keep in this prefill
    chain: list[bytes] = field(default_factory=list[bytes])
    output_point: bytes = b""  # key of its last point in the output
    marks: tuple[int, ...] = ()  # as Generate.marks
    follows: bytes = b""  # key of the point that its next one is shielded in the place of
    deferred_state: int = -1  # state block of a hit's point, pinned until the copy is submitted
    found: Found | None = None
    num_asks: int = 0  # times that another group was asked for its prompt
    cached_tokens: int = -1  # prompt tokens from the prefix cache at its first admission
    preemptions: int = 0
    awaited: bytes = b""  # key of a prefix that another request is computing
    awaited_until: int = 0  # step until which it waits for that
    settled_len: int = 0  # preemptible again from this length on
    suspect: int = 0  # device faults while it was in the step, since its last progress
    suspect_len: int = 0  # confirmed tokens at the last of them
    acked: int = 0  # output tokens that the client took
    orphaned_ns: int = 0
    is_parked: bool = False  # waits for its client to take tokens, not for room
    progress_ns: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    first_step: int = 0
    last_step: int = 0
    logprobs: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)
    logprobs_from: int = 0  # output index of the first logprob known
    prompt_probs: PromptProbs | None = None  # None: not asked for
    owes_all: bool = False  # its tokenizer gets all of the output with the next token
    fingerprint: str = ""  # of the engine that computes it; empty: none has yet

    @property
    def prompt_len(self) -> int:
        """P: prompt tokens of the user."""
        return self.generate.prompt_len

    @property
    def lacks_prompt_probs(self) -> bool:
        """All of its prompt must be computed, whatever a cache has of it."""
        return self.prompt_probs is not None and not self.prompt_probs.is_complete

    def prompt_part(self, pos: int) -> PromptLogprobs | None:
        """What goes with the output token `pos` of the prompt's log-probabilities."""
        if pos or self.prompt_probs is None or not self.prompt_probs.is_complete:
            return None
        return self.prompt_probs.whole()

    @property
    def order(self) -> tuple[int, int, int]:
        """Most important first, then who has had least, then oldest."""
        return (-self.generate.priority, self.share, self.rid)


@dataclass(slots=True, eq=False)
class Ended:
    """What is kept after the end until the tokenizer has it all."""

    request: Request  # `ids` holds the confirmed tokens
    terminal: Finished | Failed
    ended_ns: int

    @property
    def is_complete(self) -> bool:
        """It has all the tokens it can ever have."""
        return isinstance(self.terminal, Finished) and self.terminal.reason in (
            FinishReason.STOP,
            FinishReason.LENGTH,
        )


@dataclass(slots=True)
class Zombie:
    """A request that left while rows of it were unresolved."""

    rid: int
    epoch: int
    rows: int


class RequestTable:
    """Columns of all resident requests, indexed by rank * slots + slot.

    Preallocated; pages of `ids` and the block tables are touched by the system only when used.
    """

    def __init__(self, *, ranks: int, slots: int, max_len: int, block_size: int) -> None:
        size, self.slots = ranks * slots, slots
        blocks = -(-max_len // block_size) + 1
        self.requests: list[Request | None] = [None] * size
        self.wire_rid = np.zeros(size, WIRE_RID)  # the request's id on the wire
        self.is_odd = np.zeros(size, np.bool_)  # that id has another length
        self.tokenizers: list[str] = []  # all that ever asked for one of these requests
        self.tokenizer = np.zeros(size, np.int16)  # who gets its tokens, as an index into those
        self.rid = np.zeros(size, np.uint64)
        self.epoch = np.zeros(size, np.uint32)
        self.gen = np.zeros(size, np.uint32)
        self.phase = np.zeros(size, np.uint8)
        self.leaving = np.zeros(size, np.bool_)  # PREEMPT_PENDING: no new rows
        self.prompt_len = np.zeros(size, np.int64)  # P
        self.target = np.zeros(size, np.int64)  # T
        self.confirmed = np.zeros(size, np.int64)  # K
        self.confirmed_kv = np.zeros(size, np.int64)  # C
        self.inflight_q = np.zeros(size, np.int64)
        self.inflight_min = np.zeros(size, np.int64)  # what C is sure to gain if all rows live
        self.inflight_rows = np.zeros(size, np.int64)
        self.inflight_tokens = np.zeros(size, np.int64)  # output tokens that F is sure to bring
        self.max_len = np.zeros(size, np.int64)
        self.acked_len = np.zeros(size, np.int64)  # P + acknowledged output tokens
        self.progress_ns = np.zeros(size, np.int64)
        self.producer = np.zeros(size, np.int64)  # step of the latest row, this epoch
        self.suspect_len = np.zeros(size, np.int64)  # K at its last device fault; 0 without one
        self.num_logprobs = np.full(size, -1, np.int64)
        self.grammar = np.zeros(size, np.uint8)
        self.num_global = np.zeros(size, np.int64)
        self.sent_global = np.zeros(size, np.int64)
        self.window_start = np.zeros(size, np.int64)  # logical indices of held window blocks
        self.window_end = np.zeros(size, np.int64)
        self.sent_window = np.zeros(size, np.int64)
        self.state = np.full(size, -1, np.int64)
        self.needs_init = np.zeros(size, np.bool_)
        self.ids = np.empty((size, max_len + 1), np.int32)
        self.global_blocks = np.empty((size, blocks), np.int32)
        self.window_blocks = np.empty((size, blocks), np.int32)

    def home(self, index: int, tokenizer: str) -> None:
        """The request's tokens go to this tokenizer from here on."""
        if tokenizer not in self.tokenizers:
            self.tokenizers.append(tokenizer)
        self.tokenizer[index] = self.tokenizers.index(tokenizer)

    def resident(self) -> NDArray[np.intp]:
        """Indices of all slots that hold a request."""
        return np.flatnonzero(self.phase)

    def retiring(self, indices: NDArray[np.intp]) -> NDArray[np.bool_]:
        """RETIRING: what is in flight is sure to end them at their length (a row that may miss
        its mask is not sure). They get no more rows, and nobody needs to make room for them."""
        sure = self.confirmed[indices] + self.inflight_tokens[indices] >= self.max_len[indices]
        return sure & (self.phase[indices] == Phase.DECODE) & (self.grammar[indices] == 0)

    def request_at(self, index: int) -> Request:
        """The request in a slot that is known to hold one."""
        request = self.requests[index]
        assert request is not None, f"slot {index} is empty"
        return request
