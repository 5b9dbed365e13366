"""Stored responses: any tokenizer serves them, to their owner, for as long as they are kept."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from deepmesh.config import Config
from deepmesh.wire.messages import (
    Abort,
    Cancel,
    DropRecord,
    ErrorCode,
    Finished,
    FinishReason,
    Generate,
    GetRecord,
    KvStatus,
    PutRecord,
    Record,
    ResponseFailed,
    ResponseFinished,
    Submit,
    TokenBatch,
    TokenRow,
)
from deepmesh.wire.packed import pack_ids, unpack_ids
from services.tokenizer.actions import Prepare, ToGateway, ToScheduler, ToStore
from services.tokenizer.prepare import Preparer
from services.tokenizer.service import prepare
from tests.services.test_tokenizer_core import Desk
from tests.services.tokenizer_harness import EOS, TOKENIZER, ids_of, make_config

BASE = make_config(Path("/nowhere"))
CONFIG = msgspec.structs.replace(BASE, kvstore=msgspec.structs.replace(BASE.kvstore, count=1))
PREPARER = Preparer(CONFIG, now_s=lambda: 1_700_000_100)
Kept = dict[tuple[str, str], bytes]  # by id and owner


class Shop(Desk):
    """A tokenizer with a kvstore beside it; several share one."""

    def __init__(self, kept: Kept, config: Config = CONFIG) -> None:
        super().__init__(config)
        self.kept, self.is_open, self._number = kept, True, 0
        self.most_bytes = 1 << 20  # of a record

    def ask(
        self, protocol: str, body: dict[str, Any], owner: str = "me"
    ) -> ResponseFinished | ResponseFailed | None:
        """A request, and its end if that came at once."""
        self._number += 1
        rid = self._number.to_bytes(16, "little")
        raw = msgspec.json.encode(body)
        submit = Submit(rid, protocol, raw, 7, api_key_hash=owner, created_s=1_700_000_000)
        before = len(self.ends)
        self.gateway(submit)
        return self.ends[-1] if len(self.ends) > before else None

    def say(self, text: str) -> dict[str, Any]:
        """What the model says to the request that waits; the answer or the last event's object."""
        part = self.started()
        ids = [*ids_of(text), EOS]
        self.scheduler(TokenBatch(1, 1, [TokenRow(part.rid, 0, pack_ids(ids))]))
        self.scheduler(Finished(part.rid, FinishReason.STOP, len(ids)))
        end = self.ends[-1]
        assert isinstance(end, ResponseFinished)
        if end.body:
            return msgspec.json.decode(end.body)
        return msgspec.json.decode(end.events[-1].split(b"data: ", 1)[1])["response"]

    def started(self) -> Generate:
        (part,) = self.sent(Generate)
        assert isinstance(part, Generate)
        return part

    def get(self, protocol: str, id: str, owner: str = "me", **query: object) -> dict[str, Any]:
        end = self.ask(protocol, {"id": id, **query}, owner)
        assert isinstance(end, ResponseFinished), end
        return msgspec.json.decode(end.body)

    def refused(self, protocol: str, body: dict[str, Any], owner: str = "me") -> ResponseFailed:
        end = self.ask(protocol, body, owner)
        assert isinstance(end, ResponseFailed), end
        return end

    def act(self) -> None:
        while actions := self.core.take():
            for action in actions:
                match action:
                    case ToGateway(message=message):
                        self.to_gateway.append(message)
                    case ToScheduler(name=name, message=message):
                        self.to_scheduler.append((name, message))
                    case ToStore(message=message) if self.is_open:
                        self.core.store_mail(self._store(message), self.clock)
                    case Prepare(submit=submit, record=record):
                        outcome = prepare(PREPARER, submit, 8192, record)
                        self.core.prepared(submit.rid, outcome, 1, self.clock)
                    case _:
                        pass

    def _store(self, order: PutRecord | GetRecord | DropRecord) -> Record:
        key, data, status = (order.id, order.owner), b"", KvStatus.OK
        match order:
            case PutRecord() if len(order.data) > self.most_bytes:
                detail = f"a record may have {self.most_bytes}"
                return Record(
                    order.op_id, KvStatus.INVALID, order.kind, order.id, order.owner, detail=detail
                )
            case PutRecord():
                self.kept[key] = order.data
            case GetRecord():
                data = self.kept.get(key, b"")
                status = KvStatus.OK if data else KvStatus.MISS
            case DropRecord():
                self.kept.pop(key, None)
        return Record(order.op_id, status, order.kind, order.id, order.owner, data)


