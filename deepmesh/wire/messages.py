"""Every message between services; nothing else defines what goes on the wire.

Encoding: MessagePack arrays whose first element is the class name. Field order is the format:
fields are appended with a default, never reordered; a receiver ignores trailing fields it does
not know. `rid` is the request id (16 random bytes made by the gateway); executors see the
scheduler's own u64 instead. Times are nanoseconds of the wall clock unless a name says otherwise.
Packed arrays (`*_rows`, ids) are little-endian; their layouts are in `packed.py`.
"""

from enum import IntEnum

import msgspec

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 0

Ids = bytes  # int32, little-endian: token ids or block ids
Rid = bytes  # 16 bytes


class Struct(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the parts of messages: an array without a tag."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all messages. Field order is the wire format: append only, with a default."""


class ErrorCode(IntEnum):
    """Why a request failed. The gateway's `errors.py` maps each to an HTTP status."""

    INVALID = 1
    TOO_LONG = 2
    UNKNOWN_MODEL = 3
    UNAUTHORIZED = 4
    OVERLOADED = 5
    DEADLINE = 6
    ENGINE_ERROR = 7
    ENGINE_RESTARTED = 8
    GRAMMAR = 9
    SLOW_CONSUMER = 10
    UNKNOWN = 11
    INTERNAL = 12
    MISMATCH = 13  # the engine up there has another vocabulary than the tokenizer
    NOT_FOUND = 14  # no such stored response
    CANCELLED = 15  # by somebody else than its client's connection


class FinishReason(IntEnum):
    """Why a request ended well."""

    STOP = 1  # an eos or stop id, or a stop string (StopAt)
    LENGTH = 2
    ABORT = 3
    GRAMMAR = 4


# ---------------------------------------------------------------- all links


class ExpertStats(Struct, frozen=True):
    """How even the load of routed experts is over the ranks of a group; since the start.

    Rows are summed over layers and steps; `moe_lb` is those of the busiest over those of the mean.
    """

    busiest_rows: int = 0
    mean_rows: float = 0.0
    steps: list[int] = []  # layers of steps by that quotient, see `IMBALANCES`
    loads: list[int] = []  # experts of layers by their rows over the mean's, see `LOADS`
    placements: int = 0  # changes of where a layer's experts are
    moves: int = 0  # experts that ranks fetched for them
    touched: int = 0  # experts of layers that had rows in a record, over all records
    touchable: int = 0  # all experts of the layers that had rows in it


# Upper bounds of the bins; a last one has what is above them.
IMBALANCES = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0, 4.0)
LOADS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)


HANDOVERS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class HandoverStats(Struct, frozen=True):
    """Prefixes that one group computed for another; counters since the start."""

    asked: int = 0  # by this group, of another one
    loaded: int = 0  # of these, those that were pulled whole
    failed: int = 0  # refused, late, short, damaged or cut: computed here instead
    tokens: int = 0  # prompt tokens pulled
    bytes: int = 0  # pulled
    wait_ns: int = 0  # from asking to the offer, over all that were pulled
    pull_ns: int = 0  # from the offer to the last block, over all that were pulled
    served: int = 0  # by this group, to another one that pulled them whole
    refused: int = 0  # asked of this group, and not offered
    expired: int = 0  # offers that ended by their time, nobody having pulled or given up
    held: int = 0  # offers open now
    waits: list[int] = []  # those that were pulled whole by their wait, see `HANDOVERS_S`
    pulls: list[int] = []  # and by the time of their pull


class StepTotals(Struct, frozen=True):
    """Where the time of group steps went: sums since the start, in ns; the device is rank 0's."""

    steps: int = 0  # that all ranks have answered
    busy_ns: int = 0  # begin to end on the device
    gap_ns: int = 0  # end of a step to the begin of the next, which was runnable
    exposed_ns: int = 0  # end of a step until the host had enqueued the next one
    gaps: list[int] = []  # steps by the gap before them, see `GAPS_S`
    plan_ns: int = 0  # CPU of the scheduler: applying results and planning
    straggle_ns: int = 0  # first rank's result to the last one's
    rows: int = 0
    tokens: int = 0
    sizes: list[int] = []  # steps by their tokens, see `STEP_TOKENS`
    # Requests that have ended, by the time that they spent so, see `PHASES_S`; then the sums.
    queued: list[int] = []
    prefilled: list[int] = []
    decoded: list[int] = []
    phases_ns: tuple[int, int, int] = (0, 0, 0)


PHASES_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAPS_S = (1e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 5e-3, 2e-2)
STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class DraftStats(Struct, frozen=True):
    """Drafts of an EP group, and whether they pay; counters since the start, sums over ranks."""

    drafted: int = 0  # tokens proposed
    rows: int = 0  # rows that verified one or more
    draft_ns: int = 0  # in draft passes
    skipped_steps: int = 0  # group steps that drafted nothing, because it would not pay
    took_ns: int = 0  # of group steps that only decode
    # what the tokens of these would have taken without drafts, as far as costs are known
    plain_ns: int = 0
    errors: list[float] = []  # by place, lately: mean confidence less the share that was right


class LinkStats(Struct, frozen=True):
    """A link that is up, as one of its two sides sees it."""

    name: str  # of the side that tells
    service: str
    peer: str
    peer_service: str
    ready: bool = False  # the peer, by its last heartbeat
    requests: int = 0  # the same
    sent: int = 0  # messages to the peer since the link is up, heartbeats included
    received: int = 0
    dropped_spans: int = 0  # by the peer, as of its last heartbeat
    incarnation: bytes = b""  # of the peer: another one after each of its starts


