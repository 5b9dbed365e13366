"""Posts requests to a gateway, many at a time; waits and tries again while it is busy or away."""

import asyncio
import random
from typing import Self

import httpx

from deepmesh.client_errors import ClientError, model_names, unreachable

RETRIED = (408, 409, 429, 500, 502, 503, 504)
LONGEST_WAIT_S = 30.0


class AsyncClient:
    """One gateway; `async with AsyncClient(url) as client`."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        concurrency: int = 32,
        attempts: int = 8,
        timeout_s: float = 600.0,
    ) -> None:
        """Connects to nothing yet.

        Raises:
            ClientError: `url` is none.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._http = httpx.AsyncClient(
                base_url=url.rstrip("/"),
                headers=headers,
                timeout=httpx.Timeout(timeout_s, connect=5.0, pool=None),
                limits=httpx.Limits(max_connections=concurrency),
                trust_env=False,  # the gateway is usually on this machine
            )
        except httpx.InvalidURL as error:
            raise ClientError(f"{url}: {error}") from error
        self._url = url
        self._attempts = attempts

    async def post(self, path: str, body: bytes) -> httpx.Response:
        """The last answer, good or bad, after waiting out what may pass.

        Raises:
            ClientError: no answer came at all.
        """
        headers, attempt = {"Content-Type": "application/json"}, 0
        while True:
            attempt += 1
            try:
                response = await self._http.post(path, content=body, headers=headers)
            except httpx.HTTPError as error:
                if attempt >= self._attempts:
                    raise unreachable(self._url, error) from error
                await asyncio.sleep(_wait_s(attempt, ""))
                continue
            if response.status_code not in RETRIED or attempt >= self._attempts:
                return response
            await asyncio.sleep(_wait_s(attempt, response.headers.get("retry-after", "")))

    async def first_model(self) -> str:
        """The name of the model that the mesh serves; asks once.

        Raises:
            ClientError: no answer, an error, or no model.
        """
        try:
            response = await self._http.get("/v1/models")
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error
        names = model_names(response)
        if not names:
            raise ClientError(f"{self._url}: serves no model yet")
        return names[0]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


def _wait_s(attempt: int, retry_after: str) -> float:
    """At least what the server asks for; some chance in it, so that waiters do not come at once."""
    asked = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else 0.0
    backoff = min(LONGEST_WAIT_S, 0.25 * 2 ** (attempt - 1))
    return min(LONGEST_WAIT_S, max(asked, backoff)) * random.uniform(1.0, 1.25)
