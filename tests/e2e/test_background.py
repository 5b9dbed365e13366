"""Background responses with the unmodified openai package, and over a killed tokenizer."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from deepmesh.supervisor import Mesh
from tests.e2e.conftest import RunningMesh

ROOT = Path(__file__).resolve().parents[2]
ASK = {"input": "Hello there", "temperature": 0, "reasoning": {"effort": "none"}}


@pytest.fixture
def client(pair: RunningMesh) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def polled(client: openai.OpenAI, id: str, until: Callable[[Response], bool]) -> Response:
    """The response once it is so far."""
    deadline = time.monotonic() + 60
    while not until(found := client.responses.retrieve(id)):
        assert time.monotonic() < deadline, found
    return found


def is_over(response: Response) -> bool:
    return response.status not in ("queued", "in_progress")


def test_it_runs_while_the_client_is_away(client: openai.OpenAI, pair: RunningMesh) -> None:
    ask = {"model": pair.model, "max_output_tokens": 24, **ASK}
    waited_for = client.responses.create(**ask)
    begun = client.responses.create(background=True, **ask)
    assert begun.status == "queued"
    done = polled(client, begun.id, is_over)
    assert (done.status, done.output_text) == (waited_for.status, waited_for.output_text)
    assert done.background
    assert done.usage is not None
    assert waited_for.usage is not None
    assert done.usage.output_tokens == waited_for.usage.output_tokens
    again = client.responses.create(
        model=pair.model, input="And?", previous_response_id=done.id, max_output_tokens=4
    )
    assert again.previous_response_id == done.id
    client.responses.delete(done.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(done.id)
    pair.wait_idle()


def test_a_stream_is_taken_up_where_the_client_left_it(
    client: openai.OpenAI, pair: RunningMesh
) -> None:
    ask = {"model": pair.model, "max_output_tokens": 300, **ASK}
    seen: list[ResponseStreamEvent] = []
    extra = {"ignore_eos": True}
    with client.responses.create(background=True, stream=True, extra_body=extra, **ask) as stream:
        for event in stream:
            seen.append(event)
            if len(seen) == 20:
                break
    assert seen[0].type == "response.created"
    id = seen[0].response.id
    for after in (19, 40, 19):  # whichever tokenizer serves it, while it runs and afterwards
        events = list(client.responses.retrieve(id, stream=True, starting_after=after))
        numbers = [event.sequence_number for event in events]
        assert numbers == list(range(after + 1, after + 1 + len(events)))
        assert events[-1].type == "response.incomplete"
    seen += client.responses.retrieve(id, stream=True, starting_after=19)
    text = "".join(event.delta for event in seen if event.type == "response.output_text.delta")
    assert text == polled(client, id, is_over).output_text
    pair.wait_idle()


def test_it_is_cancelled(client: openai.OpenAI, pair: RunningMesh) -> None:
    begun = client.responses.create(
        model=pair.model,
        background=True,
        max_output_tokens=4000,
        extra_body={"ignore_eos": True},
        **ASK,
    )
    polled(client, begun.id, lambda found: found.status == "in_progress")
    for _ in range(2):
        assert client.responses.cancel(begun.id).status == "cancelled"
    assert client.responses.retrieve(begun.id).status == "cancelled"
    pair.wait_idle()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    folder = tmp_path_factory.mktemp("b")
    path = folder / "mesh.toml"
    path.write_text(
        f'[mesh]\nname = "background"\nrun_dir = "{folder}/run"\nmodel = "{ROOT}/models/tiny"\n'
        '[gateway]\nport = 0\n[tokenizer]\ncount = 2\n[executor]\nkind = "fake"\n'
        "fake_step_ms = 10.0\n[kvstore]\ncount = 1\n[supervisor]\nbackoff_s = 0.1\n"
        "[links]\nheartbeat_s = 0.2\ntimeout_s = 1.5\n"
    )
    with Mesh(path) as mesh:
        yield mesh


def test_killed_tokenizers_lose_none(slow: Mesh) -> None:
    with openai.OpenAI(base_url=f"{slow.url}/v1", api_key="any", max_retries=0) as client:
        ask = {
            "model": slow.config.served_model,
            "max_output_tokens": 120,
            "extra_body": {"ignore_eos": True, "seed": 3},
            **ASK,
            "temperature": 1,
        }
        wanted = client.responses.create(**ask).output_text
        ids = [client.responses.create(background=True, **ask).id for _ in range(4)]
        stream = iter(client.responses.create(background=True, stream=True, **ask))
        first = next(stream)
        assert first.type == "response.created"
        for name in ("tokenizer-0", "tokenizer-1"):
            slow.wait_restarted(name, slow.kill(name))
        events = [first, *stream]  # the gateway hides it from who is there
        assert [event.sequence_number for event in events] == list(range(len(events)))
        for id in (*ids, first.response.id):
            assert polled(client, id, is_over).output_text == wanted
