"""Stored responses: what their records hold, and the endpoints that read them."""

import hashlib
from typing import Any

import msgspec

from deepmesh.wire.messages import ErrorCode, Rid
from services.tokenizer.answers import Answer
from services.tokenizer.choices import Merge, part_rid
from services.tokenizer.events import RecipeStream
from services.tokenizer.jobs import EVENTS_KIND, Follow, JobNote, chunk_ids
from services.tokenizer.normalize import check_fields
from services.tokenizer.reading import Json, as_text, boolean, integer, is_array, parse_object
from services.tokenizer.refusal import Refusal
from services.tokenizer.store_orders import Drop, Keep, Order, Stop, Wanted
from services.tokenizer.text_stream import TextStream

QUESTIONS = ("response", "response_delete", "response_cancel", "response_items")
RUNNING = "in_progress"
ACTIVE = ("queued", RUNNING)  # statuses of a response that is not over
MAX_PAGE = 100
_PREFIX = "resp_"
_ECHOED = (
    "instructions",
    "max_output_tokens",
    "metadata",
    "parallel_tool_calls",
    "previous_response_id",
    "reasoning",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_p",
)


class StoredResponse(msgspec.Struct):
    """One record."""

    response: Json
    items: list[Any]  # the whole input, that of earlier responses included
    job: JobNote | None = None  # it runs in the background, or did

    @property
    def history(self) -> list[Any]:
        """What comes before the input of a response that continues this one."""
        return [*self.items, *self.response["output"]]


def rid_of(id: str) -> Rid | None:
    """The request that made a response; None if the id is not one of ours."""
    digits = id.removeprefix(_PREFIX)
    if not id.startswith(_PREFIX) or len(digits) != 32:
        return None
    try:
        return bytes.fromhex(digits)
    except ValueError:
        return None


def encode(response: Json, items: list[Any], job: JobNote | None = None) -> bytes:
    """The data of a record."""
    return msgspec.json.encode(StoredResponse(response, items, job))


def decode(record: bytes) -> StoredResponse:
    """The record that holds this data."""
    return msgspec.json.decode(record, type=StoredResponse)


def begun(id: str, model: str, created_s: int, status: str = RUNNING) -> Json:
    """A response without output: one that runs, or that did not get far."""
    return {
        "id": id,
        "object": "response",
        "created_at": created_s,
        "model": model,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": None,
    }


def queued(id: str, model: str, created_s: int, body: Json) -> Json:
    """A background response before it has begun, with what it repeats of its request."""
    echo = {name: body[name] for name in _ECHOED if body.get(name) is not None}
    begin = begun(id, model, created_s, "queued")
    return {**begin, "background": True, "store": True, "previous_response_id": None, **echo}


def told(text: TextStream) -> Json | None:
    """The last state of its response that a text stream has told."""
    inner = text.lanes[0].text if isinstance(text, Merge) else text
    return inner.response if isinstance(inner, RecipeStream) else None


def input_items(value: object) -> list[Any]:
    """The input of a request as items."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value if is_array(value) else []


def find(id: str, record: bytes | None, param: str = "") -> StoredResponse | Wanted:
    """The record of a response; `record` is what a kvstore has of it, None if not yet asked.

    Raises:
        Refusal: NOT_FOUND.
    """
    if rid_of(id) is not None:
        if record is None:
            return Wanted(id)
        if record:
            return decode(record)
    detail = f"There is no stored response {id!r}: it was not stored, is too old, or was deleted."
    raise Refusal(detail, param, ErrorCode.NOT_FOUND)


def answer(protocol: str, body: bytes, record: bytes | None) -> Answer | Follow | Wanted:
    """GET, DELETE, cancel and input_items; the gateway puts path and query into the body.

    Raises:
        Refusal: it is not there, cannot be cancelled any more, or is not over yet.
    """
    given = parse_object(body)
    id = as_text(given.pop("id", None), "id")
    query = check_fields(protocol, {name.removesuffix("[]"): given[name] for name in given})
    follows = boolean(query, "stream")
    if "starting_after" in query and not follows:
        raise Refusal("`starting_after` goes with `stream`.", "starting_after")
    found = find(id, record)
    if isinstance(found, Wanted):
        return found
    match protocol:
        case "response":
            return _follow(id, found, query) if follows else _answer(found.response)
        case "response_delete":
            return _delete(id, found)
        case "response_cancel":
            return _cancel(id, found)
        case _:
            return _answer(_page(found.items, query))


def _answer(body: Json, *orders: Order) -> Answer:
    return Answer(msgspec.json.encode(body), orders=orders)


def _cancel(id: str, found: StoredResponse) -> Answer:
    status, rid = found.response["status"], rid_of(id)
    if status == "cancelled":
        return _answer(found.response)
    if status not in ACTIVE or rid is None:
        raise Refusal(f"The response is {status}: only one in progress can be cancelled.", "id")
    cancelled = {**found.response, "status": "cancelled"}
    rids = (rid, part_rid(rid, 0), part_rid(rid, 0, 1))
    return _answer(cancelled, Stop(rids), Keep(id, encode(cancelled, found.items, found.job)))


def _delete(id: str, found: StoredResponse) -> Answer:
    if found.response["status"] in ACTIVE:
        raise Refusal(f"The response is {found.response['status']}: cancel it first.", "id")
    job = found.job
    chunks = chunk_ids(id, job.num_events) if job is not None and job.streams else []
    drops = (Drop(chunk, EVENTS_KIND) for chunk in chunks)
    return _answer({"id": id, "object": "response", "deleted": True}, Drop(id), *drops)


def _follow(id: str, found: StoredResponse, query: Json) -> Follow:
    if found.job is None or not found.job.streams:
        detail = "Only a response that was created with `background` and `stream` can be followed."
        raise Refusal(detail, "stream")
    after = integer(query, "starting_after", 0, 2**53)
    return Follow(id, -1 if after is None else after)


def _page(items: list[Any], query: Json) -> Json:
    listed = [_listed(item, index) for index, item in enumerate(items)]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refusal("`order` is asc or desc.", "order")
    if order == "desc":
        listed.reverse()
    after, limit = query.get("after"), integer(query, "limit", 1, MAX_PAGE) or 20
    ids = [item["id"] for item in listed]
    if after is not None:
        if after not in ids:
            raise Refusal(f"`after` {after!r} is none of the items.", "after")
        listed = listed[ids.index(after) + 1 :]
    page = listed[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(listed) > limit,
    }


def _listed(item: Json, index: int) -> Json:
    """An input item in its long form, with an id that stays the same."""
    kind = item.get("type", "message")
    digest = hashlib.blake2b(msgspec.json.encode([index, item]), digest_size=12).hexdigest()
    content: object = item.get("content")
    if kind == "message" and isinstance(content, str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": part, "text": content}]}
    return {"type": kind, **item, "id": item.get("id") or f"item_{digest}"}