class PointSource(IntEnum):
    """Why a resumable point was kept."""

    PROMPT = 0  # the end of a prompt
    MARK = 1  # the end of a beginning that its tokenizer named
    SHARED = 2  # two prompts parted there
    OUTPUT = 3
    LOADED = 4  # from a kvstore, or another group


class PointEnd(IntEnum):
    """Why a resumable point is there no more."""

    ROOM = 0  # its window or state blocks were needed
    BLOCKS = 1  # global blocks below it were
    SUPERSEDED = 2  # by a later point of the same output
    FLUSHED = 3


class CacheStats(Struct, frozen=True):
    """What one group's prefix cache did; counters since the start, but for `points`."""

    hit_tokens: tuple[int, int, int, int] = (0, 0, 0, 0)  # device, then as KvTier
    possible_tokens: int = 0  # of prompts, that had been computed before: no cache can hit more
    points: int = 0
    kept_points: list[int] = []  # by PointSource
    ended_points: list[int] = []  # by PointEnd
    prefetches: int = 0  # loads that began while nobody had a place for the request
    prefetched_tokens: int = 0  # that came whole
    skipped_tokens: int = 0  # positions of prompts that left out the upper layers


class DeviceWork(Struct, frozen=True):
    """What a rank's device has computed since its start, counted from the model's shapes and the
    rows of its steps; and the most that it could do."""

    rank: int = 0
    steps: int = 0
    busy_ns: int = 0  # begin to end of these steps
    flops: float = 0.0
    moved_bytes: float = 0.0  # read from its memory and written to it
    peak_flops: float = 0.0  # a second; 0: not known
    peak_bytes: float = 0.0  # a second


class ReplicaStats(Struct, frozen=True):
    """State of one EP group, sent in the scheduler's heartbeats and passed on to the gateway."""

    name: str
    ready: bool
    model: str = ""
    fingerprint: str = ""
    max_model_len: int = 0
    waiting: int = 0  # requests without a row in a step yet, or preempted
    running: int = 0  # requests that hold blocks
    waiting_tokens: int = 0  # prompt tokens not yet computed
    inflight_tokens: int = 0  # total_inflight_tokens: Σ q over unresolved rows
    free_blocks: tuple[int, int, int] = (0, 0, 0)  # global, window, state
    cached_blocks: tuple[int, int, int] = (0, 0, 0)  # evictable, kept for prefix hits
    total_blocks: tuple[int, int, int] = (0, 0, 0)
    preemptions: int = 0
    prompt_tokens: int = 0  # counters since the start
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    finished: int = 0
    failed: int = 0
    draining: bool = False
    failed_audits: int = 0  # invariants that did not hold: a bug, see the scheduler's log
    paused: bool = False
    store_hit_tokens: int = 0  # prompt tokens loaded from a kvstore
    stored_blocks: int = 0  # blocks and points written to a kvstore
    vocab_size: int = 0  # 0: not known yet
    vocabulary: str = ""  # digest of the tokens and their ids; empty: not known
    refused: str = ""  # set by a tokenizer that passes it on: why it sends nothing there
    pinned_blocks: tuple[int, int, int] = (0, 0, 0)  # kept by stores and loads in flight alone
    quarantined_blocks: int = 0  # of these, those of transfers that are over their deadline
    overrun_tokens: int = 0  # sampled behind an end or for a request that had left; since the start
    null_rows: int = 0
    dummy_tokens: int = 0  # of ranks without rows
    pad_tokens: int = 0  # up to the widest rank of each step
    late_results: int = 0  # of an engine epoch that is over
    verified_drafts: list[int] = []  # by their place behind the known token, since the start
    accepted_drafts: list[int] = []  # the same of those that were right
    experts: ExpertStats = ExpertStats()  # of a group of several ranks
    role: str = "both"  # or prefill, decode: what the router sends there
    handovers: HandoverStats = HandoverStats()
    context_tokens: int = 0  # of requests that hold blocks: prompt and output so far
    # What a step takes, ns, as profiled at load (StepCosts of the slowest rank); 0: not known
    prefill_token_ns: int = 0
    decode_row_ns: int = 0
    context_kilotoken_ns: int = 0
    shared_prompt_tokens: int = 0  # of chunks that all ranks computed together; since the start
    step_totals: StepTotals = StepTotals()
    cache: CacheStats = CacheStats()
    drafts: DraftStats = DraftStats()
    devices: list[DeviceWork] = []  # of the ranks that are linked


class RouterStats(Struct, frozen=True):
    """What the router knows and does, sent in its heartbeats and passed on to the gateway."""

    name: str
    waiting: int = 0  # requests without a replica
    known_points: int = 0  # resumable points of replicas that it remembers
    stored_points: int = 0  # the same of kvstores
    resyncs: int = 0  # times that a replica or kvstore began to tell anew what it has
    prompt_tokens: int = 0  # of requests sent to replicas, since the start
    hit_tokens: int = 0  # of these, those that were known to be there
    store_tokens: int = 0  # and those that were known to be in a kvstore alone
    decisions: list[tuple[str, int]] = []  # by what made the difference, since the start
    loads: list[tuple[str, float]] = []  # of each replica: ms of work, see docs/operations.md


# Upper bounds in seconds of the bins of transfers and of ages; a last one has what is above them.
TRANSFERS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0, 5.0)
AGES_S = (1.0, 10.0, 60.0, 600.0, 3600.0, 21_600.0, 86_400.0, 604_800.0)


class StoreHistogram(Struct, frozen=True):
    """Transfers of a kvstore by their time, or things by their age when they had to leave."""

    tier: str  # memory, frames, disk, shared
    op: str  # get, put, lookup; "age"
    counts: list[int] = []  # see `TRANSFERS_S`, `AGES_S`
    sum_s: float = 0.0


