"""`deepmesh cache stats` and `flush` against kvstores; which lines `warm` takes."""

import json
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepmesh.cli.app import app
from deepmesh.run_dir import dump_toml
from deepmesh.warming import Prompt, WarmError, read_prompts
from deepmesh.wire.messages import Hits, Lookup
from tests.redis_server import redis_server
from tests.services.kvstore_harness import (
    WAIT_S,
    Client,
    block,
    make_config,
    point,
    running,
)


def run(config_path: Path, *words: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["cache", *words, "--config", str(config_path)])
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.output


def test_stats_and_flush_of_a_running_store(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis") as server:
        config = make_config(tmp_path, redis_url=server.url, disk_bytes=16 << 20)
        path = tmp_path / "mesh.toml"
        path.write_text(dump_toml(config))
        with running(config) as store, Client(config) as client:
            things = [block(1), block(2), point(2)]
            deadline = time.monotonic() + WAIT_S
            while not (store.service.shared and store.service.shared.is_up):
                assert time.monotonic() < deadline
            client.put(*things)
            chain = b"".join(item.hash for item, _ in things[:2]) + b"unknown-block-16"
            for _ in range(2):
                assert client.ask(Lookup(1, chain), Hits).num_point_blocks == 2
            code, output = run(path, "stats", "--json")
            values = json.loads(output)["kvstore-0"]["values"]
            assert code == 0
            assert (values["memory_items"], values["disk_items"]) == (3, 3)
            assert (values["lookup_blocks"], values["memory_hit_blocks"]) == (6, 4)
            assert values["ideal_blocks"] == 3, "the second time all three were known"
            code, output = run(path, "stats")
            assert code == 0
            assert "4 of 6 blocks" in output
            while client.stats().get("shared_puts") != 3:
                assert time.monotonic() < deadline
            code, output = run(path, "flush", "--shared")
            assert code == 0
            assert "3 blocks and points" in output
            assert client.get(*[item for item, _ in things])[1] == [None, None, None]
    code, output = run(path, "stats")
    assert code == 1
    assert "no answer" in output
    assert run(path, "flush")[0] == 1


def test_lines_to_warm(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        '"Once upon a time"',
        '{"messages": [{"role": "user", "content": "Hi"}], "tools": []}',
        "",
        '{"prompt": [1, 2]}',
        '{"input": "Hi"}',
        '{"custom_id": "a", "method": "POST", "url": "/v1/messages", "body": {"system": "S"}}',
    ]
    path.write_text("\n".join(lines))
    assert [prompt.path for prompt in read_prompts(path)] == [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
    ]
    assert read_prompts(path)[0] == Prompt("/v1/completions", {"prompt": "Once upon a time"})


@pytest.mark.parametrize("line", ["{", "7", '{"text": "x"}', '{"url": "/v1/x", "body": 7}'])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"good"\n{line}\n')
    with pytest.raises(WarmError, match=r"prompts\.jsonl:2"):
        read_prompts(path)
    with pytest.raises(WarmError, match="No such file"):
        read_prompts(tmp_path / "none")
