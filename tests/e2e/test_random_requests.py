"""Requests drawn from our OpenAPI document, many at once: no 5xx, no hang, no leak."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.conftest import RunningMesh
from tests.e2e.generator import Generator

PATIENCE_S = 60.0
LEAVES = 40  # every so many requests, a client hangs up in the middle


def storm(pair: RunningMesh, count: int, seed: int) -> dict[int, int]:
    """Answers by status; each error has its protocol's shape."""
    statuses: dict[int, int] = {}
    with httpx.Client(base_url=pair.url, timeout=PATIENCE_S) as http:
        generator = Generator(http.get("/openapi.json").json(), pair.model, seed)
        lock = threading.Lock()

        def one(number: int) -> None:
            with lock:
                method, path, body = generator.request()
            told = f"seed {seed}, request {number}: {method} {path} {json.dumps(body)}"
            if number % LEAVES == LEAVES - 1:
                leave(http, method, path, body)
                return
            began = time.monotonic()
            answer = http.request(method, path, json=body)
            assert time.monotonic() - began < PATIENCE_S, told
            assert answer.status_code < 500, f"{told}: {answer.status_code} {answer.text[:500]}"
            assert answer.headers["x-request-id"], told
            if answer.status_code >= 400 and path != "/metrics":
                assert answer.json()["error"]["message"], told
            with lock:
                statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
                if (
                    answer.status_code == 200
                    and path == "/v1/responses"
                    and b"resp_" in answer.content
                ):
                    at = answer.text.index("resp_")
                    generator.knows(answer.text[at : at + 37])

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(one, range(count)))
    pair.wait_idle()
    return statuses


def leave(http: httpx.Client, method: str, path: str, body: object) -> None:
    """Hang up as soon as headers are there."""
    with http.stream(method, path, json=body) as answer:
        assert answer.status_code < 500


def test_two_hundred_random_requests(pair: RunningMesh) -> None:
    statuses = storm(pair, 200, seed=1)
    assert statuses[200] > 70
    assert statuses[400] > 20


@pytest.mark.long
@pytest.mark.timeout(900)
def test_two_thousand_random_requests(pair: RunningMesh) -> None:
    statuses = storm(pair, 2000, seed=2)
    print(f"random requests by status: {dict(sorted(statuses.items()))}")
    assert statuses[200] > 700
    assert statuses[400] > 200
    pair.wait_total("deepmesh_streams_running", 0)
