"""Responses in the background: promised once kept, run without a client, followed from anywhere."""

from typing import Any

import msgspec
import pytest

from deepmesh.config import Config
from deepmesh.wire.messages import (
    Abort,
    Accepted,
    Cancel,
    Credit,
    DeltaBatch,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    ResponseFailed,
    ResponseFinished,
    Rid,
    Submit,
    TokenBatch,
    TokenRow,
)
from deepmesh.wire.packed import pack_ids
from services.tokenizer.core import Core
from services.tokenizer.jobs import CHUNK_EVENTS
from tests.services.test_stored_responses import CONFIG, FIRST, Kept, Shop, prompt_of
from tests.services.tokenizer_harness import EOS, ids_of

PLAIN = {**FIRST, "background": True}
STREAM = {**PLAIN, "stream": True}
TEXT = "One, two, three and so on: Grüße."


class Office(Shop):
    """A tokenizer of some name; `say` and `started` are about what runs in the background."""

    def __init__(self, kept: Kept, name: str = "tokenizer-0", config: Config = CONFIG) -> None:
        self._rids = 0
        super().__init__(kept, config)
        self.core = Core(name, config)
        self.up()
        self.core.store_up(self.clock)
        self.act()

    def begin(
        self, body: dict[str, Any], *, rid: int = 0, next_event: int = 0, owner: str = "me"
    ) -> Rid:
        """A request; its rid."""
        self._rids += 1
        name = (rid or 1000 + self._rids).to_bytes(16, "big")
        raw = msgspec.json.encode(body)
        submit = Submit(name, "responses", raw, 7, owner, created_s=1_700_000_000)
        self.gateway(msgspec.structs.replace(submit, next_event=next_event))
        return name

    def follow(self, id: str, after: int = -1, *, owner: str = "me", next_event: int = 0) -> Rid:
        query: dict[str, Any] = {"id": id, "stream": True}
        if after >= 0:
            query["starting_after"] = after
        self._rids += 1
        name = (2000 + self._rids).to_bytes(16, "big")
        raw = msgspec.json.encode(query)
        self.gateway(Submit(name, "response", raw, 7, owner, next_event=next_event))
        return name

    def end_of(self, rid: Rid) -> ResponseFinished | ResponseFailed | None:
        ends = [end for end in self.ends if end.rid == rid]
        assert len(ends) <= 1
        return ends[0] if ends else None

    def answer(self, rid: Rid) -> dict[str, Any]:
        end = self.end_of(rid)
        assert isinstance(end, ResponseFinished), end
        return msgspec.json.decode(end.body)

    def failure(self, rid: Rid) -> ResponseFailed:
        end = self.end_of(rid)
        assert isinstance(end, ResponseFailed), end
        return end

    def told_to(self, rid: Rid) -> list[dict[str, Any]]:
        """What one request was sent, in order and without a gap."""
        found: list[dict[str, Any]] = []
        first: int | None = None
        for batch in self.to_gateway:
            for delta in batch.deltas if isinstance(batch, DeltaBatch) else ():
                if delta.rid != rid:
                    continue
                first = delta.first_event if first is None else first
                assert delta.first_event == first + len(found)
                found += [msgspec.json.decode(e.split(b"data: ", 1)[1]) for e in delta.events]
        return found

    def tell(self, part: Generate, ids: list[int], pos: int = 0) -> None:
        self.scheduler(TokenBatch(1, 1, [TokenRow(part.rid, pos, pack_ids(ids))]))

    def finish(self, part: Generate, text: str = TEXT) -> None:
        ids = [*ids_of(text), EOS]
        self.tell(part, ids)
        self.scheduler(Finished(part.rid, FinishReason.STOP, len(ids)))


def text_of(response: dict[str, Any]) -> str:
    return response["output"][0]["content"][0]["text"]


def numbers(events: list[dict[str, Any]]) -> list[int]:
    return [event["sequence_number"] for event in events]