class StoreFigures(Struct, frozen=True):
    """State of one kvstore, sent in its heartbeats and passed on to the gateway."""

    name: str
    values: list[tuple[str, int]] = []  # as in `StoreStats`
    histograms: list[StoreHistogram] = []


class ServiceStats(Struct, frozen=True):
    """What a service tells its peers about its load, once a heartbeat."""

    ready: bool = False
    requests: int = 0
    replicas: list[ReplicaStats] = []
    router: RouterStats | None = None  # of a router, and passed on by tokenizers
    links: list[LinkStats] = []  # of this process, and those that it has learnt of
    stores: list[StoreFigures] = []  # of a kvstore, and those that a tokenizer knows
    dropped_spans: int = 0  # that an exporter did not take, since the start
    work: DeviceWork | None = None  # of an executor that counts it


class Hello(Message, frozen=True):
    """First message of the dialling side of every link."""

    service: str
    name: str
    incarnation: bytes  # 8 random bytes per process start
    protocol: tuple[int, int] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    build: str = ""
    config_hash: str = ""
    engine_epoch: int = 0
    shm_nonce: bytes = b""
    credits: int = 0
    clock: bytes = b""  # whose wall clock the sender reads; the same on one machine


class Welcome(Message, frozen=True):
    """Answer to `Hello` of the listening side; the link is up."""

    service: str
    name: str
    incarnation: bytes
    protocol: tuple[int, int] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)
    build: str = ""
    config_hash: str = ""
    engine_epoch: int = 0
    shm_nonce: bytes = b""
    credits: int = 0
    clock: bytes = b""  # whose wall clock the sender reads; the same on one machine


class Refused(Message, frozen=True):
    """The link cannot be used: more than a minor version apart, or data before `Hello`."""

    reason: str
    protocol: tuple[int, int] = (PROTOCOL_MAJOR, PROTOCOL_MINOR)


class Heartbeat(Message, frozen=True):
    """Both sides, every second."""

    stats: ServiceStats = ServiceStats()
    now_ns: int = 0
    # For peers that read another clock: the shortest way of a message from there lately, by both
    # clocks (0: none came), and how far the sender's clock is ahead of scheduler 0's, found over so
    # many links (-1: not known).
    way_ns: int = 0
    ahead_ns: int = 0
    clock_links: int = -1


class Drain(Message, frozen=True):
    """Accept nothing new, finish what is there, then end."""

    deadline_s: float = 30.0


class Shutdown(Message, frozen=True):
    """End now; requests that still run fail as OVERLOADED."""

    deadline_s: float = 5.0


# ---------------------------------------------------------------- gateway <-> tokenizer


class Submit(Message, frozen=True):
    """gateway -> tokenizer: one HTTP request as it came, plus what the gateway decided."""

    rid: Rid
    protocol: (
        str  # chat, completions, responses, messages, count_tokens, models, tokenize, detokenize,
        # response, response_delete, response_cancel, response_items: the body holds path and query
    )
    body: bytes
    seed: int  # 0 <= seed < 2**63; used unless the body names one
    api_key_hash: str = ""
    tenant_salt: bytes = b""
    priority: int = 0
    deadline_ns: int = 0
    traceparent: str = ""
    next_event: int = 0
    created_s: int = 0  # pinned `created` of the answer, so that a restart repeats it


class Cancel(Message, frozen=True):
    """gateway -> tokenizer: the client is gone. Idempotent."""

    rid: Rid


class Delta(Struct, frozen=True):
    """Consecutive events of one stream; each event is the bytes to write, SSE framing included."""

    rid: Rid
    first_event: int
    events: list[bytes]
    flags: int = 0  # bit 0: ADMITTED, headers with status 200 may go out


DELTA_ADMITTED = 1


class DeltaBatch(Message, frozen=True):
    """tokenizer -> gateway: all streams of this gateway that moved."""

    deltas: list[Delta]


class ResponseFinished(Message, frozen=True):
    """tokenizer -> gateway: the one good end of a request; nothing follows."""

    rid: Rid
    status: int  # HTTP status
    body: bytes = b""  # of a plain answer
    first_event: int = 0
    events: list[bytes] = []  # the last events of a stream
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""


class ResponseFailed(Message, frozen=True):
    """tokenizer -> gateway: the one bad end; the gateway shapes it for the caller's protocol."""

    rid: Rid
    code: ErrorCode
    detail: str
    param: str = ""  # the field at fault, when there is one
    retry_after_s: float = 0.0


class Credit(Message, frozen=True):
    """gateway -> tokenizer: how many events the client has taken so far (absolute)."""

    rid: Rid
    num_events: int


# ---------------------------------------------------------------- tokenizer <-> scheduler


