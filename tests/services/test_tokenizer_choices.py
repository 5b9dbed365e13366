"""Several choices of one request, and thinking with a budget: parts that make one answer."""

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmesh.wire.messages import (
    Abort,
    Accepted,
    AnyMessage,
    Attach,
    Cancel,
    Credit,
    ErrorCode,
    Failed,
    Finished,
    FinishReason,
    Generate,
    ResponseFailed,
    ResponseFinished,
    Submit,
    TokenBatch,
    TokenRow,
)
from deepmesh.wire.packed import pack_ids, unpack_ids
from tests.services.test_tokenizer_core import HI, PLAIN, RID, Desk
from tests.services.tokenizer_harness import EOS, TOKENIZER, ids_of

N = 3
OUTPUTS = ["One and more", "Grüße 👋🏽", "a b c d e f"]
USAGE = {"stream_options": {"include_usage": True}}
MANY = {"model": "tiny", "messages": HI, "n": N, "stream": True, **PLAIN, **USAGE}
THINK_END = TOKENIZER.token_to_id("</think>")


class Table(Desk):
    """A desk at which a scheduler serves all parts of a request."""

    def ask(self, body: object, protocol: str = "chat", *, next_event: int = 0) -> list[Generate]:
        """Submit; the parts that go to the scheduler."""
        raw = msgspec.json.encode(body)
        self.gateway(Submit(RID, protocol, raw, 7, created_s=1_700_000_000, next_event=next_event))
        return self.generates()

    def generates(self) -> list[Generate]:
        """New parts since the last call."""
        return [m for m in self.sent(Generate) if isinstance(m, Generate)]

    def row(self, part: Generate, pos: int, ids: list[int]) -> None:
        self.scheduler(TokenBatch(1, 1, [TokenRow(part.rid, pos, pack_ids(ids))]))

    def finish(self, part: Generate, count: int, reason: FinishReason = FinishReason.STOP) -> None:
        self.scheduler(Finished(part.rid, reason, count))

    def serve(self, part: Generate, text: str) -> None:
        """All of one part's output."""
        ids = [*ids_of(text), EOS]
        self.row(part, 0, ids)
        self.finish(part, len(ids))

    @property
    def end(self) -> ResponseFinished:
        (end,) = self.ends
        assert isinstance(end, ResponseFinished), end
        return end

    @property
    def failure(self) -> ResponseFailed:
        (end,) = self.ends
        assert isinstance(end, ResponseFailed), end
        return end


def draws(part: Generate) -> tuple[int, int]:
    """What its random numbers follow from."""
    return part.seed, part.sub_index


def data_of(events: list[bytes]) -> list[dict[str, Any]]:
    lines = [event.split(b"data: ", 1)[1].strip() for event in events]
    return [msgspec.json.decode(line) for line in lines if line != b"[DONE]"]


def undisturbed() -> list[bytes]:
    table = Table()
    for part, text in zip(table.ask(MANY), OUTPUTS, strict=True):
        table.serve(part, text)
    return table.events()


WHOLE = undisturbed()


def test_choices_share_a_stream_under_their_numbers() -> None:
    *chunks, last = data_of(WHOLE)
    texts = ["", "", ""]
    reasons: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content") or ""
        if choice["finish_reason"]:
            reasons[choice["index"]].append(choice["finish_reason"])
    assert texts == OUTPUTS
    assert reasons == {0: ["stop"], 1: ["stop"], 2: ["stop"]}
    assert last["choices"] == []
    counts = [len(ids_of(text)) + 1 for text in OUTPUTS]
    assert last["usage"]["completion_tokens"] == sum(counts)
    assert last["usage"]["total_tokens"] == sum(counts) + last["usage"]["prompt_tokens"]
    assert len({chunk["id"] for chunk in (*chunks, last)}) == 1
    assert [event for event in WHOLE if b"[DONE]" in event] == [WHOLE[-1]]


