"""Grammars that are compiled beside the executors before their requests may enter."""

from collections import OrderedDict

from deepmesh.wire.messages import CompileGrammars, Grammar, GrammarsCompiled

from .group import Group
from .outbox import Outbox
from .request import Request

AWAIT_NS = 2_000_000_000  # then a request enters, and sits out steps if it has to

Key = tuple[bytes, str, str]


class Order:
    """One grammar, ordered of all ranks."""

    def __init__(self, key: Key, ranks: int, until: int) -> None:
        self.key, self.until = key, until
        self.pending = set(range(ranks))  # ranks that have not answered


class Grammars:
    """What one engine epoch's mask workers have compiled, as far as anybody can tell.

    A request under a grammar that nobody has compiled yet would hold a slot and sit out step after
    step for want of its first mask. So its grammar is ordered when it arrives, and it enters once
    all ranks have answered. Answers are hints: what a worker has forgotten, or never made, it
    compiles when the request is in a step. So nobody waits longer than AWAIT_NS.
    """

    def __init__(self, group: Group, outbox: Outbox, *, kept: int) -> None:
        """`kept`: compiled grammars that each executor keeps; 0: nobody is asked, nobody waits."""
        self._group, self._outbox = group, outbox
        self.kept, self._max_open = kept, -(-kept // 2)
        self._orders: OrderedDict[Key, Order] = OrderedDict()  # the latest used last
        self._open: dict[int, Order] = {}  # by number, oldest first: some rank has not answered
        self._next = 1
        self._unsent: list[tuple[int, Grammar]] = []

    @property
    def num_open(self) -> int:
        """Orders that are not answered."""
        return len(self._open)

    @property
    def num_known(self) -> int:
        """Grammars that are taken for compiled, or will be."""
        return len(self._orders)

    def pending(self) -> list[set[int]]:
        """Of each open order, the ranks that have not answered."""
        return [order.pending for order in self._open.values()]

    def awaits(self, request: Request, now: int) -> bool:
        """Whether a request has to wait for its grammar, which is ordered if it was not."""
        grammar = request.generate.grammar
        if grammar is None or not self.kept:
            return False
        key = (grammar.hash, grammar.kind, grammar.text)
        order = self._orders.get(key)
        if order is None:
            order = self._order(key, grammar, now)
            if order is None:
                return True  # so many are being compiled that these would be forgotten meanwhile
        self._orders.move_to_end(key)
        return bool(order.pending) and now < order.until

    def _order(self, key: Key, grammar: Grammar, now: int) -> Order | None:
        while self._open and next(iter(self._open.values())).until <= now:
            del self._open[next(iter(self._open))]
        if len(self._open) >= self._max_open:
            return None
        order = Order(key, self._group.ranks, now + AWAIT_NS)
        self._orders[key] = self._open[self._next] = order
        self._unsent.append((self._next, grammar))
        self._next += 1
        if len(self._orders) > self.kept:
            self._orders.popitem(last=False)
        return order

    def compiled(self, message: GrammarsCompiled) -> None:
        """A rank has answered."""
        if message.engine_epoch != self._group.engine_epoch:
            return
        for number in message.orders:
            if (order := self._open.get(number)) is not None:
                order.pending.discard(message.rank)
                if not order.pending:
                    del self._open[number]

    def flush(self) -> None:
        """Send what was ordered, all of it in one message to each rank."""
        if not self._unsent:
            return
        message = CompileGrammars(self._group.engine_epoch, self._unsent)
        self._unsent = []
        for _, peer in sorted(self._group.peers.items()):
            self._outbox.send(peer, message)