class SamplingParams(Struct, frozen=True):
    """All of them, resolved; the executor applies them as they are."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: list[tuple[int, float]] = []
    ignore_eos: bool = False
    allowed_token_ids: Ids = b""  # only these may be sampled; empty: all
    bad_words: list[Ids] = []  # sequences that the output must not hold; of one id: never sampled


class Grammar(Struct, frozen=True):
    """Constraint on the output."""

    kind: str  # json_schema, regex, lark
    text: str
    start_after: Ids = b""  # masks begin after this token sequence (the end of thinking)
    hash: bytes = b""


class Generate(Message, frozen=True):
    """tokenizer -> (router ->) scheduler: one request, ready to be scheduled.

    Re-sent with the same (rid, attempt) until `Accepted` or `Failed` comes: idempotent.
    """

    rid: Rid
    attempt: int
    reply_to: str  # name of the tokenizer
    prompt_ids: Ids
    prompt_len: int  # P: prompt tokens of the user; later ids are a continuation
    confirmed_ids: Ids = b""  # output tokens known already (resubmission after a loss)
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    sub_index: int = 0
    stop_ids: Ids = b""  # eos included unless ignore_eos
    max_tokens: int = 16
    min_tokens: int = 0
    grammar: Grammar | None = None
    n_logprobs: int = -1  # -1 none, 0 the sampled token's only, k the k best too
    salt: bytes = b""
    priority: int = 0
    deadline_ns: int = 0
    traceparent: str = ""
    hint: bytes = b""  # prefix hash chain
    vocabulary: str = ""  # digest of the sender's; an engine with another one refuses it
    n_prompt_logprobs: int = -1  # of the prompt's ids but the first, as n_logprobs
    tenant: bytes = b""  # who asks; tenants share what there is fairly
    prefill_at: str = ""  # name of the scheduler that is to compute the prompt; empty: this one
    marks: Ids = b""  # lengths of beginnings that other prompts share: the system prompt
    fingerprint: str = ""  # of the engine that computed confirmed_ids; another one refuses them
    # Of confirmed_ids, as in TokenRow: who takes the request over has them from nobody else
    confirmed_logprobs: bytes = b""  # empty: not asked for, or not known
    confirmed_top_ids: Ids = b""
    confirmed_top_logprobs: bytes = b""


class Accepted(Message, frozen=True):
    """scheduler -> tokenizer."""

    rid: Rid
    attempt: int
    replica: str
    cached_tokens: int = 0


class Attach(Message, frozen=True):
    """tokenizer -> scheduler: send this request's tokens to me, from `from_pos` on."""

    rid: Rid
    attempt: int
    reply_to: str
    from_pos: int


class PromptLogprobs(Struct, frozen=True):
    """Log-probabilities of consecutive ids of a prompt, each given the ids before it."""

    first: int  # position of the first id, from 1 on
    logprobs: bytes  # float32 [num_ids]
    top_ids: Ids = b""  # int32 [num_ids, n_prompt_logprobs], best first
    top_logprobs: bytes = b""  # float32 [num_ids, n_prompt_logprobs]
    row: int = 0  # in a StepResult: the row of the step that computed them
    ranks: bytes = b""  # int32 [num_ids], place of each among all ids, 1 the best; empty: unknown


class TokenRow(Struct, frozen=True):
    """New output tokens of one request."""

    rid: Rid
    pos: int  # index in the output of the first id
    ids: Ids
    logprobs: bytes = b""  # float32 [num_ids], when asked for
    top_ids: Ids = b""  # int32 [num_ids, n_logprobs], best first
    top_logprobs: bytes = b""  # float32 [num_ids, n_logprobs]
    cached_tokens: int = 0  # prompt tokens served from the prefix cache, at pos 0
    prompt: PromptLogprobs | None = None  # of the whole prompt, at pos 0, when asked for
    fingerprint: str = ""  # of the engine (Capacity.fingerprint), at pos 0


class TokenBatch(Message, frozen=True):
    """scheduler -> tokenizer: all requests of this tokenizer that moved in a step."""

    group_step: int
    step_end_ns: int
    rows: list[TokenRow]


class AckRow(Struct, frozen=True):
    """`pos` output tokens have been turned into events that the client took."""

    rid: Rid
    pos: int
    done: bool = False  # the terminal message has arrived, too


class Ack(Message, frozen=True):
    """tokenizer -> scheduler: confirmed tokens below `pos` may be dropped after the end.

    tokenizer -> router: a scheduler has accepted these requests, or they are over (`done`).
    """

    rows: list[AckRow]
    # Token batches of this scheduler up to this step have been turned into events: who says so
    # is not sent many more than it has taken. 0: nothing said.
    group_step: int = 0


class StopAt(Message, frozen=True):
    """tokenizer -> scheduler: a stop string was found; keep `n_keep` output tokens."""

    rid: Rid
    n_keep: int


class Abort(Message, frozen=True):
    """tokenizer -> scheduler. Idempotent; leaves a tombstone."""

    rid: Rid
    attempt: int = 0


class Finished(Message, frozen=True):
    """scheduler -> tokenizer. Each request ends in one Finished or one Failed."""

    rid: Rid
    reason: FinishReason
    final_pos: int  # number of output tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0


class Failed(Message, frozen=True):
    """scheduler or router -> tokenizer. Each request ends in one Finished or one Failed."""

    rid: Rid
    code: ErrorCode
    detail: str
    param: str = ""
    retry_after_s: float = 0.0
    final_pos: int = 0


# ---------------------------------------------------------------- scheduler <-> executor


class Pool(IntEnum):
    """Classes of KV blocks (docs/architecture.md, KV classes)."""

    GLOBAL = 0  # compressed rows and index keys, 64 tokens a block
    WINDOW = 1  # 64 rows of every layer, draft layers included
    STATE = 2  # open compressor pair, last 3 Engram ids


class Load(Message, frozen=True):
    """scheduler -> executor: load your shard, answer `Progress` and then `Capacity`."""

    engine_epoch: int
    rank: int
    ranks: int
    model: str  # path
    numerics: str = "bf16"


class Pause(Message, frozen=True):
    """operator -> scheduler: after the steps in flight, hold between two group steps.

    The last step before the pause says so to all ranks (`Descriptor.flags`); requests keep what
    they hold, new ones are queued. Idempotent.
    """


class Resume(Message, frozen=True):
    """operator -> scheduler: go on with the next numbered group step. Idempotent."""


class FlushCache(Message, frozen=True):
    """gateway -> tokenizer -> schedulers: forget every cached prefix that no request holds."""