def test_each_choice_is_generated_on_its_own() -> None:
    parts = Table().ask(MANY)
    assert len({part.rid for part in parts} | {RID}) == N + 1
    assert len({draws(part) for part in parts}) == N
    assert draws(parts[0]) == (7, 0)  # as it would without the others
    assert len({part.prompt_ids for part in parts}) == 1


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_in_whatever_order_tokens_come_the_bytes_are_the_same(data: st.DataObject) -> None:
    table, known = Table(), list[bytes]()
    parts = table.ask(MANY)
    outputs = [[*ids_of(text), EOS] for text in OUTPUTS]
    at = [0] * N
    while not all(done := [a >= len(o) for a, o in zip(at, outputs, strict=True)]):
        index = data.draw(st.sampled_from([i for i in range(N) if not done[i]]))
        step = data.draw(st.sampled_from([40, 1, 2, 3, 5]))
        table.row(parts[index], at[index], outputs[index][at[index] : at[index] + step])
        at[index] = min(at[index] + step, len(outputs[index]))
        if at[index] == len(outputs[index]):
            table.finish(parts[index], at[index])
        if not table.ends and data.draw(st.integers(0, 9)) == 9:  # the tokenizer dies
            known += table.events(len(known))
            keep = data.draw(st.integers(0, len(known)))
            known, table, at = known[:keep], Table(), [0] * N
            parts = table.ask(MANY, next_event=len(known))
            if known:
                assert not parts
                asked = [m for m in table.sent(Attach) if isinstance(m, Attach)]
                for attach in asked:
                    table.scheduler(Failed(attach.rid, ErrorCode.UNKNOWN, ""))
                parts = table.generates()
            assert len(parts) == N
    assert known + table.events(len(known)) == WHOLE
    assert isinstance(table.end, ResponseFinished)


def test_plain_choices_say_what_streamed_ones_do() -> None:
    table = Table()
    body = {key: value for key, value in MANY.items() if key not in ("stream", "stream_options")}
    for part, text in zip(table.ask(body), OUTPUTS, strict=True):
        table.serve(part, text)
    answer = msgspec.json.decode(table.end.body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in answer["choices"]] == OUTPUTS
    usage = data_of(WHOLE)[-1]["usage"]
    assert answer["usage"] == usage
    assert table.end.completion_tokens == usage["completion_tokens"]


def test_several_prompts_with_several_choices() -> None:
    table = Table()
    body = {"model": "tiny", "prompt": ["Once", "Twice upon"], "n": 2, "echo": True}
    parts = table.ask(body, "completions")
    first, second, *others = [draws(part) for part in parts]
    assert first != second
    assert others == [first, second]
    texts = [" a", " b c", " d", " e"]
    for part, text in zip(reversed(parts), reversed(texts), strict=True):
        table.serve(part, text)
    answer = msgspec.json.decode(table.end.body)
    told = [
        (choice["index"], choice["text"].removeprefix("<｜begin▁of▁sentence｜>"))
        for choice in answer["choices"]
    ]
    prompts = ["Once", "Once", "Twice upon", "Twice upon"]
    assert told == [(i, p + t) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]
    lengths = [part.prompt_len for part in parts]
    assert answer["usage"]["prompt_tokens"] == lengths[0] + lengths[2]


def test_nothing_is_admitted_before_every_choice_is() -> None:
    table = Table()
    parts = table.ask(MANY)
    for part in parts[:-1]:
        table.scheduler(Accepted(part.rid, 1, "scheduler-0"))
    assert not table.to_gateway
    table.scheduler(Accepted(parts[-1].rid, 1, "scheduler-0"))
    assert table.to_gateway


def test_a_choice_that_fails_takes_the_others_with_it() -> None:
    table = Table()
    parts = table.ask(MANY)
    table.row(parts[0], 0, ids_of("One"))
    table.scheduler(Failed(parts[1].rid, ErrorCode.ENGINE_ERROR, "the device failed"))
    assert table.failure.code is ErrorCode.ENGINE_ERROR
    assert table.failure.rid == RID
    assert {abort_rid(m) for m in table.sent(Abort)} == {parts[0].rid, parts[2].rid}
    assert table.core.num_live == 0
    table.row(parts[0], 1, ids_of(" two"))  # still on its way
    assert len(table.ends) == 1


def test_a_client_that_leaves_ends_every_choice() -> None:
    table = Table()
    parts = table.ask(MANY)
    table.row(parts[0], 0, ids_of("One"))
    table.gateway(Cancel(RID))
    assert {abort_rid(m) for m in table.sent(Abort)} == {part.rid for part in parts}
    assert table.core.num_live == 0


def test_a_reader_that_stops_holds_back_the_acknowledgements_of_all_choices() -> None:
    table = Table()
    parts = table.ask(MANY)
    for pos, part in itertools.product(range(200), parts):
        table.row(part, pos, ids_of(" a"))
    unread = [request.read for request in table.core._book.live if request.whole is not None]
    assert max(unread) < 100
    table.gateway(Credit(RID, 600))
    read = [request.read for request in table.core._book.live if request.whole is not None]
    assert min(read) > 150


