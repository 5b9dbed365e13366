"""What clients of the HTTP API raise, and how they find the message in an answer."""

import json

import httpx

from deepmesh.errors import UserError


class ClientError(UserError):
    """The request was refused, or the mesh cannot be reached; the text says why."""


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