class SetLogLevel(Message, frozen=True):
    """gateway -> tokenizer -> schedulers: what each logs, until its process ends."""

    level: str  # debug, info, warning, error


class Progress(Message, frozen=True):
    """executor -> scheduler: how far loading is."""

    stage: str
    done: int
    total: int


class StepCosts(Struct, frozen=True):
    """What a step takes on one rank, ns, as profiled at load; all 0: not known."""

    base_ns: int = 0
    prefill_token_ns: int = 0
    decode_row_ns: int = 0
    context_kilotoken_ns: int = 0  # for each 1,000 positions that decode rows attend to
    verify: list[tuple[int, int]] = []  # (tokens, ns) of captured verify tiers, ascending
    draft_base_ns: int = 0  # of a draft pass
    draft_row_ns: int = 0  # for each row of it


class PromptWork(Struct, frozen=True):
    """What the tokens of a prompt cost, for ranks that compute a chunk of one together."""

    positions: list[int]  # ascending
    work: list[int]  # of a token there, any unit, in layers that all tokens pass; linear between
    align: int  # parts begin at multiples of this


class Capacity(Message, frozen=True):
    """executor -> scheduler: what this rank can hold; loading is complete."""

    engine_epoch: int
    rank: int
    num_global_blocks: int
    num_window_blocks: int
    num_state_blocks: int
    num_slots: int
    max_model_len: int
    vocab_size: int
    window: int  # W
    block_size: int = 64
    chunk_align: int = 128
    draft_len: int = 0  # d_max
    one_kernel_class: bool = True  # prefill and decode kernels give the same bits
    fingerprint: str = ""  # WEIGHTS.ENGINE: of the checkpoint; of version and numerics
    costs: StepCosts = StepCosts()
    has_masks: bool = False  # it can keep an output to a grammar
    block_bytes: tuple[int, int, int] = (0, 0, 0)  # as a kvstore keeps a block of each pool
    vocabulary: str = ""  # digest of the tokens and their ids; empty: not known
    grammars: int = 0  # that it keeps compiled; 0: it takes no CompileGrammars
    # layers, experts of each, and copies beside one of each for which a layer has room over all
    # ranks; 0 layers: it takes no PlaceExperts
    experts: tuple[int, int, int] = (0, 0, 0)
    prompt_work: PromptWork | None = None  # None: it computes chunks alone
    # positions before an end whose window rows are to be exact that have to pass all layers; 0: no
    # row may leave any out (packed.ROW.skip)
    prefill_halo: int = 0


class StepKind(IntEnum):
    """Kind of a group step."""

    PREFILL = 0
    DECODE = 1
    MIXED = 2
    DUMMY = 3


class RowMode(IntEnum):
    """What a row of a step computes."""

    PREFILL = 0
    DECODE = 1
    VERIFY = 2
    DUMMY = 3


class RowSource(IntEnum):
    """Where a row's input ids come from."""

    HOST = 0  # ids of the slot's prompt, at exact positions
    DEVICE = 1  # the token(s) that `producer_step` left in the slot


class GroupFlag(IntEnum):
    """Control operations of a group step, as bits: they take effect behind it on all ranks."""

    PAUSE = 1  # no step follows until the group is resumed
    DRAIN = 2  # no step follows in this engine epoch


class Split(Struct, frozen=True):
    """All ranks compute one prompt's chunk together, a part each. Rank (home + 1 + i) % ranks has
    part i: the request's own rank, home, has the last one."""

    home: int
    bounds: list[int]  # positions at which parts begin, and the end of the last
    tail: int  # positions below leave out the upper layers, as ROW.skip says; 0: none do
    shared: int  # the others have compressed rows below this; home gives them those up to the chunk


class Descriptor(Struct, frozen=True):
    """What all ranks of a group agree on for one numbered group step."""

    kind: StepKind
    padded_tokens: int
    padded_rows: int
    graph_key: int = 0  # 0 is eager
    comm_mode: int = 0  # 0 none, 1 low latency, 2 high throughput
    n_draft_passes: int = 0
    verify_capacity: int = 0
    n_ubatch: int = 1
    flags: int = 0  # GroupFlag bits
    placement: int = 0  # number of the PlaceExperts in force from this step on; 0: none
    split: Split | None = None  # its rows are one chunk, which all ranks compute together
    # Of the rank that has most, for devices whose forwards are all of an agreed size:
    decode_rows: int = 0  # rows that decode kernels compute
    walks: int = 0  # positions before the last one of such a row: output computed again
    prefill_tokens: int = 0


class SlotInit(Struct, frozen=True):
    """A request enters a device slot: all that stays true while it lives there."""

    slot: int
    gen: int
    rid: int  # the scheduler's u64
    epoch: int
    ids: Ids  # prompt, and the confirmed output after a recompute
    prompt_len: int  # P, original
    max_len: int  # prompt + output tokens at which the request ends
    min_len: int = 0  # no stop id may be sampled below this length
    sampling: SamplingParams = SamplingParams()
    seed: int = 0
    sub_index: int = 0
    stop_ids: Ids = b""
    grammar: Grammar | None = None
    n_logprobs: int = -1
    start: int = 0  # C at the start of the epoch: positions below are in cached blocks
    state_block: int = 0
    traceparent: str = ""  # of the request; its spans on the device go there
    n_prompt_logprobs: int = -1


class OpKind(IntEnum):
    """Work on blocks that is not a row."""

    COPY = 0
    ZERO = 1


class BlockOp(Struct, frozen=True):
    """Runs on the device stream before the rows of its step (`after` false) or behind them."""

    op_id: int
    kind: OpKind
    pool: Pool
    src: int
    dst: int
    after: bool = False


