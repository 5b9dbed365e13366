"""Every answer says what it follows from: the engine's fingerprint, and the seed."""

from typing import Any

import msgspec
import pytest

from deepmesh.wire.messages import Generate, TokenBatch, TokenRow
from deepmesh.wire.packed import pack_ids
from services.gateway.arrival import arrive
from tests.services.test_tokenizer_choices import Table
from tests.services.test_tokenizer_core import HI, PLAIN, RID
from tests.services.tokenizer_harness import EOS, ids_of

DRAWN = 7  # by the gateway, in `Table.ask`
PRINT = "0123456789abcdef"
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": HI, **PLAIN},
    "completions": {"prompt": "Once"},
    "responses": {"input": "Hi"},
    "messages": {"messages": HI, "max_tokens": 50, "thinking": {"type": "disabled"}},
}


class Engine(Table):
    """A desk whose scheduler says which engine it has."""

    def serve(self, part: Generate, text: str) -> None:
        ids = [*ids_of(text), EOS]
        row = TokenRow(part.rid, 0, pack_ids(ids), fingerprint=PRINT)
        self.scheduler(TokenBatch(1, 1, [row]))
        self.finish(part, len(ids))


def answer(protocol: str, **fields: object) -> tuple[list[Generate], list[dict[str, Any]]]:
    """What schedulers were asked, and the plain body or all events."""
    desk = Engine()
    parts = desk.ask({"model": "tiny", **BODIES[protocol], **fields}, protocol)
    for part in parts:
        desk.serve(part, "Hello there")
    if not fields.get("stream"):
        return parts, [msgspec.json.decode(desk.end.body)]
    raw = b"".join(desk.events())
    lines = [line[6:] for line in raw.split(b"\n") if line.startswith(b"data: {")]
    return parts, [msgspec.json.decode(line) for line in lines]


@pytest.mark.parametrize("protocol", ["chat", "completions", "responses"])
def test_openai_answers_name_the_engine(protocol: str) -> None:
    _, (body,) = answer(protocol)
    assert body["system_fingerprint"] == PRINT


@pytest.mark.parametrize("protocol", ["chat", "completions"])
def test_so_does_every_chunk(protocol: str) -> None:
    _, chunks = answer(protocol, stream=True)
    assert len(chunks) > 1
    assert {chunk["system_fingerprint"] for chunk in chunks} == {PRINT}


@pytest.mark.parametrize("protocol", BODIES)
@pytest.mark.parametrize(("fields", "seed"), [({}, DRAWN), ({"seed": 41}, 41)])
def test_usage_names_the_seed(protocol: str, fields: dict[str, int], seed: int) -> None:
    (part,), (body,) = answer(protocol, **fields)
    assert body["usage"]["seed"] == part.seed == seed


def test_choices_are_requests_with_derived_seeds() -> None:
    parts, (body,) = answer("chat", n=4, seed=41)
    alone = [answer("chat", seed=41 + choice)[0][0] for choice in range(4)]
    keys = [(part.seed, part.sub_index, part.prompt_ids, part.sampling) for part in parts]
    assert keys == [(one.seed, one.sub_index, one.prompt_ids, one.sampling) for one in alone]
    assert body["usage"]["seed"] == 41
    assert RID not in {part.rid for part in parts}


def test_a_gateway_draws_seeds_that_json_readers_hold_exactly() -> None:
    seeds = {arrive("/v1/chat/completions", []).seed for _ in range(64)}
    assert len(seeds) == 64
    assert max(seeds) < 2**53
