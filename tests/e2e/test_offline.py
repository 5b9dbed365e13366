"""`deepmesh.client.generate`: answers from Python in a few lines, against a mesh that runs."""

import asyncio

import pytest

from deepmesh.client import ClientError, Engine, agenerate, generate
from tests.e2e.conftest import RunningMesh

PROMPTS = ["Once upon a time", "The sea is", "Two plus two"]
GREEDY = {"max_tokens": 8, "temperature": 0}


def test_outputs_come_in_the_order_of_the_prompts(mesh: RunningMesh) -> None:
    outputs = generate(PROMPTS, url=mesh.url, **GREEDY)
    alone = [generate([prompt], url=mesh.url, **GREEDY)[0] for prompt in PROMPTS]
    assert [output.text for output in outputs] == [output.text for output in alone]
    assert all(0 < output.output_tokens <= 8 for output in outputs)
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}


def test_conversations_choices_and_token_ids(mesh: RunningMesh) -> None:
    talk = [{"role": "user", "content": "Hello"}]
    chat, ids = generate([talk, [5, 6, 7]], url=mesh.url, n=2, **GREEDY)
    assert chat.thinking or chat.text
    assert len(chat.others) == len(ids.others) == 1
    assert ids.prompt_tokens == 3


def test_asyncio(mesh: RunningMesh) -> None:
    outputs = asyncio.run(agenerate(PROMPTS, url=mesh.url, **GREEDY))
    assert [o.text for o in outputs] == [o.text for o in generate(PROMPTS, url=mesh.url, **GREEDY)]


def test_a_bad_field_is_an_error_that_names_it(mesh: RunningMesh) -> None:
    with pytest.raises(ClientError, match="max_tokens"):
        generate(PROMPTS, url=mesh.url, max_tokens=0)
    with pytest.raises(TypeError, match="prompts"):
        generate("Once", url=mesh.url)


def test_it_brings_its_own_mesh(mesh: RunningMesh) -> None:
    """Beside the one that runs, and gone afterwards."""
    with Engine(mesh.config_path) as engine:
        assert engine.url != mesh.url
        outputs = engine.generate(PROMPTS[:1], **GREEDY)
    assert outputs == generate(PROMPTS[:1], url=mesh.url, **GREEDY)
    assert engine.url == ""