class Part(Struct, frozen=True):
    """What a rank needs for its part of a `Split`, whatever its slots hold."""

    ids: Ids  # up to the part's end, with at least a window before its begin, as far as there is
    global_blocks: Ids  # by position // block_size, up to the chunk's end
    first_window: int  # block that the first of window_blocks is, by position // block_size
    window_blocks: Ids  # from the window before the part to its end
    state_block: int


class SubmitStep(Message, frozen=True):
    """scheduler -> executor: one rank's part of a numbered group step."""

    engine_epoch: int
    step_id: int
    group_step: int
    group_epoch: int
    descriptor: Descriptor
    rows: bytes  # packed.ROW
    init: list[SlotInit] = []
    blocks: bytes = b""  # packed.BLOCK: appended to block tables
    ops: list[BlockOp] = []
    close: bytes = b""  # packed.SLOT: slots that are free again
    cancel: bytes = b""  # packed.CANCEL: rows that became null rows
    applied: int = 0  # highest step that the scheduler has applied
    part: Part | None = None  # of descriptor.split


class StepStatus(IntEnum):
    """Outcome of a step on one rank."""

    OK = 0
    ERROR = 1
    SKIPPED = 2


class DoneReason(IntEnum):
    """What the device saw at the end of a row."""

    NONE = 0
    EOS = 1  # an id of stop_ids
    LENGTH = 2
    NULL = 3  # the row sampled nothing: it came after a stop, was cancelled, or lacked its mask
    ERROR = 4  # logits were not finite: this request only
    GRAMMAR = 5  # the grammar is complete behind the last token: nothing may follow
    GRAMMAR_ERROR = 6  # the matcher refused a token or died: this request only


class StepTimes(Struct, frozen=True):
    """Stamps of one step on one rank, wall clock, ns."""

    received_ns: int = 0
    enqueued_ns: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    copied_ns: int = 0
    queue_depth: int = 0


class Drafting(Struct, frozen=True):
    """What a step's draft pass was, and how good those before it were."""

    took_ns: int
    drafts: int  # tokens proposed
    errors: list[float] = []  # see DraftStats


class StepResult(Message, frozen=True):
    """executor -> scheduler: TOKENS_READY of one step; `gpu_done` may lag behind."""

    engine_epoch: int
    step_id: int
    rank: int
    status: StepStatus
    rows: bytes  # packed.RESULT, in the order of the step's rows
    tokens: Ids = b""  # flat, n_tok per row
    logprobs: bytes = b""  # float32 [num_tokens]
    top_ids: Ids = b""  # flat, n_logprobs of its row per token
    top_logprobs: bytes = b""
    confidence: bytes = b""  # histogram of draft survival
    gpu_done: int = 0  # highest step whose tail is complete on this rank
    ops_done: list[tuple[int, int]] = []  # (op_id, status)
    times: StepTimes = StepTimes()
    error: str = ""
    prompt: list[PromptLogprobs] = []  # of rows that computed parts of a prompt
    expert_rows: bytes = b""  # uint32 [layers]: rows that came to this rank's experts
    # uint32 [layers, experts]: rows of this rank's tokens since they were reported last; in steps
    # whose number is a multiple of scheduler.experts_record_steps
    expert_loads: bytes = b""
    drafting: Drafting | None = None  # None: it had no draft pass


class GpuDone(Message, frozen=True):
    """executor -> scheduler: the watermark alone, when no result is there to carry it."""

    engine_epoch: int
    rank: int
    gpu_done: int
    ops_done: list[tuple[int, int]] = []


class Reset(Message, frozen=True):
    """scheduler -> executor: abandon all steps of older epochs, keep the weights."""

    engine_epoch: int


class PlaceExperts(Message, frozen=True):
    """scheduler -> executor: fetch the experts that you lack for this placement.

    It is in force from the first step on whose descriptor has its number; until then the rank
    computes as before. A later one with another `base` replaces it. The same to all ranks.
    """

    engine_epoch: int
    number: int  # greater than any before
    layers: list[tuple[int, bytes]]  # layer; int32 [ranks, slots]: expert in each slot, -1: none
    base: int = 0  # number of the placement that is in force when this one comes to be


class ExpertsPlaced(Message, frozen=True):
    """executor -> scheduler: all experts of a placement are here, or why they are not."""

    engine_epoch: int
    rank: int
    number: int
    error: str = ""


class CompileGrammars(Message, frozen=True):
    """scheduler -> executor: requests that wait need these; compile them ahead of their steps."""

    engine_epoch: int
    orders: list[tuple[int, Grammar]]  # numbers of the scheduler's own


class GrammarsCompiled(Message, frozen=True):
    """executor -> scheduler: these are ready, or nothing is won by waiting for them any longer."""

    engine_epoch: int
    rank: int
    orders: list[int]


# ---------------------------------------------------------------- executor, scheduler <-> kvstore


class KvKind(IntEnum):
    """What a hash names in a kvstore."""

    BLOCK = 0  # the global block that ends the chain
    POINT = 1  # a resumable point at the end of the chain: window blocks and small state


class KvTier(IntEnum):
    """Where a kvstore keeps something; slower tiers have greater numbers."""

    NONE = 0
    MEMORY = 1
    DISK = 2
    SHARED = 3


class KvStatus(IntEnum):
    """Outcome of an order to a kvstore or of a transfer."""

    OK = 0
    MISS = 1  # not there, or damaged: compute it
    FULL = 2  # no room, or no room of the caller's
    INVALID = 3  # the order itself is wrong; `detail` or the log says why
    ERROR = 4  # the disk failed


