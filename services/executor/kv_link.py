"""The link to one kvstore: orders and answers, and its file if this process sees the same."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from deepmesh.config import LinksConfig
from deepmesh.wire.messages import (
    AnyMessage,
    Blocks,
    BlocksRead,
    PutBlocks,
    PutDone,
    Reserved,
    ServiceStats,
    SharedFile,
    SharedFileSeen,
)
from deepmesh.wire.sockets import Dialer, Identity, Mail
from services.executor.kv_file import MappedFile
from services.executor.kv_window import MappedWindow
from services.executor.window import NAME as WINDOW
from services.executor.window import open_window

_log = logging.getLogger(__name__)
Answer = Reserved | PutDone | Blocks


class Asker(Protocol):
    """Whoever waits for an answer."""

    def on_answer(self, answer: Answer, attachments: Sequence[bytes]) -> None:
        """It has come."""
        ...


class StoreLink:
    """Dials one kvstore, again and again, and hands each answer to who asked."""

    def __init__(
        self,
        address: str,
        me: Identity,
        links: LinksConfig,
        stats: Callable[[], ServiceStats],
        *,
        device: str = "",
    ) -> None:
        """`device`: windows are opened for this one; empty: they are not."""
        self.dialer = Dialer(address, me, links, stats)
        self.file: MappedFile | MappedWindow | None = None  # of the kvstore that is up
        self._device = device
        self._last_id = 0
        self._askers: dict[int, Asker] = {}

    @property
    def is_up(self) -> bool:
        """Whether orders can be sent."""
        return self.dialer.peer is not None

    @property
    def name(self) -> str:
        """Of the kvstore; empty while the link is not up."""
        return self.dialer.peer.name if self.dialer.peer is not None else ""

    def new_id(self) -> int:
        """An `op_id` that was not used on this link."""
        self._last_id += 1
        return self._last_id

    def ask(
        self, op_id: int, order: AnyMessage, asker: Asker, attachments: Sequence[bytes] = ()
    ) -> bool:
        """Send an order; False when the link is down, and then nobody waits."""
        if not self.dialer.send(order, attachments):
            return False
        self._askers[op_id] = asker
        return True

    def tell(self, message: AnyMessage) -> None:
        """Send what has no answer; of no use to a kvstore that is gone."""
        self.dialer.send(message)

    def forget(self, asker: Asker) -> None:
        """It waits no longer: a late answer is declined."""
        self._askers = {op_id: a for op_id, a in self._askers.items() if a is not asker}

    def on_down(self) -> None:
        """The link is lost: the file is that of a kvstore that may be dead."""
        self._askers.clear()
        self.drop_file()

    def drop_file(self) -> None:
        """Payloads travel in messages from now on."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def on_mail(self, mail: Mail) -> None:
        """A message of the kvstore."""
        match mail.message:
            case SharedFile() as offer:
                self._on_file(offer)
            case (Reserved() | PutDone() | Blocks()) as answer:
                asker = self._askers.pop(answer.op_id, None)
                if asker is not None:
                    asker.on_answer(answer, mail.attachments)
                else:
                    self._decline(answer)
            case message:
                _log.warning("ignored a %s of %s", type(message).__name__, mail.peer.name)

    def close(self) -> None:
        """Give the file back; the dialer belongs to the inbox."""
        self.drop_file()

    def _on_file(self, offer: SharedFile) -> None:
        self.drop_file()
        try:
            if self._device and offer.path.startswith(WINDOW):
                window = open_window(offer.path, offer.num_bytes, self._device)
                self.file = MappedWindow(window, offer.num_bytes)
                _log.info("prompts of %s come through its window", self.name)
            else:
                self.file = MappedFile(offer.path, offer.num_bytes)
        except (OSError, ValueError, RuntimeError) as error:
            _log.info("no shared memory with %s: %s", self.name, error)
            return
        self.tell(SharedFileSeen(self.file.head(offer.num_nonce_bytes)))

    def _decline(self, answer: Answer) -> None:
        """Nobody waits any more; what the kvstore holds for us, it may have back."""
        if isinstance(answer, Reserved) and any(item.extents for item in answer.items):
            self.tell(PutBlocks(answer.op_id, 0, []))
        elif isinstance(answer, Blocks) and any(item.extents for item in answer.items):
            self.tell(BlocksRead(answer.op_id))
