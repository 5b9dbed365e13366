"""What the router tells of itself: heartbeats, and the attributes of a request's route. Pure."""

from deepmesh.wire.messages import RouterStats, ServiceStats
from services.router.placements import Placements
from services.router.replicas import Route

Attributes = dict[str, str | int | float | bool]


def service_stats(name: str, placements: Placements, now: float) -> ServiceStats:
    """For heartbeats."""
    replicas = placements.replicas
    known, stored = replicas.num_points()
    router = RouterStats(
        name,
        waiting=placements.num_waiting,
        known_points=known,
        stored_points=stored,
        resyncs=replicas.counts["resyncs"],
        prompt_tokens=replicas.counts["prompt_tokens"],
        hit_tokens=replicas.counts["hit_tokens"],
        store_tokens=replicas.counts["store_tokens"],
        decisions=sorted(replicas.decisions.items()),
        loads=[(name, round(load, 3)) for name, load in sorted(replicas.loads_ms(now).items())],
    )
    return ServiceStats(replicas.is_ready, placements.num_requests, router=router)


def attributes(route: Route) -> Attributes:
    """Why this replica."""
    found: Attributes = {
        "replica": route.replica,
        "reason": route.reason,
        "prompt_tokens": route.prompt_tokens,
        "hit_tokens": route.hit_tokens,
        "load_ms": round(route.load_ms, 3),
    }
    if route.store_tokens:
        found["store_tokens"] = route.store_tokens
    if route.prefill_at:
        found["prefill_at"] = route.prefill_at
        found["prefill_tokens"] = route.prefill_tokens
    return found