class KvItem(Struct, frozen=True):
    """One block or point. Its payload is its parts one after another."""

    hash: bytes  # 16 bytes: chained hash; model and salt are in its root
    kind: KvKind
    parts: list[tuple[Pool, int]] = []  # bytes of each: a point's window blocks, then its state
    checksum: int = 0  # CRC-32 (zlib) of the payload, made by the writer, checked by the reader
    tier: KvTier = KvTier.NONE  # in answers
    extents: list[tuple[int, int]] = []  # (offset, bytes) in the shared file; none: attached


class KvMove(Struct, frozen=True):
    """One block or point, and the pool blocks of the device that hold its parts."""

    hash: bytes
    kind: KvKind
    blocks: list[tuple[Pool, int]]


class SharedFile(Message, frozen=True):
    """kvstore -> executor, once a link is up: transfers may go through this file.

    It begins with `num_nonce_bytes` random bytes; who answers with these sees the same file.
    """

    path: str
    num_bytes: int
    num_nonce_bytes: int = 16


class SharedFileSeen(Message, frozen=True):
    """executor -> kvstore: the first bytes of the file; without this, payloads are attachments."""

    nonce: bytes


class Reserve(Message, frozen=True):
    """executor -> kvstore: make room in the shared file for items that are to be put."""

    op_id: int
    items: list[KvItem]


class Reserved(Message, frozen=True):
    """kvstore -> executor: write where there are extents, then `PutBlocks` with the same op_id.

    An item without extents is there already, or has no room.
    """

    op_id: int
    status: KvStatus
    items: list[KvItem]


class PutBlocks(Message, frozen=True):
    """executor -> kvstore. One attachment per item, in order; none for items with extents."""

    op_id: int
    engine_epoch: int
    items: list[KvItem]
    traceparent: str = ""


class PutDone(Message, frozen=True):
    """kvstore -> executor: what is kept from now on, on disk also over a crash."""

    op_id: int
    status: KvStatus
    stored: bytes = b""  # one byte per item: its KvTier, the slowest that holds it
    detail: str = ""


class GetBlocks(Message, frozen=True):
    """executor -> kvstore."""

    op_id: int
    items: list[KvItem]  # hash and kind
    traceparent: str = ""


class Blocks(Message, frozen=True):
    """kvstore -> executor: the items asked for, in order; a miss has tier NONE.

    Items with extents stay where they are until `BlocksRead`; the others that are there have one
    attachment each, in order.
    """

    op_id: int
    status: KvStatus
    items: list[KvItem] = []
    detail: str = ""


class BlocksRead(Message, frozen=True):
    """executor -> kvstore: the extents of a `Blocks` have been copied."""

    op_id: int
    damaged: list[int] = []  # indices of items whose checksum was wrong: the store drops them


class Lookup(Message, frozen=True):
    """scheduler -> kvstore: how much of this prefix is there?"""

    lookup_id: int
    chain: bytes  # 16-byte chained hashes of the prompt's full blocks
    traceparent: str = ""


class Hits(Message, frozen=True):
    """kvstore -> scheduler. A hint: what is found now may be gone when it is fetched."""

    lookup_id: int
    num_blocks: int  # longest run of blocks from the start
    num_point_blocks: int  # blocks below the last resumable point in that run
    tier: KvTier = KvTier.NONE  # slowest tier needed to resume there


class StoreBlocks(Message, frozen=True):
    """scheduler -> executor: copy to the kvstore once `after_step` is complete, its tail included.

    A step of an older engine epoch counts as complete. Answered by one `OpDone`, unless the epoch
    ends first: then the executor touches none of the blocks any more, and says nothing.
    """

    op_id: int
    engine_epoch: int
    after_step: int
    moves: list[KvMove]
    traceparent: str = ""
    store: str = ""  # name of the kvstore; empty: the only one; its own: kept for a hand-over


class LoadBlocks(Message, frozen=True):
    """scheduler -> executor: fill these blocks from the kvstore once `after_step` is complete.

    As with `StoreBlocks`; before the first step of an epoch there is nothing to wait for.
    """

    op_id: int
    engine_epoch: int
    after_step: int
    moves: list[KvMove]
    traceparent: str = ""
    store: str = ""  # name of the kvstore; empty: the only one


class OpDone(Message, frozen=True):
    """executor -> scheduler: a store or load has ended; its blocks are not touched any more."""

    op_id: int
    engine_epoch: int
    status: KvStatus  # MISS: some moves of a load failed
    done: bytes = b""  # one byte per move, 1 where it succeeded


class PutRecord(Message, frozen=True):
    """tokenizer -> kvstore: keep a small record, replacing one of the same name."""

    op_id: int
    kind: str  # response, batch, …
    id: str
    owner: str  # hash of the API key; others do not see the record
    data: bytes
    ttl_s: float


class GetRecord(Message, frozen=True):
    """tokenizer -> kvstore."""

    op_id: int
    kind: str
    id: str
    owner: str


class DropRecord(Message, frozen=True):
    """tokenizer -> kvstore. Idempotent."""

    op_id: int
    kind: str
    id: str
    owner: str


class Record(Message, frozen=True):
    """kvstore -> tokenizer: the answer to each of the three."""

    op_id: int
    status: KvStatus
    kind: str
    id: str
    owner: str
    data: bytes = b""
    ttl_s: float = 0.0  # what is left of it
    detail: str = ""


class BlockEvents(Message, frozen=True):
    """kvstore -> router: which blocks and points it has; begins with all of them."""

    first: bool  # forget what was said before
    added: list[KvItem] = []
    dropped: list[KvItem] = []


