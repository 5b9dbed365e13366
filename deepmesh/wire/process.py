"""What all links of one process share: its clock, its neighbours, and who answers for its past."""

from typing import Protocol

from deepmesh.wire.clocks import MeshClock
from deepmesh.wire.messages import AnyMessage, GetRecords, KeepTrace, LinkStats, Records

Observed = GetRecords | Records | KeepTrace
TELLS = ("tokenizer", "router", "scheduler", "kvstore")  # of their links; their peers need not
PASSES_ON = {  # orders of a gateway and the links that peers tell of; answers go back the same way
    "tokenizer": ("scheduler", "router", "kvstore"),
    "scheduler": ("executor",),
}


class Endpoint(Protocol):
    """A listener or dialler, as far as it matters here."""

    def link_stats(self) -> list[LinkStats]:
        """Of all its links that are up."""
        ...

    def links_told(self) -> list[LinkStats]:
        """By its peers, in their last heartbeats."""
        ...

    def send_to(self, peer: str, message: AnyMessage) -> bool:
        """False when it has no link to this peer."""
        ...


class Observer(Protocol):
    """Answers for the process (`deepmesh.recorder.Desk`)."""

    @property
    def num_dropped(self) -> int:
        """Spans that no exporter took."""
        ...

    def take(self, message: Observed, peer: str, process: "Process") -> None:
        """A message of this kind has come; it is not passed to the service."""
        ...


class Process:
    """One for all endpoints of an `Identity`; used by the thread of the service's loop."""

    def __init__(self, service: str, clock: MeshClock) -> None:
        self.service, self.clock = service, clock
        self.endpoints: list[Endpoint] = []
        self.observer: Observer | None = None

    def links_told(self) -> list[LinkStats]:
        """For heartbeats: our links, and those that the peers behind us have told of."""
        if self.service not in TELLS:
            return []
        links = self.links()
        if self.service == "tokenizer":
            links += [link for endpoint in self.endpoints for link in endpoint.links_told()]
        return links

    @property
    def dropped_spans(self) -> int:
        """By this process."""
        return self.observer.num_dropped if self.observer is not None else 0

    def links(self) -> list[LinkStats]:
        """Ours."""
        return [link for endpoint in self.endpoints for link in endpoint.link_stats()]

    def send(self, peer: str, message: AnyMessage) -> bool:
        """To a neighbour by its name; False when no link to it is up."""
        return any(endpoint.send_to(peer, message) for endpoint in self.endpoints)

    def pass_on(self, message: AnyMessage) -> int:
        """To all neighbours behind this process; how many there are."""
        behind = PASSES_ON.get(self.service, ())
        names = [link.peer for link in self.links() if link.peer_service in behind]
        return sum(self.send(name, message) for name in dict.fromkeys(names))
