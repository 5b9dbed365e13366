"""What goes into the core and what comes out of it."""

from dataclasses import dataclass, field

from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Ack,
    Attach,
    Capacity,
    CompileGrammars,
    Drain,
    ExpertsPlaced,
    Failed,
    Finished,
    FlushCache,
    Generate,
    GpuDone,
    GrammarsCompiled,
    HandOff,
    HandOffDone,
    HandOffRefused,
    HandOffRenew,
    Hits,
    Load,
    LoadBlocks,
    Lookup,
    OpDone,
    Pause,
    PlaceExperts,
    PrefillFor,
    PrefixEvents,
    Progress,
    ReleaseBlocks,
    Reset,
    Resume,
    Shutdown,
    StepKind,
    StepResult,
    StopAt,
    StoreBlocks,
    SubmitStep,
    TokenBatch,
)

from .expert_orders import ExpertsPlanned, PlanExperts

Incoming = (
    Generate
    | Attach
    | Ack
    | StopAt
    | Abort
    | StepResult
    | GpuDone
    | Capacity
    | Progress
    | OpDone
    | Hits
    | PrefillFor
    | HandOff
    | HandOffRefused
    | HandOffRenew
    | HandOffDone
    | GrammarsCompiled
    | ExpertsPlaced
    | Drain
    | FlushCache
    | Pause
    | Resume
    | Shutdown
)
Outgoing = (
    Accepted
    | TokenBatch
    | Finished
    | Failed
    | Load
    | SubmitStep
    | Reset
    | Shutdown
    | StoreBlocks
    | LoadBlocks
    | Lookup
    | PrefillFor
    | HandOff
    | HandOffRefused
    | HandOffRenew
    | HandOffDone
    | ReleaseBlocks
    | CompileGrammars
    | PlaceExperts
    | PrefixEvents
)


@dataclass(frozen=True, slots=True)
class Mail:
    """A message of a peer; `peer` is empty for those of the process itself (SIGTERM)."""

    peer: str
    message: Incoming


@dataclass(frozen=True, slots=True)
class StepResults:
    """Results of any ranks and steps that came together, as (peer, result) in order of arrival:
    those of one step are applied in one pass."""

    results: list[tuple[str, StepResult]]


@dataclass(frozen=True, slots=True)
class TokenizerUp:
    """The link to a tokenizer is up."""

    peer: str
    incarnation: bytes


@dataclass(frozen=True, slots=True)
class TokenizerDown:
    """The link to a tokenizer is lost: its requests become orphans."""

    peer: str


@dataclass(frozen=True, slots=True)
class ExecutorUp:
    """The link to the executor of `rank` is up; it must be told to load."""

    peer: str
    rank: int


@dataclass(frozen=True, slots=True)
class ExecutorDown:
    """The executor of `rank` is gone: nothing on its device can be trusted any more."""

    peer: str
    rank: int


@dataclass(frozen=True, slots=True)
class KvstoreUp:
    """The link to kvstore `index` of the config is up. What it has is not known."""

    peer: str
    index: int


@dataclass(frozen=True, slots=True)
class KvstoreDown:
    """The link to kvstore `index` is lost: it is asked nothing, and what it had may be lost."""

    peer: str
    index: int


@dataclass(frozen=True, slots=True)
class KvstoreHolds:
    """A heartbeat of kvstore `index`: so many blocks and points it has, in all tiers."""

    index: int
    num_items: int


@dataclass(frozen=True, slots=True)
class RouterUp:
    """The link to a router is up: it wants to know which prefixes are here."""

    peer: str


@dataclass(frozen=True, slots=True)
class RouterDown:
    """The link to a router is lost."""

    peer: str


@dataclass(frozen=True, slots=True)
class PrefillerUp:
    """The link to a scheduler that computes prompts for this one is up."""

    peer: str


@dataclass(frozen=True, slots=True)
class PrefillerDown:
    """It is lost: this scheduler computes those prompts itself."""

    peer: str


@dataclass(frozen=True, slots=True)
class DecoderDown:
    """The link to a scheduler for which this one computes prompts is lost."""

    peer: str


@dataclass(frozen=True, slots=True)
class Tick:
    """All mail so far is in: plan, and look at the timers."""

    steps: int = 8  # planned at most, however many the depth allows


Event = (
    Mail
    | StepResults
    | TokenizerUp
    | TokenizerDown
    | ExecutorUp
    | ExecutorDown
    | KvstoreUp
    | KvstoreDown
    | KvstoreHolds
    | PrefillerUp
    | PrefillerDown
    | DecoderDown
    | RouterUp
    | RouterDown
    | ExpertsPlanned
    | Tick
)


@dataclass(frozen=True, slots=True)
class Send:
    """Hand `message` to the link of `peer`."""

    peer: str
    message: Outgoing


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request ended for its client: what its trace and the log need. Times in ns, 0 if never."""

    rid: bytes
    traceparent: str
    outcome: str  # stop, length, abort, or the error code's name
    detail: str
    prompt_tokens: int
    received_ns: int
    ended_ns: int
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    admitted_ns: int = 0
    first_token_ns: int = 0
    first_step: int = 0  # group steps that carried its rows
    last_step: int = 0
    number: int = 0  # the core's own, as in StepEnded.rids


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A prompt that another group computed was loaded, or failed to be: for its trace."""

    rid: bytes
    traceparent: str
    peer: str  # the scheduler that computed it
    num_tokens: int
    num_bytes: int  # 0: it failed
    asked_ns: int
    offered_ns: int
    ended_ns: int


@dataclass(frozen=True, slots=True)
class StepEnded:
    """All ranks of a group step have answered, or the step was abandoned."""

    group_step: int
    kind: StepKind
    num_rows: int
    num_tokens: int
    planned_ns: int
    applied_ns: int
    begin_ns: int = 0  # on the device of the rank that answered last
    end_ns: int = 0
    error: str = ""
    step_id: int = 0
    ready_ns: int = 0  # first rank's result
    last_rank: int = -1  # whose result came last
    placement: int = 0  # of routed experts; 0: the one that executors load
    rids: bytes = b""  # uint64 [num_rows], the core's own numbers of its requests


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator wants to read in the log."""

    level: str  # info, warning, error
    text: str
    fields: dict[str, str | int | float] = field(default_factory=dict[str, str | int | float])


Action = Send | RequestEnded | HandedOver | StepEnded | PlanExperts | Note
