"""Lost tokenizers: the client sees one unbroken stream, or one clear refusal in time."""

import json
from pathlib import Path

from deepmesh.wire.messages import Cancel, ErrorCode, Submit
from tests.services.gateway_harness import FakeTokenizer, Mesh, error_of, running_mesh, until


def split_by_load(mesh: Mesh, submit_on: FakeTokenizer) -> FakeTokenizer:
    """The other one of two tokenizers."""
    return next(tokenizer for tokenizer in mesh.tokenizers if tokenizer is not submit_on)


def who_got_it(mesh: Mesh) -> FakeTokenizer:
    """Wait for a request to arrive at any tokenizer."""
    until(lambda: any(tokenizer.has_mail for tokenizer in mesh.tokenizers))
    return next(tokenizer for tokenizer in mesh.tokenizers if tokenizer.has_mail)


def test_a_stream_goes_on_at_another_tokenizer_without_a_lost_or_repeated_event(
    tmp_path: Path,
) -> None:
    with running_mesh(tmp_path, tokenizers=2) as mesh:
        client = mesh.post(body=b"the raw body")
        first = who_got_it(mesh)
        submit = first.expect(Submit)
        first.events(submit, 0, b"data: 0\n\n", b"data: 1\n\n")
        response = client.getresponse()
        assert response.read(18) == b"data: 0\n\ndata: 1\n\n"

        first.kill()
        second = split_by_load(mesh, first)
        again = second.expect(Submit)
        second.events(again, 1, b"data: 1\n\n", b"data: 2\n\n")  # 1 is known: dropped
        second.finish(again, 3, b"data: 3\n\n")

        assert response.read() == b"data: 2\n\ndata: 3\n\n"
        assert again.next_event == 2
        assert again == Submit(**{**_fields(submit), "next_event": 2})


def test_a_plain_request_goes_on_at_another_tokenizer(tmp_path: Path) -> None:
    with running_mesh(tmp_path, tokenizers=2) as mesh:
        client = mesh.post("/v1/messages")
        first = who_got_it(mesh)
        submit = first.expect(Submit)
        first.kill()
        second = split_by_load(mesh, first)
        again = second.expect(Submit)
        second.answer(again, b"{}")

        assert again == submit
        assert client.getresponse().read() == b"{}"


def test_the_only_tokenizer_gets_its_requests_again_when_it_is_back(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh:
        client = mesh.post()
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
        response = client.getresponse()
        response.read(9)

        mesh.tokenizer.kill()
        mesh.tokenizers[0] = FakeTokenizer(mesh.config)
        mesh.tokenizer.linked()
        again = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.finish(again, 1, b"data: 1\n\n")

        assert (again.rid, again.seed, again.created_s) == (
            submit.rid,
            submit.seed,
            submit.created_s,
        )
        assert response.read() == b"data: 1\n\n"


def test_a_failure_at_the_second_tokenizer_ends_the_stream_once(tmp_path: Path) -> None:
    with running_mesh(tmp_path, tokenizers=2) as mesh:
        client = mesh.post()
        first = who_got_it(mesh)
        submit = first.expect(Submit)
        first.events(submit, 0, b"data: 0\n\n")
        response = client.getresponse()
        first.kill()
        second = split_by_load(mesh, first)
        second.fail(second.expect(Submit), ErrorCode.ENGINE_ERROR, "step failed")

        text = response.read()
        assert text.count(b"error") >= 1
        assert text.startswith(b"data: 0\n\n")
        assert json.loads(text.split(b"data: ")[2])["error"]["code"] == "engine_error"


def test_without_a_tokenizer_for_the_deadline_a_running_request_is_503(tmp_path: Path) -> None:
    with running_mesh(tmp_path, deadline_s=0.2, keepalive_s=0.1) as mesh:
        plain, streamed = mesh.post("/v1/messages"), mesh.post()
        submits = [mesh.tokenizer.expect(Submit) for _ in range(2)]
        for submit in submits:
            if submit.protocol == "chat":
                mesh.tokenizer.events(submit, 0, b"data: 0\n\n")
        response = streamed.getresponse()
        response.read(9)
        mesh.tokenizer.kill()

        refused = plain.getresponse()
        assert refused.status == 503
        assert refused.getheader("retry-after") is not None
        assert json.loads(refused.read())["error"]["type"] == "overloaded_error"
        assert b"deadline_exceeded" in response.read()


def test_a_new_request_without_a_tokenizer_is_503_after_a_short_wait(tmp_path: Path) -> None:
    with running_mesh(tmp_path, deadline_s=0.2) as mesh:
        mesh.tokenizer.kill()
        response = mesh.post().getresponse()

        assert response.status == 503
        assert error_of(response)["type"] == "overloaded_error"


def test_a_body_beyond_resume_bytes_is_served_but_not_resumed(tmp_path: Path) -> None:
    with running_mesh(tmp_path, tokenizers=2, resume_bytes=100) as mesh:
        client = mesh.post(body=bytes(101))
        first = who_got_it(mesh)
        first.answer(first.expect(Submit), b"{}")
        assert client.getresponse().status == 200

        client = mesh.post(body=bytes(101))
        first = who_got_it(mesh)
        first.expect(Submit)
        first.kill()
        response = client.getresponse()

        assert response.status == 503
        assert "too large to be kept" in str(error_of(response)["message"])
        assert not split_by_load(mesh, first).has_mail


def test_kept_bytes_are_given_back_at_the_end_of_each_request(tmp_path: Path) -> None:
    with running_mesh(tmp_path, tokenizers=2, resume_bytes=100) as mesh:
        for _ in range(5):
            client = mesh.post(body=bytes(100))
            tokenizer = who_got_it(mesh)
            tokenizer.answer(tokenizer.expect(Submit), b"{}")
            client.getresponse().read()
        client = mesh.post(body=bytes(100))
        first = who_got_it(mesh)
        first.expect(Submit)
        first.kill()
        second = split_by_load(mesh, first)

        second.answer(second.expect(Submit), b"{}")
        assert client.getresponse().status == 200


def test_requests_go_to_the_less_loaded_tokenizer(tmp_path: Path) -> None:
    with running_mesh(tmp_path, tokenizers=2) as mesh:
        for _ in range(3):
            clients = [mesh.post() for _ in range(2)]
            submits = [tokenizer.expect(Submit) for tokenizer in mesh.tokenizers]  # one each
            for tokenizer, submit in zip(mesh.tokenizers, submits, strict=True):
                tokenizer.answer(submit, b"{}")
            for client in clients:
                client.getresponse().read()


def test_a_cancel_that_a_lost_link_did_not_take_is_sent_when_it_is_back(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh:
        client = mesh.post()
        submit = mesh.tokenizer.expect(Submit)
        mesh.tokenizer.kill()
        waiting = mesh.post("/v1/completions")  # proves that the gateway goes on without it
        client.close()
        mesh.tokenizers[0] = FakeTokenizer(mesh.config)
        mesh.tokenizer.linked()

        kinds: list[Submit | Cancel] = []
        while not any(isinstance(m, Submit) and m.protocol == "completions" for m in kinds):
            kinds.append(mesh.tokenizer.expect_any(Submit, Cancel))
        other = next(m for m in kinds if isinstance(m, Submit) and m.protocol == "completions")
        assert all(m.rid == submit.rid for m in kinds if m is not other)
        mesh.tokenizer.answer(other, b"{}")
        assert waiting.getresponse().status == 200


def _fields(submit: Submit) -> dict[str, object]:
    return {name: getattr(submit, name) for name in submit.__struct_fields__}
