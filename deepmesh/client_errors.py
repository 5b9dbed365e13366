"""What clients of the HTTP API raise, and how they find the message in an answer."""

import json

import httpx
import msgspec

from deepmesh.errors import UserError


class ClientError(UserError):
    """The request was refused, or the mesh cannot be reached; the text says why."""


def unreachable(url: str, error: httpx.HTTPError | httpx.InvalidURL) -> ClientError:
    """No answer came from there."""
    why = str(error) or type(error).__name__
    return ClientError(f"{url}: {why}; is the mesh up? `deepmesh doctor` looks")


def model_names(response: httpx.Response) -> list[str]:
    """Out of the answer of /v1/models.

    Raises:
        ClientError: it is an error, or the answer of something else.
    """
    check_response(response)
    try:
        return [model.id for model in msgspec.json.decode(response.content, type=_Models).data]
    except msgspec.DecodeError as error:
        raise ClientError(f"{response.url}: not the API of a mesh: {error}") from error


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def check_response(response: httpx.Response) -> None:
    """Raise ClientError with the server's own words unless the answer is good; its body is read."""
    if not response.is_error:
        return
    try:
        error = response.json()["error"]
        message, param = str(error["message"]), error.get("param")
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
        message, param = response.text[:500], None
    field = f" (field: {param})" if param else ""
    raise ClientError(f"HTTP {response.status_code}: {message}{field}")