def prompt_of(part: Generate) -> str:
    return TOKENIZER.decode(unpack_ids(part.prompt_ids).tolist(), skip_special_tokens=False)


FIRST = {"model": "tiny", "input": "My name is Ann.", "reasoning": {"effort": "none"}}


@pytest.mark.parametrize("stream", [True, False])
def test_another_tokenizer_goes_on_where_the_first_one_ended(stream: bool) -> None:
    kept: Kept = {}
    first, second = Shop(kept), Shop(kept)
    first.ask("responses", {**FIRST, "stream": stream})
    told = first.say("Hello Ann.")
    assert told["store"] is True
    body = {**FIRST, "input": "Who am I?", "previous_response_id": told["id"]}
    assert second.ask("responses", body) is None
    part = second.started()
    assert "My name is Ann." in prompt_of(part)
    assert prompt_of(part).index("Hello Ann.") < prompt_of(part).index("Who am I?")
    second.to_scheduler.append(("scheduler-0", part))
    answer = second.say("Ann.")
    assert answer["previous_response_id"] == told["id"]
    third = {**FIRST, "input": "Sure?", "previous_response_id": answer["id"]}
    first.ask("responses", third)
    prompt = prompt_of(first.started())
    assert [prompt.index(t) for t in ("My name", "Hello Ann.", "Who am I?", "Ann.<", "Sure?")]


def test_get_delete_and_input_items() -> None:
    shop = Shop({})
    body = {**FIRST, "input": [{"role": "user", "content": f"n{i}"} for i in range(5)]}
    shop.ask("responses", body)
    told = shop.say("Hello.")
    found = shop.get("response", told["id"])
    assert found == told
    assert found["output"][0]["content"][0]["text"] == "Hello."
    page = shop.get("response_items", told["id"], order="asc", limit=2)
    assert [item["content"][0]["text"] for item in page["data"]] == ["n0", "n1"]
    assert page["has_more"]
    rest = shop.get("response_items", told["id"], order="asc", after=page["last_id"])
    assert [item["content"][0]["text"] for item in rest["data"]] == ["n2", "n3", "n4"]
    assert not rest["has_more"]
    newest = shop.get("response_items", told["id"], limit=1)["data"]
    assert newest[0]["content"] == [{"type": "input_text", "text": "n4"}]
    gone = shop.get("response_delete", told["id"])
    assert gone == {"id": told["id"], "object": "response", "deleted": True}
    for protocol in ("response", "response_delete", "response_items", "response_cancel"):
        assert shop.refused(protocol, {"id": told["id"]}).code is ErrorCode.NOT_FOUND


def test_others_do_not_see_it() -> None:
    shop = Shop({})
    shop.ask("responses", FIRST, owner="me")
    told = shop.say("Hello.")
    assert shop.refused("response", {"id": told["id"]}, "you").code is ErrorCode.NOT_FOUND
    body = {**FIRST, "previous_response_id": told["id"]}
    failed = shop.refused("responses", body, "you")
    assert (failed.code, failed.param) == (ErrorCode.NOT_FOUND, "previous_response_id")


@pytest.mark.parametrize("id", ["resp_1", "", "chatcmpl-0", "resp_" + "z" * 32])
def test_ids_that_are_none(id: str) -> None:
    assert Shop({}).refused("response", {"id": id}).code is ErrorCode.NOT_FOUND


def test_what_is_not_stored_is_not_there() -> None:
    kept: Kept = {}
    shop = Shop(kept)
    shop.ask("responses", {**FIRST, "store": False})
    told = shop.say("Hello.")
    assert told["store"] is False
    assert not kept


