"""How long a request waits for an engine, and for its reader."""

from deepmesh.config import Config
from deepmesh.wire.messages import ErrorCode
from services.tokenizer.book import Clock
from services.tokenizer.request import Request


def patience_s(request: Request, config: Config, clock: Clock) -> float:
    """How long a request waits for its first scheduler."""
    if request.submit.deadline_ns:
        return max((request.submit.deadline_ns - clock.wall_ns) / 1e9, 0.0)
    return config.gateway.deadline_s


def give_up(request: Request) -> tuple[ErrorCode, str]:
    """What to say of a request that no scheduler took in time."""
    if request.was_accepted:
        detail = "the engine was lost and did not come back in time; send the request again"
        return ErrorCode.ENGINE_RESTARTED, detail
    return ErrorCode.OVERLOADED, "no engine is up; try again later"


def is_too_slow(request: Request, config: Config, clock: Clock) -> bool:
    """Whether its reader has been too far behind for too long."""
    behind = request.next_event - request.credited
    is_read = request.is_stream and not request.is_detached
    if not is_read or behind <= config.tokenizer.unacked_events:
        request.stuck_since = 0.0
        return False
    request.stuck_since = request.stuck_since or clock.now
    return clock.now - request.stuck_since >= config.tokenizer.slow_consumer_s