class PrefixEvents(Message, frozen=True):
    """scheduler -> router: which resumable points its group has; begins with all of them.

    A point is named as in a kvstore: by the chained hash of the prefix that ends there.
    """

    first: bool  # forget what was said before
    fingerprint: str  # of the engine: the chains of its prompts begin with it
    block_size: int  # tokens of a link of a chain
    chunk_align: int  # tokens: points lie at multiples of it
    added: bytes = b""  # hashes of 16 bytes each
    dropped: bytes = b""


class GetStoreStats(Message, frozen=True):
    """anyone -> kvstore."""

    op_id: int


class StoreStats(Message, frozen=True):
    """kvstore -> who asked: counters since the start and present levels, by name."""

    op_id: int
    values: list[tuple[str, int]]
    histograms: list[StoreHistogram] = []
    holders: list[tuple[str, int]] = []  # items of each kvstore that shares the shared tier


class FlushStore(Message, frozen=True):
    """operator -> kvstore: forget all blocks and points that nobody reads now, not the records."""

    op_id: int
    shared: bool = False  # in the shared tier, too


class StoreFlushed(Message, frozen=True):
    """kvstore -> operator."""

    op_id: int
    status: KvStatus
    num_items: int = 0  # blocks and points that are gone here
    num_shared: int = 0  # keys that are gone in the shared tier
    detail: str = ""


class GetRecords(Message, frozen=True):
    """gateway -> tokenizer -> scheduler, router, kvstore; scheduler -> executor: what you keep in
    memory. Answered by one `Records` of each process; a repeated `op_id` is not."""

    op_id: int
    since_ns: int = 0  # step records from then on; 0: none
    trace_id: str = ""  # spans of this trace, 32 hex digits; empty: none


class StepNote(Struct, frozen=True):
    """What a group step held."""

    step: int
    kind: StepKind
    rows: int
    tokens: int
    rids: list[Rid] = []  # of its requests


class Records(Message, frozen=True):
    """Back the same way. Times are those of scheduler 0's clock, as well as that is known."""

    op_id: int
    process: str
    service: str
    slices: list[tuple[int, int, int, int, int]] = []  # timeline.Kind, step, start, end (ns), value
    steps: list[StepNote] = []
    spans: bytes = b""  # JSON, one span a line
    rank: int = 0
    work: list[tuple[int, float, float]] = []  # of an executor: step, flops, moved bytes
    peaks: tuple[float, float] = (0.0, 0.0)  # see DeviceWork


class KeepTrace(Message, frozen=True):
    """gateway -> tokenizer -> scheduler, router: export the spans of this unsampled trace, too; its
    request failed or was slow."""

    trace_id: str


# ---------------------------------------------------------------- scheduler <-> scheduler


class PrefillFor(Message, frozen=True):
    """decode side -> prefill side: compute this prefix and keep a copy for me.

    Answered by `HandOff` or `HandOffRefused`. A number names one hand-over for ever; when the link
    is lost, all of its hand-overs are over on both sides.
    """

    number: int
    rid: Rid  # of the request
    attempt: int
    ids: Ids  # the prefix, a multiple of chunk_align long, and one more
    ttl_s: float  # the copy is kept so long after the last `HandOffRenew`
    prompt_len: int = 0  # P of the request; what lies beyond is output of it
    salt: bytes = b""
    priority: int = 0
    tenant: bytes = b""
    traceparent: str = ""


class HandOff(Message, frozen=True):
    """prefill side -> decode side: all of the prefix is there, and can be loaded."""

    number: int
    rid: Rid
    attempt: int
    source: str  # name of the executor that has the copy, as the `store` of `LoadBlocks`
    engine_epoch: int  # of the prefill side; the copy ends with it
    num_tokens: int
    key: bytes  # 16 bytes: chained hash of the last block; tokens, salt and model are in it
    num_items: int = 0  # blocks and the point
    cached_tokens: int = 0  # of the prefix, those that nobody computed for this


class HandOffRefused(Message, frozen=True):
    """prefill side -> decode side: not computed, or not kept any longer; compute it yourself."""

    number: int
    detail: str


class HandOffRenew(Message, frozen=True):
    """decode side -> prefill side: these are still wanted."""

    numbers: list[int]


class HandOffDone(Message, frozen=True):
    """decode side -> prefill side: loaded, or not wanted any more; forget the copy. Idempotent."""

    number: int
    loaded: bool


class ReleaseBlocks(Message, frozen=True):
    """scheduler -> executor: copies that these `StoreBlocks` to itself made are not needed."""

    engine_epoch: int
    op_ids: list[int]


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Heartbeat
    | Drain
    | Shutdown
    | Submit
    | Cancel
    | DeltaBatch
    | ResponseFinished
    | ResponseFailed
    | Credit
    | Generate
    | Accepted
    | Attach
    | TokenBatch
    | Ack
    | StopAt
    | Abort
    | Finished
    | Failed
    | Load
    | Pause
    | Resume
    | Progress
    | Capacity
    | SubmitStep
    | StepResult
    | GpuDone
    | Reset
    | SharedFile
    | SharedFileSeen
    | Reserve
    | Reserved
    | PutBlocks
    | PutDone
    | GetBlocks
    | Blocks
    | BlocksRead
    | Lookup
    | Hits
    | StoreBlocks
    | LoadBlocks
    | OpDone
    | PutRecord
    | GetRecord
    | DropRecord
    | Record
    | BlockEvents
    | GetStoreStats
    | StoreStats
    | FlushCache
    | SetLogLevel
    | CompileGrammars
    | GrammarsCompiled
    | PlaceExperts
    | ExpertsPlaced
    | PrefixEvents
    | GetRecords
    | Records
    | KeepTrace
    | FlushStore
    | StoreFlushed
    | PrefillFor
    | HandOff
    | HandOffRefused
    | HandOffRenew
    | HandOffDone
    | ReleaseBlocks
)
