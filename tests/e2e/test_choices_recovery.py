"""Requests with choices, budgets and records survive the loss of any process behind them."""

import json
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import RunningMesh

HELLO = [{"role": "user", "content": "Tell me about the sea."}]
CHOICES = {
    "messages": HELLO,
    "n": 3,
    "seed": 11,
    "temperature": 1.5,
    "max_tokens": 150,
    "min_tokens": 150,
    "thinking": {"type": "enabled"},
    "thinking_token_budget": 40,
    "stream": True,
    "stream_options": {"include_usage": True},
}
RESPONSE = {
    "input": "Tell me about the sea.",
    "seed": 11,
    "temperature": 1.5,
    "max_output_tokens": 200,
    "min_tokens": 200,
    "reasoning": {"effort": "none"},
    "stream": True,
}
CASES = {"chat": ("/v1/chat/completions", CHOICES), "response": ("/v1/responses", RESPONSE)}
VARIABLE = ("id", "created", "created_at", "completed_at", "usage", "item_id")


def ask(mesh: RunningMesh, case: str, kill: str = "") -> list[Any]:
    """All events but what two runs may differ in; one process is killed after a few."""
    path, body = CASES[case]
    events: list[Any] = []
    with httpx.stream(
        "POST", mesh.url + path, json={"model": mesh.model, **body}, timeout=60
    ) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                events.append(bare(json.loads(line[6:])))
                if kill and len(events) == 12:
                    mesh.mesh.kill(kill)
    return events


def bare(value: Any) -> Any:  # noqa: ANN401  any JSON
    if isinstance(value, dict):
        return {k: bare(v) for k, v in value.items() if k not in VARIABLE}
    return [bare(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize(
    "name",
    [
        "tokenizer-0",
        pytest.param("tokenizer-1", marks=pytest.mark.long),
        pytest.param("scheduler-0", marks=pytest.mark.long),
    ],
)
def test_the_stream_goes_on_with_the_same_events(pair: RunningMesh, case: str, name: str) -> None:
    whole = ask(pair, case)
    assert "error" not in whole[-1]
    old = pair.mesh.pids[name]
    assert ask(pair, case, kill=name) == whole
    pair.mesh.wait_restarted(name, old)
    pair.mesh.wait_ready()
    pair.wait_idle()