def test_it_is_promised_at_once_and_found_when_it_is_done() -> None:
    kept: Kept = {}
    shop, other = Office(kept), Office(kept, "tokenizer-1")
    promised = shop.answer(shop.begin({**PLAIN, "metadata": {"a": "b"}, "instructions": "Be."}))
    assert promised["status"] == "queued"
    assert promised["background"] is True
    assert promised["metadata"] == {"a": "b"}
    assert promised["instructions"] == "Be."
    assert other.get("response", promised["id"])["status"] == "queued"
    part = shop.started()
    assert "My name is Ann." in prompt_of(part)
    shop.scheduler(Accepted(part.rid, 1, "scheduler-0"))
    shop.wait(0.3)
    assert other.get("response", promised["id"])["status"] == "in_progress"
    shop.finish(part)
    found = other.get("response", promised["id"])
    assert (found["status"], found["id"], text_of(found)) == ("completed", promised["id"], TEXT)
    assert found["background"] is True
    assert found["usage"]["output_tokens"] == len(ids_of(TEXT)) + 1


def test_a_client_that_leaves_does_not_end_it() -> None:
    shop = Office({})
    rid = shop.begin(STREAM)
    part = shop.started()
    shop.tell(part, ids_of("One"))
    id = shop.told_to(rid)[0]["response"]["id"]
    shop.gateway(Cancel(rid))
    assert not shop.sent(Abort)
    shop.core.gateway_down("gateway-0", shop.clock)
    shop.wait(20)
    assert not shop.sent(Abort)
    shop.finish(part)
    assert text_of(shop.get("response", id)) == TEXT


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("when", ["before", "while", "after"])
def test_its_events_are_followed_from_any_point(elsewhere: bool, when: str) -> None:
    kept: Kept = {}
    shop = Office(kept)
    reader = Office(kept, "tokenizer-1") if elsewhere else shop
    first = shop.begin(STREAM)
    part = shop.started()
    ids = [*ids_of(TEXT), EOS]
    shop.tell(part, ids[:5])
    seen = shop.told_to(first)
    id = seen[0]["response"]["id"]
    shop.wait(0.3)
    late = reader.follow(id, 3) if when != "after" else b""
    if when == "while":
        reader.wait(0.3)
        assert numbers(reader.told_to(late)) == list(range(4, len(seen)))
    shop.tell(part, ids[5:], 5)
    shop.scheduler(Finished(part.rid, FinishReason.STOP, len(ids)))
    if when == "after":
        shop.wait(60)  # nothing of it is in memory any more
        late = reader.follow(id, 3)
    for _ in range(4):
        reader.wait(0.3)
    whole = shop.told_to(first)
    assert isinstance(shop.end_of(first), ResponseFinished)
    assert numbers(whole) == list(range(len(whole)))
    assert whole[-1]["type"] == "response.completed"
    assert text_of(whole[-1]["response"]) == TEXT
    assert reader.told_to(late) == whole[4:]
    assert isinstance(reader.end_of(late), ResponseFinished)


def test_a_long_one_is_kept_in_several_records_and_deleted_with_them() -> None:
    kept: Kept = {}
    shop, other = Office(kept), Office(kept, "tokenizer-1")
    first = shop.begin(STREAM)
    part = shop.started()
    id = shop.told_to(first)[0]["response"]["id"] if shop.told_to(first) else ""
    ids = [*ids_of(TEXT) * 20, EOS]
    for at in range(0, len(ids), 50):
        shop.tell(part, ids[at : at + 50], at)
        shop.gateway(Credit(first, len(shop.told_to(first))))
        shop.wait(0.3)
    shop.scheduler(Finished(part.rid, FinishReason.STOP, len(ids)))
    whole = shop.told_to(first)
    id = whole[0]["response"]["id"]
    assert len(whole) > 2 * CHUNK_EVENTS
    late = other.follow(id)
    for _ in range(10):
        other.gateway(Credit(late, len(other.told_to(late))))
        other.wait(0.3)
    assert other.told_to(late) == whole
    assert sum(name.startswith(id) for name, _ in kept) > 3
    other.get("response_delete", id)
    assert not any(name.startswith(id) for name, _ in kept)
    gone = other.follow(id)
    assert other.failure(gone).code is ErrorCode.NOT_FOUND


def test_a_follower_gets_no_more_than_it_takes() -> None:
    narrow = msgspec.structs.replace(CONFIG.tokenizer, unacked_events=64, slow_consumer_s=60.0)
    config = msgspec.structs.replace(CONFIG, tokenizer=narrow)
    shop = Office({}, config=config)
    first = shop.begin(STREAM)
    part = shop.started()
    shop.tell(part, ids_of(TEXT) * 10)
    assert len(shop.told_to(first)) == 32
    shop.gateway(Credit(first, 20))
    assert len(shop.told_to(first)) == 52
    shop.wait(61)  # the response itself waits for nobody
    assert not shop.sent(Abort)


