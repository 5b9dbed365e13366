"""A small client of the HTTP API: streamed chat, and `generate` for many prompts at once."""

from collections.abc import Iterator
from typing import Literal, Self

import httpx
import msgspec

from deepmesh.client_errors import ClientError, check_response, model_names, unreachable
from deepmesh.offline import Engine, Output, agenerate, generate

__all__ = ["ChatEvent", "Client", "ClientError", "Engine", "Output", "agenerate", "generate"]

Json = dict[str, object]


class ChatEvent(msgspec.Struct, frozen=True):
    """One piece of an answer."""

    kind: Literal["thinking", "text", "finish"]
    text: str  # of "finish": the reason


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)  # streamed
    message: _Delta = msgspec.field(default_factory=_Delta)  # in one piece
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: dict[str, object] | None = None


class Client:
    """Talks to one gateway; `with Client(url) as client`."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 300.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        # No proxies out of the environment: the gateway is usually on this machine.
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/"), headers=headers, timeout=timeout, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise ClientError(f"{url}: {error}") from error
        self._url = url

    def models(self) -> list[str]:
        """Names of the models that the mesh serves."""
        try:
            response = self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error
        return model_names(response)

    def stream_chat(
        self, messages: list[Json], fields: Json, *, traceparent: str = ""
    ) -> Iterator[ChatEvent]:
        """Stream the answer to a conversation; `fields` are those of the API, None left out.

        Raises:
            ClientError: the mesh cannot be reached, or refuses; also in the middle of a stream.
        """
        try:
            with self._http.stream(
                "POST",
                "/v1/chat/completions",
                json=_body(messages, {**fields, "stream": True}),
                headers=_trace_header(traceparent),
            ) as response:
                if response.is_error:
                    response.read()
                check_response(response)
                for line in response.iter_lines():
                    if line.startswith("data:") and line[5:].strip() != "[DONE]":
                        yield from _events(line[5:])
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error

    def chat(self, messages: list[Json], fields: Json, *, traceparent: str = "") -> list[ChatEvent]:
        """The answer in one piece, as the same events."""
        body = _body(messages, {**fields, "stream": False})
        try:
            response = self._http.post(
                "/v1/chat/completions", json=body, headers=_trace_header(traceparent)
            )
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error
        check_response(response)
        for choice in _decoded(response.content).choices:
            message = choice.message
            return [
                *[ChatEvent("thinking", t) for t in [message.reasoning_content] if t],
                *[ChatEvent("text", t) for t in [message.content] if t],
                ChatEvent("finish", choice.finish_reason or ""),
            ]
        raise ClientError("the answer has no choices")

    def close(self) -> None:
        """Let go of the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _body(messages: list[Json], fields: Json) -> Json:
    given = {key: value for key, value in fields.items() if value is not None}
    return {"messages": messages, **given}


def _trace_header(traceparent: str) -> dict[str, str]:
    return {"traceparent": traceparent} if traceparent else {}


def _decoded(data: str | bytes) -> _Chunk:
    try:
        return msgspec.json.decode(data, type=_Chunk)
    except msgspec.DecodeError as error:
        raise ClientError(f"not the answer of a mesh: {error}") from error


def _events(data: str) -> Iterator[ChatEvent]:
    chunk = _decoded(data)
    if chunk.error is not None:
        raise ClientError(str(chunk.error.get("message", chunk.error)))
    for choice in chunk.choices:
        if choice.delta.reasoning_content:
            yield ChatEvent("thinking", choice.delta.reasoning_content)
        if choice.delta.content:
            yield ChatEvent("text", choice.delta.content)
        if choice.finish_reason:
            yield ChatEvent("finish", choice.finish_reason)
