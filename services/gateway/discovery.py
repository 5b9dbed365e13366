"""Tokenizers behind one name: a link to every address that it leads to, as they come and go."""

import logging
from collections.abc import Callable

from deepmesh.wire.inbox import AsyncInbox
from deepmesh.wire.names import Lookup
from deepmesh.wire.sockets import Dialer
from services.gateway.tokenizers import Tokenizers

_log = logging.getLogger(__name__)


class Discovery:
    """For a name in `tokenizer.address` without an {index}: `compose up --scale`, DNS records.

    An address that the name leads to no longer keeps its link while that is up: whoever is told
    to stop finishes what it has.
    """

    def __init__(
        self,
        lookup: Lookup,
        dial: Callable[[str], Dialer],
        *,
        tokenizers: Tokenizers,
        inbox: AsyncInbox,
    ) -> None:
        """`dial` makes the link to an address in numbers."""
        self._lookup, self._dial = lookup, dial
        self._tokenizers, self._inbox = tokenizers, inbox
        self._dialers: dict[str, Dialer] = {}  # by address in numbers

    def look(self) -> None:
        """Call it a few times a second on the loop's thread; the name is asked for beside it."""
        self._lookup.ask()
        found = self._lookup.all()
        for address in found:
            if address not in self._dialers:
                _log.info("found a tokenizer at %s", address)
                dialer = self._dialers[address] = self._dial(address)
                self._tokenizers.add(dialer)
                self._inbox.add(dialer)
        for address, dialer in list(self._dialers.items()):
            if address not in found and dialer.peer is None:
                _log.info("no tokenizer at %s any longer", address)
                del self._dialers[address]
                self._tokenizers.remove(dialer)
                self._inbox.remove(dialer)