def test_a_restarted_tokenizer_takes_up_what_it_ran() -> None:
    kept: Kept = {}
    shop = Office(kept)
    promised = shop.answer(shop.begin(PLAIN))
    began = shop.started()
    stream = shop.begin(STREAM)
    streamed = shop.started()
    shop.tell(streamed, ids_of("One, two"))
    events = shop.told_to(stream)
    shop.wait(0.3)
    again = Office(kept)
    parts = again.sent(Generate)
    assert {part.rid for part in parts if isinstance(part, Generate)} == {began.rid, streamed.rid}
    for part in parts:
        assert isinstance(part, Generate)
        assert part.seed in (began.seed, streamed.seed)
        again.finish(part)
    assert text_of(again.get("response", promised["id"])) == TEXT
    late = again.follow(events[0]["response"]["id"])
    again.wait(0.3)
    again.wait(0.3)
    whole = again.told_to(late)
    assert whole[: len(events)] == events
    assert whole[-1]["type"] == "response.completed"
    assert not Office(kept).sent(Generate)  # it is over


def test_a_request_that_comes_again_begins_nothing_twice() -> None:
    kept: Kept = {}
    shop, other = Office(kept), Office(kept, "tokenizer-1")
    first = shop.begin(STREAM, rid=5)
    part = shop.started()
    shop.tell(part, ids_of("One, two"))
    num_seen = len(shop.told_to(first))
    again = other.begin(STREAM, rid=5, next_event=num_seen)  # the gateway has lost the first one
    assert not other.sent(Generate)
    shop.finish(part)
    for _ in range(4):
        other.wait(0.3)
    rest = numbers(other.told_to(again))
    assert rest == list(range(num_seen, num_seen + len(rest)))
    assert isinstance(other.end_of(again), ResponseFinished)


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_it_is_cancelled_wherever_it_is(elsewhere: bool, placed: bool) -> None:
    kept: Kept = {}
    shop = Office(kept)
    other = Office(kept, "tokenizer-1") if elsewhere else shop
    if not placed:
        shop.down()
    promised = shop.answer(shop.begin(PLAIN))
    late = other.follow(promised["id"])
    assert other.failure(late).param == "stream"  # it was not begun as a stream
    assert other.get("response_cancel", promised["id"])["status"] == "cancelled"
    if placed:
        part = shop.started()
        assert part.rid in {m.rid for m in other.sent(Abort) if isinstance(m, Abort)}
        shop.scheduler(Finished(part.rid, FinishReason.ABORT, 0))
    shop.wait(3)
    shop.up()
    assert not shop.sent(Generate)
    assert other.get("response", promised["id"])["status"] == "cancelled"
    assert shop.core.num_live == 0


def test_who_follows_hears_of_its_cancellation() -> None:
    kept: Kept = {}
    shop, other = Office(kept), Office(kept, "tokenizer-1")
    first = shop.begin(STREAM)
    part = shop.started()
    shop.tell(part, ids_of("One, two"))
    shop.wait(0.3)
    id = shop.told_to(first)[0]["response"]["id"]
    late = other.follow(id)
    other.get("response_cancel", id)
    shop.scheduler(Finished(part.rid, FinishReason.ABORT, 0))
    other.wait(0.3)
    other.wait(0.3)
    assert shop.failure(first).code is ErrorCode.CANCELLED
    assert other.failure(late).code is ErrorCode.CANCELLED


def test_one_that_fails_says_why() -> None:
    shop = Office({})
    promised = shop.answer(shop.begin(PLAIN))
    part = shop.started()
    shop.scheduler(Failed(part.rid, ErrorCode.ENGINE_ERROR, "the device is at fault"))
    found = shop.get("response", promised["id"])
    assert found["status"] == "failed"
    assert found["error"] == {"code": "server_error", "message": "the device is at fault"}


def test_a_bad_request_is_refused_and_nothing_is_kept() -> None:
    kept: Kept = {}
    shop = Office(kept)
    for fields, param in (
        ({"store": False}, "store"),
        ({"temperature": 7}, "temperature"),
        ({"background": "yes"}, "background"),
    ):
        failed = shop.failure(shop.begin({**PLAIN, **fields}))
        assert (failed.code, failed.param) == (ErrorCode.INVALID, param)
    assert not any(name.startswith("resp_") for name, _ in kept)