def abort_rid(message: AnyMessage) -> bytes:
    assert isinstance(message, Abort)
    return message.rid


# ---------------------------------------------------------------- thinking with a budget

BUDGETS = [
    ("chat", {"messages": HI, "thinking_token_budget": 4}),
    ("chat", {"messages": HI, "thinking": {"type": "enabled", "budget_tokens": 4}}),
    ("responses", {"input": "Hi", "thinking_token_budget": 4}),
    (
        "messages",
        {"messages": HI, "max_tokens": 90, "thinking": {"type": "enabled", "budget_tokens": 4}},
    ),
]


def thought_and_text(protocol: str, body: dict[str, Any]) -> tuple[str, str]:
    match protocol:
        case "chat":
            message = body["choices"][0]["message"]
            return message["reasoning_content"], message["content"]
        case "messages":
            thought, text = body["content"]
            return thought["thinking"], text["text"]
        case _:
            thought, text = body["output"]
            return thought["content"][0]["text"], text["content"][0]["text"]


@pytest.mark.parametrize(("protocol", "body"), BUDGETS)
def test_thinking_over_its_budget_is_cut(protocol: str, body: dict[str, Any]) -> None:
    table = Table()
    (first,) = table.ask({"model": "tiny", **body}, protocol)
    assert first.max_tokens == 4
    assert THINK_END in unpack_ids(first.stop_ids)
    thought = ids_of(" a b c d")
    assert len(thought) == 4
    table.row(first, 0, thought)
    table.finish(first, 4, FinishReason.LENGTH)
    (second,) = table.generates()
    assert second.rid != first.rid
    assert second.prompt_len == first.prompt_len
    assert unpack_ids(second.confirmed_ids).tolist() == [*thought, THINK_END]
    assert THINK_END not in unpack_ids(second.stop_ids)
    rest = [*ids_of("Hello"), EOS]
    table.row(second, 5, rest)
    table.finish(second, 5 + len(rest))
    answer = msgspec.json.decode(table.end.body)
    assert thought_and_text(protocol, answer) == (" a b c d", "Hello")
    assert table.end.completion_tokens == 5 + len(rest)


def test_thinking_that_ends_in_time_goes_on_as_it_is() -> None:
    table = Table()
    (first,) = table.ask({"model": "tiny", "messages": HI, "thinking_token_budget": 50})
    ids = [*ids_of("hm"), THINK_END]
    table.row(first, 0, ids)
    table.finish(first, len(ids))
    (second,) = table.generates()
    assert unpack_ids(second.confirmed_ids).tolist() == ids
    table.row(second, len(ids), [*ids_of("Yes"), EOS])
    table.finish(second, len(ids) + len(ids_of("Yes")) + 1)
    answer = msgspec.json.decode(table.end.body)
    assert thought_and_text("chat", answer) == ("hm", "Yes")


def test_an_end_within_thinking_is_the_end() -> None:
    table = Table()
    (first,) = table.ask({"model": "tiny", "messages": HI, "thinking_token_budget": 50})
    table.serve(first, "hm")
    assert not table.generates()
    assert table.end.finish_reason == "stop"


def test_a_budget_that_cannot_bind_needs_no_stage() -> None:
    for more in ({"max_tokens": 4}, PLAIN):
        body = {"model": "tiny", "messages": HI, "thinking_token_budget": 4, **more}
        (only,) = Table().ask(body)
        assert only.rid == RID


def test_budgets_work_with_several_choices_and_a_stream() -> None:
    body = {**MANY, "thinking": {"type": "enabled"}, "thinking_token_budget": 2}
    table = Table()
    for part in table.ask(body):
        table.row(part, 0, ids_of(" a b"))
        table.finish(part, 2, FinishReason.LENGTH)
    for part in table.generates():
        table.row(part, 3, [*ids_of("ok"), EOS])
        table.finish(part, 3 + len(ids_of("ok")) + 1)
    deltas = [c["choices"][0] for c in data_of(table.events()) if c["choices"]]
    for index in range(N):
        mine = [choice["delta"] for choice in deltas if choice["index"] == index]
        assert "".join(d.get("reasoning_content") or "" for d in mine) == " a b"
        assert "".join(d.get("content") or "" for d in mine) == "ok"
