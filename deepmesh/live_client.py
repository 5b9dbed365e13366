"""Live data of a mesh from one of its gateways: the feed of /ui/api, and the timeline."""

from collections.abc import Iterator
from typing import Self

import httpx
import msgspec

from deepmesh.client_errors import ClientError, check_response, unreachable


class Process(msgspec.Struct, frozen=True):
    """One of the mesh, as the gateway sees it."""

    name: str
    service: str
    state: str  # up, starting, restarted, down, unknown
    requests: int
    restarts: int = 0


class Link(msgspec.Struct, frozen=True, rename={"sender": "from", "receiver": "to"}):
    """Messages between two processes."""

    sender: str
    receiver: str
    sent_per_s: float
    received_per_s: float


class Replica(msgspec.Struct, frozen=True):
    """An EP group."""

    name: str
    ready: bool
    running: int
    waiting: int
    waiting_tokens: int
    kv_usage: float
    steps: int
    preemptions: int
    role: str = "both"
    paused: bool = False
    draining: bool = False


class Device(msgspec.Struct, frozen=True):
    """A rank, and the shares of its peaks that its steps reached lately; None: not known."""

    replica: str
    rank: int
    mfu: float | None = None
    bandwidth_share: float | None = None


class Figures(msgspec.Struct, frozen=True):
    """Of the last seconds."""

    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    running: int
    waiting: int
    kv_usage: float
    ttft_ms: dict[str, float] | None = None
    itl_ms: dict[str, float] | None = None
    mfu: float | None = None
    bandwidth_share: float | None = None


class Seen(msgspec.Struct, frozen=True):
    """One of the last requests."""

    id: str
    route: str
    state: str
    status: int
    duration_ms: float
    ttft_ms: float | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    events: int
    error: str


class News(msgspec.Struct, frozen=True):
    """A process is in another state than before."""

    at_ms: float
    process: str
    was: str
    state: str


class State(msgspec.Struct, frozen=True):
    """One event of the feed."""

    model: str
    version: str
    processes: list[Process]
    links: list[Link]
    replicas: list[Replica]
    figures: Figures | None
    requests: list[Seen]
    news: list[News] = []
    devices: list[Device] = []


class LiveClient:
    """Talks to one gateway; `with LiveClient(url) as live`."""

    def __init__(self, url: str, *, api_key: str = "", timeout_s: float = 20.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._url = url
        try:
            self._http = httpx.Client(
                base_url=url.rstrip("/"), headers=headers, timeout=timeout_s, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise ClientError(f"{url}: {error}") from error

    def states(self, interval_s: float) -> Iterator[State]:
        """The feed, until the gateway ends it.

        Raises:
            ClientError: the mesh cannot be reached, refuses, or is cut off.
        """
        try:
            path = f"/ui/api/feed?interval={interval_s:g}"
            with self._http.stream("GET", path) as response:
                if response.is_error:
                    response.read()
                check_response(response)
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        yield msgspec.json.decode(line[6:], type=State)
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error
        except msgspec.DecodeError as error:
            raise ClientError(f"{self._url}: not the feed of a mesh: {error}") from error

    def trace(self, last_s: float) -> bytes:
        """The timeline of the last seconds, in the format of Perfetto and chrome://tracing.

        Raises:
            ClientError: as for `states`.
        """
        try:
            response = self._http.get(f"/ui/api/timeline?last={last_s:g}&format=chrome")
        except httpx.HTTPError as error:
            raise unreachable(self._url, error) from error
        check_response(response)
        return response.content

    def close(self) -> None:
        """Let go of the connection."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