def test_one_that_runs_says_so_and_can_be_cancelled() -> None:
    kept: Kept = {}
    shop, other = Shop(kept), Shop(kept)
    shop.ask("responses", {**FIRST, "stream": True})
    part = shop.started()
    id = f"resp_{part.rid.hex()}"
    assert other.get("response", id)["status"] == "in_progress"
    failed = other.refused("responses", {**FIRST, "previous_response_id": id})
    assert failed.param == "previous_response_id"
    assert other.get("response_cancel", id)["status"] == "cancelled"
    assert part.rid in {m.rid for m in other.sent(Abort) if isinstance(m, Abort)}
    shop.scheduler(Finished(part.rid, FinishReason.ABORT, 0))
    assert isinstance(shop.ends[-1], ResponseFailed)
    assert shop.ends[-1].code is ErrorCode.CANCELLED
    assert other.get("response", id)["status"] == "cancelled"
    assert other.get("response_cancel", id)["status"] == "cancelled"  # a second time, too


def test_one_that_is_over_is_not_cancelled_and_one_that_runs_is_not_deleted() -> None:
    shop = Shop({})
    shop.ask("responses", FIRST)
    id = f"resp_{shop.started().rid.hex()}"
    failed = shop.refused("response_delete", {"id": id})
    assert (failed.code, failed.param) == (ErrorCode.INVALID, "id")
    shop.ask("responses", FIRST)
    over = shop.say("Hello.")
    failed = shop.refused("response_cancel", {"id": over["id"]})
    assert (failed.code, failed.param) == (ErrorCode.INVALID, "id")


@pytest.mark.parametrize(
    ("protocol", "query", "param"),
    [
        ("response", {"colour": "red"}, "colour"),
        ("response", {"include": "file_search_call.results"}, "include"),
        ("response", {"include_obfuscation": True}, "include_obfuscation"),
        ("response", {"starting_after": 3}, "starting_after"),
        ("response", {"stream": True}, "stream"),  # it was not begun in the background
        ("response", {"stream": "yes"}, "stream"),
        ("response_items", {"before": "x"}, "before"),
    ],
)
def test_parameters_that_say_nothing_are_named(
    protocol: str, query: dict[str, Any], param: str
) -> None:
    shop = Shop({})
    shop.ask("responses", FIRST)
    failed = shop.refused(protocol, {"id": shop.say("Hello.")["id"], **query})
    assert (failed.code, failed.param) == (ErrorCode.INVALID, param)


def test_a_client_that_leaves_cancels_its_response() -> None:
    shop = Shop({})
    shop.ask("responses", {**FIRST, "stream": True})
    part = shop.started()
    shop.gateway(Cancel(part.rid))
    assert shop.get("response", f"resp_{part.rid.hex()}")["status"] == "cancelled"


def test_a_store_that_is_down_is_not_waited_for() -> None:
    shop = Shop({})
    shop.ask("responses", FIRST)
    told = shop.say("Hello.")
    shop.is_open = False
    assert shop.ask("response", {"id": told["id"]}) is None
    shop.wait(6)
    end = shop.ends[-1]
    assert isinstance(end, ResponseFailed)
    assert end.code is ErrorCode.DEADLINE
    shop.ask("responses", FIRST)  # nor by one that is only to be kept
    assert shop.say("Hello.")["status"] == "completed"


def test_faults_in_the_input_are_named_as_the_client_counts() -> None:
    shop = Shop({})
    shop.ask("responses", FIRST)
    told = shop.say("Hello.")
    bad = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "y"}]
    body = {**FIRST, "input": bad, "previous_response_id": told["id"]}
    assert shop.refused("responses", body).param == "input[1].type"


def test_without_a_kvstore_nothing_is_promised() -> None:
    preparer = Preparer(BASE)
    for fields in ({"store": True}, {"previous_response_id": "resp_" + "0" * 32}):
        raw = msgspec.json.encode({**FIRST, **fields})
        found = prepare(preparer, Submit(bytes(16), "responses", raw, 1), 8192)
        assert getattr(found, "param", "") in fields
