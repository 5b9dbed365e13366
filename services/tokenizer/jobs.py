"""Background responses: what starting and following one needs, and what kvstores keep of them."""

import hashlib
from typing import NamedTuple

import msgspec

from deepmesh.wire.messages import ErrorCode, Rid, Submit
from services.tokenizer.generation import Generation
from services.tokenizer.reading import Json

EVENTS_KIND = "response_events"  # of the records that hold a chunk of events
INDEX_KIND = "background"  # of the records that say what a tokenizer runs
CHUNK_EVENTS = 128  # events in a record; the last one is written again as it grows


class Job(NamedTuple):
    """A prepared response that runs whether or not a client waits."""

    asked: Submit  # the request as it came
    submit: Submit  # of the response itself, which has a rid of its own
    generation: Generation
    head: Json  # the response before it has begun
    id: str


class Follow(NamedTuple):
    """A client wants the events of a background response behind number `after`."""

    id: str
    after: int


class JobNote(msgspec.Struct, frozen=True):
    """What the record of a background response says beside the response."""

    runner: str  # the tokenizer that runs it, also after a restart
    streams: bool
    asked: bytes = b""  # the `Submit` that began it; empty once it is over
    num_events: int = 0  # in chunks, once it is over


class EventChunk(msgspec.Struct, array_like=True):
    """`CHUNK_EVENTS` events of a background response, or its last ones."""

    events: list[bytes]
    is_last: bool = False
    failed: ErrorCode | None = None  # how it ended badly
    detail: str = ""


def job_rid(rid: Rid) -> Rid:
    """What engines call the response that a request begins; the same after a restart."""
    return hashlib.blake2b(rid, digest_size=16, salt=b"background").digest()


def chunk_id(id: str, index: int) -> str:
    """Name of the record with events from `index * CHUNK_EVENTS` on."""
    return f"{id}/{index}"


def chunk_ids(id: str, num_events: int) -> list[str]:
    """All of them; the last one holds the end, and perhaps no event."""
    return [chunk_id(id, index) for index in range(num_events // CHUNK_EVENTS + 1)]
