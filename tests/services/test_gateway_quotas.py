"""Limits of one API key: told on every answer, kept, and nobody else's."""

import hashlib
from pathlib import Path

import pytest

from deepmesh.config import GatewayConfig
from deepmesh.wire.messages import ResponseFinished, Submit
from services.gateway.arrival import arrive
from services.gateway.auth import Keys
from services.gateway.errors import ProblemError
from services.gateway.quotas import Quotas
from tests.services.gateway_harness import Mesh, error_of, running_mesh

ANN, BOB = "ann", "bob"
DIGESTS = [hashlib.sha256(name.encode()).hexdigest() for name in (ANN, BOB)]


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Door:
    """Requests of both keys at a gateway with limits."""

    def __init__(self, **limits: int) -> None:
        self.clock = Clock()
        config = GatewayConfig(api_keys=DIGESTS, **limits)  # type: ignore[arg-type]
        self.quotas = Quotas(Keys(config.api_keys), config, self.clock)
        self.headers: dict[str, str] = {}

    def enter(self, who: str, tokens: int = 0, path: str = "/v1/chat/completions") -> None:
        """One whole request."""
        arrival = arrive(path, [(b"x-api-key", who.encode())])
        try:
            with self.quotas.enter(arrival, "chat" if "chat" in path else "messages"):
                pass
        finally:
            self.headers = {k.decode(): v.decode() for k, v in arrival.headers_out}
        if tokens:
            self.quotas.used(arrival, tokens)

    def refused(self, who: str) -> float:
        """Seconds to wait."""
        with pytest.raises(ProblemError) as caught:
            self.enter(who)
        assert caught.value.problem.status == 429
        return caught.value.problem.retry_after_s


def test_requests_of_a_minute() -> None:
    door = Door(key_requests_per_minute=6)
    for left in range(5, -1, -1):
        door.enter(ANN)
        assert door.headers["x-ratelimit-limit-requests"] == "6"
        assert door.headers["x-ratelimit-remaining-requests"] == str(left)
    assert door.refused(ANN) == pytest.approx(10)
    assert door.headers["x-ratelimit-remaining-requests"] == "0"
    assert float(door.headers["x-ratelimit-reset-requests"].rstrip("s")) == pytest.approx(60)
    door.enter(BOB)
    door.clock.now += 10
    door.enter(ANN)
    door.refused(ANN)


def test_tokens_count_when_they_are_known() -> None:
    door = Door(key_tokens_per_minute=600)
    door.enter(ANN, tokens=900)
    assert door.headers["x-ratelimit-remaining-tokens"] == "600"
    assert door.refused(ANN) == pytest.approx(30.1)
    door.enter(BOB)
    door.clock.now += 31
    door.enter(ANN)
    assert door.headers["x-ratelimit-remaining-tokens"] == "10"


def test_open_requests_of_a_key() -> None:
    door = Door(key_max_requests=1)
    arrival = arrive("/v1/messages", [(b"x-api-key", ANN.encode())])
    with door.quotas.enter(arrival, "messages"):
        assert door.refused(ANN) >= 1
        door.enter(BOB)
        models = arrive("/v1/models", [(b"x-api-key", ANN.encode())])
        with door.quotas.enter(models, "models"):
            pass
    door.enter(ANN)


def test_a_refused_request_takes_nothing() -> None:
    door = Door(key_requests_per_minute=2, key_tokens_per_minute=60)
    door.enter(ANN, tokens=120)
    for _ in range(5):
        door.refused(ANN)
    assert door.headers["x-ratelimit-remaining-requests"] == "1"


def test_each_of_several_gateways_grants_its_share() -> None:
    limits = {"key_requests_per_minute": 5, "key_max_requests": 1, "key_tokens_per_minute": 600}
    door = Door(count=2, **limits)
    for left in (2, 1, 0):
        door.enter(ANN)
        assert door.headers["x-ratelimit-remaining-requests"] == str(left)
    assert door.headers["x-ratelimit-limit-tokens"] == "300"
    with pytest.raises(ProblemError, match="3 requests a minute at this gateway"):
        door.enter(ANN)
    arrival = arrive("/v1/messages", [(b"x-api-key", BOB.encode())])
    with door.quotas.enter(arrival, "messages"):
        assert door.refused(BOB) >= 1


def test_anthropic_names() -> None:
    door = Door(key_requests_per_minute=2)
    door.enter(ANN, path="/v1/messages")
    assert door.headers["anthropic-ratelimit-requests-remaining"] == "1"
    assert door.headers["anthropic-ratelimit-requests-reset"].endswith("Z")


def ask(mesh: Mesh, who: str) -> int:
    client = mesh.post(headers={"x-api-key": who})
    submit = mesh.tokenizer.expect(Submit)
    mesh.tokenizer.send(
        ResponseFinished(submit.rid, 200, b"{}", prompt_tokens=400, completion_tokens=300)
    )
    response = client.getresponse()
    response.read()
    return response.status


def test_through_the_gateway(tmp_path: Path) -> None:
    limits = {"key_tokens_per_minute": 60, "api_keys": DIGESTS}
    with running_mesh(tmp_path, **limits) as mesh:
        assert ask(mesh, ANN) == 200
        response = mesh.post(headers={"x-api-key": ANN}).getresponse()
        assert response.status == 429
        assert int(response.getheader("retry-after") or 0) >= 10
        assert response.getheader("x-ratelimit-limit-tokens") == "60"
        assert error_of(response)["code"] == "rate_limit_exceeded"
        assert not mesh.tokenizer.has_mail
        assert ask(mesh, BOB) == 200


def test_priorities_belong_to_keys(tmp_path: Path) -> None:
    with running_mesh(tmp_path, api_keys=DIGESTS, key_priorities={DIGESTS[0]: 3}) as mesh:
        for who, priority in ((ANN, 3), (BOB, 0)):
            mesh.post(headers={"x-api-key": who})
            assert mesh.tokenizer.expect(Submit).priority == priority
