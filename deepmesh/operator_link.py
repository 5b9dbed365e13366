"""Orders of an operator to a scheduler: one short link, until its state says that they hold."""

import time

from deepmesh.config import Config
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.link import PeerUp
from deepmesh.wire.messages import Pause, Resume, ServiceStats
from deepmesh.wire.sockets import Dialer, Identity

SERVICE = "operator"
SURE_BEATS = 2  # the first heartbeat behind an order may have left before the order came


def give_order(config: Config, index: int, order: Pause | Resume, *, timeout_s: float) -> str:
    """Pause or resume scheduler `index`, and wait until its heartbeats say so.

    Returns:
        What is wrong; empty if the order holds.
    """
    me = Identity.new(SERVICE, f"{SERVICE}-0", config)
    link = Dialer(config.scheduler_address(index), me, config.links)
    inbox = Inbox(link)
    wanted = isinstance(order, Pause)
    deadline = time.monotonic() + timeout_s
    is_told, beats, stats = False, 0, ServiceStats()
    try:
        while (left := deadline - time.monotonic()) > 0:
            for event in inbox.wait(left):
                if isinstance(event, PeerUp):
                    link.send(order)  # idempotent: after a lost link it is sent again
                    is_told, beats = True, 0
            if link.peer is None or link.peer.stats is stats:
                continue
            was, stats = stats, link.peer.stats
            beats += 1
            if is_told and stats.replicas and stats.replicas[0].paused == wanted:
                has_changed = was.replicas and was.replicas[0].paused != wanted
                if has_changed or beats > SURE_BEATS:
                    return ""
        if not is_told:
            return f"nothing answers at {link.address}"
        return f"told, but its steps in flight have not ended within {timeout_s:g} s"
    finally:
        inbox.close()
