"""What an operator asks of kvstores, over one short link each: figures, and to forget."""

import os
import time
from typing import TypeVar

from deepmesh.config import Config
from deepmesh.wire.inbox import Inbox
from deepmesh.wire.link import Mail, PeerUp
from deepmesh.wire.messages import (
    AnyMessage,
    FlushCache,
    FlushStore,
    GetStoreStats,
    StoreFlushed,
    StoreStats,
)
from deepmesh.wire.sockets import Dialer, Identity

ANSWER_S = 2.0
FLUSH_S = 15.0  # Redis may have much to forget
M = TypeVar("M", bound=AnyMessage)


def ask_stats(config: Config, index: int) -> StoreStats | None:
    """The figures of a running kvstore; None when it does not answer."""
    return _ask(config, config.kvstore_address(index), GetStoreStats(1), StoreStats, ANSWER_S)


def flush_store(config: Config, index: int, *, shared: bool) -> StoreFlushed | None:
    """Have a kvstore forget all blocks and points; None when it does not answer."""
    order = FlushStore(1, shared)
    return _ask(config, config.kvstore_address(index), order, StoreFlushed, FLUSH_S)


def flush_device(config: Config, index: int) -> bool:
    """Have a scheduler forget what it keeps on devices for prefix hits; False: it is not there."""
    link, inbox = _dial(config, config.scheduler_address(index))
    deadline = time.monotonic() + ANSWER_S
    try:
        while (left := deadline - time.monotonic()) > 0:
            for event in inbox.wait(left):
                if isinstance(event, PeerUp):
                    return link.send(FlushCache())
        return False
    finally:
        inbox.close()


def _ask(
    config: Config, address: str, order: AnyMessage, kind: type[M], patience_s: float
) -> M | None:
    link, inbox = _dial(config, address)
    deadline = time.monotonic() + patience_s
    until_up = time.monotonic() + ANSWER_S
    try:
        while (left := (deadline if link.peer else until_up) - time.monotonic()) > 0:
            for event in inbox.wait(left):
                match event:
                    case PeerUp():
                        link.send(order)
                    case Mail(message=message) if isinstance(message, kind):
                        return message
                    case _:
                        pass
        return None
    finally:
        inbox.close()


def _dial(config: Config, address: str) -> tuple[Dialer, Inbox]:
    me = Identity.new("operator", f"operator-{os.getpid()}", config)
    link = Dialer(address, me, config.links)
    return link, Inbox(link)