def test_nothing_is_promised_that_is_not_kept() -> None:
    shop = Office({})
    shop.is_open = False
    rid = shop.begin(PLAIN)
    shop.wait(6)
    assert shop.failure(rid).code is ErrorCode.DEADLINE
    assert not shop.sent(Generate)


def test_one_that_is_too_large_to_be_kept_is_refused() -> None:
    shop = Office({})
    shop.most_bytes = 3000
    failed = shop.failure(shop.begin({**PLAIN, "input": "word " * 1000}))
    assert (failed.code, "3000" in failed.detail) == (ErrorCode.INVALID, True)
    assert not shop.sent(Generate)
    shop.answer(shop.begin(PLAIN))


def test_a_process_runs_so_many_and_a_key_has_its_part_of_them() -> None:
    tokenizer = msgspec.structs.replace(CONFIG.tokenizer, max_background=3)
    gateway = msgspec.structs.replace(CONFIG.gateway, key_max_requests=2)
    shop = Office({}, config=msgspec.structs.replace(CONFIG, tokenizer=tokenizer, gateway=gateway))
    shop.answer(shop.begin(PLAIN, owner="me"))
    part = shop.started()
    shop.answer(shop.begin(PLAIN, owner="me"))
    assert shop.failure(shop.begin(PLAIN, owner="me")).code is ErrorCode.OVERLOADED
    shop.answer(shop.begin(PLAIN, owner="you"))
    assert shop.failure(shop.begin(PLAIN, owner="they")).code is ErrorCode.OVERLOADED
    shop.finish(part)
    shop.answer(shop.begin(PLAIN, owner="me"))


def test_a_mesh_that_ends_leaves_them_to_the_next_one() -> None:
    kept: Kept = {}
    shop = Office(kept)
    promised = shop.answer(shop.begin(PLAIN))
    shop.core.fail_all("the mesh is shutting down", shop.clock)
    assert shop.get("response", promised["id"])["status"] == "queued"
    again = Office(kept)
    again.finish(again.started())
    assert text_of(again.get("response", promised["id"])) == TEXT


def test_a_kvstore_that_lost_its_records_is_told_again() -> None:
    kept: Kept = {}
    shop = Office(kept)
    rid = shop.begin(STREAM)
    part = shop.started()
    shop.tell(part, ids_of("One, two"))
    id = shop.told_to(rid)[0]["response"]["id"]
    kept.clear()
    shop.core.store_up(shop.clock)
    shop.wait(0.3)
    other = Office(kept, "tokenizer-1")
    late = other.follow(id)
    other.wait(0.3)
    assert other.told_to(late) == shop.told_to(rid)


def test_what_a_kvstore_did_not_hear_is_asked_again_once_it_is_there() -> None:
    """A gateway may be linked, and send a request again, before the kvstore is: that request is
    what is taken up, and the one of the index gives way to it."""
    kept: Kept = {}
    first = Office(kept)
    promised = first.answer(first.begin(PLAIN, rid=7))
    again = Office(kept)
    again.is_open = False
    rid = again.begin(PLAIN, rid=7)
    again.is_open = True
    again.core.store_up(again.clock)
    again.act()
    assert again.answer(rid)["id"] == promised["id"]
    again.finish(again.started())
    assert text_of(again.get("response", promised["id"])) == TEXT


def test_a_thinking_budget_holds_in_the_background_too() -> None:
    shop = Office({})
    body = {**PLAIN, "reasoning": {"effort": "high"}, "thinking_token_budget": 3}
    promised = shop.answer(shop.begin(body))
    part = shop.started()
    thought = ids_of("One, two, three")[:3]
    shop.tell(part, thought)
    shop.scheduler(Finished(part.rid, FinishReason.LENGTH, 3))
    rest = shop.started()
    assert rest.rid != part.rid
    ids = [*ids_of("Four."), EOS]
    shop.tell(rest, ids, 4)
    shop.scheduler(Finished(rest.rid, FinishReason.STOP, 4 + len(ids)))
    found = shop.get("response", promised["id"])
    assert found["status"] == "completed"
    assert found["output"][-1]["content"][0]["text"] == "Four."
