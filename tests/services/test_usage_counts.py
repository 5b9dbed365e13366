"""Usage counts what the client got: tokens behind the end are in none of its counts."""

from tests.services.test_tokenizer_protocols import HI, Bench, ids_of, run
from tests.services.test_tokenizer_protocols import mesh as module_mesh

mesh = module_mesh  # the fixture, under the name that the test asks for


def test_reasoning_and_output_tokens_are_counted_behind_the_cut(mesh: Bench) -> None:
    text = "Let me see.</think>Hello STOP and far more behind it"
    reply, _ = run(mesh, "chat", {"messages": HI, "stop": ["STOP"]}, text)
    message, usage = reply.json["choices"][0]["message"], reply.json["usage"]
    assert (message["reasoning_content"], message["content"]) == ("Let me see.", "Hello ")
    least, most = len(ids_of("Let me see.</think>Hello")), len(ids_of(text[: text.index(" and")]))
    assert least < usage["completion_tokens"] <= most
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len(ids_of("Let me see."))
