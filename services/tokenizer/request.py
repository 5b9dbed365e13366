"""The state of one generating request, from `Submit` to the last acknowledgement."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from deepmesh.seeds import derived_seed
from deepmesh.wire.messages import (
    Delta,
    Finished,
    FinishReason,
    Generate,
    Ids,
    ResponseFailed,
    ResponseFinished,
    Rid,
    Submit,
    TokenRow,
)
from services.tokenizer.choices import Lane, Merge
from services.tokenizer.generation import Generation

End = ResponseFinished | ResponseFailed

# A reader this close behind counts as keeping up. Gateways credit in lumps, and tokens that
# cause no event must not wait for the credit of events that will never fill the next lump.
SLACK_EVENTS = 64
ACK_TOKENS = 16  # acknowledged in lumps, too


class Phase(Enum):
    """Where a request is."""

    PREPARING = auto()  # being converted, perhaps in a thread
    UNPLACED = auto()  # no scheduler is up
    ASKED = auto()  # Attach is out: does a scheduler still hold it?
    ROUTED = auto()  # Generate is out to the router; no scheduler has answered yet
    SENT = auto()  # Generate is out to a scheduler
    RUNNING = auto()  # Accepted, or tokens have come
    SPLIT = auto()  # its parts run
    FOLLOWING = auto()  # it is sent the events of another one
    ENDED = auto()  # the end has been sent to the gateway


@dataclass(eq=False, slots=True)
class Probs:
    """Log probabilities of output tokens, as they lie in a TokenRow."""

    logprobs: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)

    def take(self, row: TokenRow, first: int, count: int) -> None:
        """Those of `count` tokens of a row from number `first` on."""
        if not row.logprobs:
            return
        wide = len(row.top_ids) // (len(row.ids) // 4)  # bytes of a token
        top = slice(wide * first, wide * (first + count))
        self.logprobs += row.logprobs[4 * first : 4 * (first + count)]
        self.top_ids += row.top_ids[top]
        self.top_logprobs += row.top_logprobs[top]


@dataclass(eq=False, slots=True)
class Request:
    """One request. `Core` decides, this remembers."""

    submit: Submit
    gateway: str
    arrived_ns: int
    phase: Phase = Phase.PREPARING
    generation: Generation | None = None

    # the scheduler's side
    scheduler: str = ""
    incarnation: bytes = b""  # of the scheduler that has it
    asked: set[str] = field(default_factory=set[str])
    refused_by: set[str] = field(default_factory=set[str])  # since a scheduler last accepted it
    attempt: int = 0
    num_aborts: int = 0  # that were not meant for it
    position: int = 0  # output tokens turned into events
    output: bytearray = field(default_factory=bytearray)  # their ids, int32
    probs: Probs = field(default_factory=Probs)  # their logprobs, where asked for and known
    read: int = 0  # output tokens whose events the client has taken
    acked: int = 0  # of these, as last told to the scheduler
    acks: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    reason: FinishReason = FinishReason.STOP  # once it has ended well
    finished: Finished | None = None  # came before all of its tokens
    must_ask: bool = False  # a scheduler may hold it already, under an earlier instance of us
    counted_at: str = ""  # scheduler whose load includes it
    router: str = ""  # counts it as load until told that it is over
    was_accepted: bool = False
    is_admitted: bool = False  # the gateway knows
    has_started: bool = False  # `text.start` has been called
    fingerprint: str = ""  # of the engine that computed its first token
    cached_tokens: int = 0
    spoke_at: float = 0.0  # last message to or from the scheduler
    attached_at: float = -1e9
    give_up_at: float = 0.0  # without a scheduler

    # the gateway's side
    events: deque[bytes] = field(default_factory=deque[bytes])  # kept for a re-submission
    first_kept: int = 0
    next_event: int = 0
    withheld: int = 0  # events below are known to the gateway from an earlier instance of us
    credited: int = 0
    stuck_since: float = 0.0  # 0: the reader keeps up
    orphaned_at: float = 0.0  # 0: its gateway is there
    end: End | None = None
    ended_at: float = 0.0
    is_detached: bool = False  # it runs without a client: a background response
    follows: bool = False  # its events are those of one

    # several choices, or stages of one: parts that run for a request without being one
    whole: "Request | None" = None  # of a part: the request that it belongs to
    parts: list["Request"] = field(default_factory=list["Request"])
    part_index: int = 0
    is_thinking: bool = False  # a part that ends with its thinking; another one goes on

    # traces
    first_token_ns: int = 0
    busy_ns: int = 0

    @property
    def rid(self) -> Rid:
        """Its name everywhere."""
        return self.submit.rid

    @property
    def is_homeless(self) -> bool:
        """Whether no scheduler is known to have it."""
        return self.phase in (Phase.UNPLACED, Phase.ROUTED)

    @property
    def is_stream(self) -> bool:
        """Whether the answer goes out as events."""
        return self.follows or (self.generation is not None and self.generation.stream)

    @property
    def is_heard(self) -> bool:
        """Whether a gateway is there for what it says."""
        return not (self.orphaned_at or self.is_detached)

    @property
    def reader(self) -> "Request":
        """The request whose client reads its events."""
        return self.whole or self

    @property
    def lane(self) -> Lane:
        """Where a part's events wait for their turn."""
        assert self.generation is not None
        assert isinstance(self.generation.text, Lane)
        return self.generation.text

    @property
    def merge(self) -> Merge:
        """What puts the events of all parts in order."""
        assert self.generation is not None
        assert isinstance(self.generation.text, Merge)
        return self.generation.text

    @property
    def stop_ids(self) -> Ids:
        """Ids that end it."""
        assert self.generation is not None
        thinking = self.generation.thinking if self.is_thinking else None
        return self.generation.stop_ids if thinking is None else thinking.stop_ids

    @property
    def stops(self) -> list[int]:
        """Ids that end it, one by one."""
        return np.frombuffer(self.stop_ids, "<i4").tolist()

    @property
    def last_id(self) -> int:
        """Of its output; -1 before the first."""
        return int.from_bytes(self.output[-4:], "little", signed=True) if self.output else -1

    @property
    def max_tokens(self) -> int:
        """Output tokens at which it ends."""
        assert self.generation is not None
        most = self.generation.max_tokens
        thinking = self.generation.thinking if self.is_thinking else None
        return most if thinking is None else min(most, thinking.budget)

    @property
    def min_tokens(self) -> int:
        """Output tokens before which no stop id comes."""
        assert self.generation is not None
        return min(self.generation.min_tokens, self.max_tokens)

    def generate(self, me: str, vocabulary: str) -> Generate:
        """The message that starts it, or that continues it from the tokens known so far."""
        generation = self.generation
        assert generation is not None
        goes_on = generation.thinking is not None and not self.is_thinking
        has_all = len(self.probs.logprobs) == len(self.output)
        probs = self.probs if has_all else Probs()
        return Generate(
            rid=self.rid,
            attempt=self.attempt,
            reply_to=me,
            prompt_ids=generation.prompt_ids,
            prompt_len=generation.prompt_len,
            confirmed_ids=bytes(self.output),
            sampling=generation.sampling,
            seed=derived_seed(generation.seed, generation.sub_index),
            stop_ids=self.stop_ids,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            n_logprobs=generation.n_logprobs,
            salt=generation.salt,
            grammar=None if self.is_thinking else generation.grammar,
            priority=self.submit.priority - generation.stand_back,
            deadline_ns=self.submit.deadline_ns,
            traceparent=self.submit.traceparent,
            vocabulary=vocabulary,
            n_prompt_logprobs=-1 if goes_on else generation.n_prompt_logprobs,
            tenant=self.submit.tenant_salt,
            marks=generation.marks,
            fingerprint=self.fingerprint if self.output else "",
            confirmed_logprobs=bytes(probs.logprobs),
            confirmed_top_ids=bytes(probs.top_ids),
            confirmed_top_logprobs=bytes(probs.top_logprobs),
        )

    def add_events(self, events: list[bytes], flags: int = 0) -> Delta | None:
        """Keep them, and the part of them that the gateway does not have yet."""
        first = self.next_event
        self.events.extend(events)
        self.next_event += len(events)
        known = min(max(self.withheld - first, 0), len(events))
        fresh = events[known:]
        return Delta(self.rid, first + known, fresh, flags) if fresh or flags else None

    def since(self, next_event: int) -> list[bytes]:
        """Kept events from index `next_event` on."""
        return list(self.events)[max(next_event - self.first_kept, 0) :]

    def credit(self, num_events: int) -> None:
        """The client has taken events below `num_events`: forget them."""
        if num_events > self.credited:
            self.credited = num_events
            self.stuck_since = 0.0
        while self.first_kept < self.credited and self.events:
            self.events.popleft()
            self.first_kept += 1

    def note_position(self) -> None:
        """The output so far becomes acknowledged once the client has taken its events."""
        reader = self.reader
        waiting = len(self.lane.rounds) if self.whole is not None and reader.is_stream else 0
        self.acks.append((reader.next_event + waiting, self.position))

    def newly_acked(self) -> int | None:
        """Output position to acknowledge upstream now, if it has moved."""
        reader = self.reader
        is_read = reader.is_stream and not reader.is_detached
        taken = reader.credited + SLACK_EVENTS if is_read else reader.next_event
        while self.acks and self.acks[0][0] <= taken:
            self.read = self.acks.popleft()[1]
        if self.read - self.acked < ACK_TOKENS:
            return None
        self.acked = self.read
        return self.acked
