"""A bug in the gateway's own loop ends the process; what a client or a peer does, never."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from deepmesh.wire.messages import Submit
from tests.services.gateway_harness import Mesh, running_mesh


def bug(*_: object) -> None:
    raise LookupError("a bug")


def in_the_sweeper(mesh: Mesh, submit: Submit) -> None:
    mesh.server.gateway.streams.sweep = bug  # type: ignore[method-assign]


def in_a_callback_of_the_links(mesh: Mesh, submit: Submit) -> None:
    mesh.server.gateway.streams.handle = bug  # type: ignore[method-assign]
    mesh.tokenizer.finish(submit, 0)


@pytest.mark.parametrize("break_it", [in_the_sweeper, in_a_callback_of_the_links])
def test_a_bug_ends_the_process_with_a_line_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, break_it: Callable[[Mesh, Submit], None]
) -> None:
    with running_mesh(tmp_path) as mesh:
        client = mesh.post()  # an open request does not hold it up
        submit = mesh.tokenizer.expect(Submit)
        break_it(mesh, submit)
        mesh.server.join()
        assert str(mesh.server.error) == "a bug"
        assert "ends because of a bug" in caplog.text
        assert client.getresponse().status == 503  # told, not left hanging


def test_a_bug_that_breaks_the_farewell_too_ends_the_process(tmp_path: Path) -> None:
    with running_mesh(tmp_path) as mesh:
        client = mesh.post()
        submit = mesh.tokenizer.expect(Submit)
        mesh.server.gateway.streams.fail_all = bug  # type: ignore[method-assign]
        in_the_sweeper(mesh, submit)
        mesh.server.join()
        assert mesh.server.error is not None
        assert client.getresponse().status == 500


def test_what_a_connection_or_the_system_causes_does_not_end_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_mesh(tmp_path) as mesh:
        loop = mesh.server._loop
        contexts: list[dict[str, object]] = [
            {"message": "out of descriptors", "exception": OSError(24, "Too many open files")},
            {"message": "data_received failed", "exception": LookupError(), "transport": object()},
        ]
        for context in contexts:
            loop.call_soon_threadsafe(loop.call_exception_handler, context)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.3), loop).result()
        assert mesh.get("/health")[0].status == 200
        errors = [r.getMessage() for r in caplog.records if r.levelno >= logging.ERROR]
        assert len(errors) == len(contexts)
