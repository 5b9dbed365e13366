"""The EP group as an executor sees it: a process group per engine epoch, given up as a whole."""

import logging
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
from torch import Tensor

from deepmesh.wire.messages import SubmitStep
from kernels.comm.comm import Arrivals, ExchangeError
from kernels.comm.gloo import PATIENCE_S, GlooExchange
from services.executor.interface import GroupLost
from services.executor.rendezvous import Rendezvous

_log = logging.getLogger(__name__)
NO_EPOCH = -1


class _Membership:
    """This rank in the group of one engine epoch."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.stopped = threading.Event()
        self.exchange: GlooExchange | None = None  # once connected

    def give_up(self) -> None:
        """End what waits; peers that wait get an error."""
        self.stopped.set()
        if self.exchange is not None:
            # may take until the patience of the group's own threads ends
            threading.Thread(target=self.exchange.close, name="group-close", daemon=True).start()


class ExpertGroup:
    """The `Exchange` of the model, whatever the epoch.

    Connects with the first step of an epoch: only then every rank is known to have loaded.
    `begin_epoch` and `leave` may come from any thread and end what waits; all else belongs to
    the device stream's thread.
    """

    def __init__(self, rendezvous: Rendezvous, *, patience_s: float = PATIENCE_S) -> None:
        """`patience_s`: how long a rank waits for another one, while nobody says it is gone."""
        self.rank, self.ranks = rendezvous.rank, rendezvous.ranks
        self._rendezvous, self._patience_s = rendezvous, patience_s
        self._member = _Membership(NO_EPOCH)  # replaced, never changed back
        self._entered = self._member  # of the step that runs

    # ------------------------------------------------------------ any thread

    def begin_epoch(self, epoch: int) -> None:
        """Give up the group of the epoch before; steps of this one may come."""
        old, self._member = self._member, _Membership(epoch)
        old.give_up()

    def leave(self, epoch: int) -> None:
        """Take no further part in this epoch."""
        member = self._member
        if member.epoch == epoch:
            member.give_up()

    # ------------------------------------------------------------ the device stream's thread

    def enter(self, step: SubmitStep) -> None:
        """Begin this rank's part of a numbered group step, in the group of its epoch.

        Raises:
            GroupLost: the epoch is over for this rank, or a peer is gone.
        """
        self._entered = member = self._member
        if member.epoch != step.engine_epoch:
            raise GroupLost(f"engine epoch {step.engine_epoch} is over")
        with self._losing():
            exchange = member.exchange or self._connect(member)
        agreed = msgspec.msgpack.encode((step.engine_epoch, step.step_id, step.descriptor))
        exchange.begin(zlib.crc32(agreed) >> 1, step.descriptor.padded_tokens)

    def dispatch(self, x: Tensor, expert_ids: Tensor, weights: Tensor, owners: Tensor) -> Arrivals:
        """See `Exchange`; raises GroupLost."""
        with self._losing():
            return self._exchange().dispatch(x, expert_ids, weights, owners)

    def combine(self, slots: Tensor) -> Tensor:
        """See `Exchange`; raises GroupLost."""
        with self._losing():
            return self._exchange().combine(slots)

    def _exchange(self) -> GlooExchange:
        exchange = self._entered.exchange
        assert exchange is not None, "no group step has been entered"
        return exchange

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """A failed exchange ends this rank's membership: no later step could be in order."""
        try:
            yield
        except ExchangeError as error:
            self._entered.give_up()
            raise GroupLost(str(error)) from error

    def _connect(self, member: _Membership) -> GlooExchange:
        began = time.monotonic()
        member.exchange = exchange = GlooExchange(
            self._rendezvous.connect(member.epoch, member.stopped, self._patience_s),
            member.stopped,
            patience_s=self._patience_s,
        )
        exchange.barrier()
        self._rendezvous.finish(member.epoch)
        took_ms = (time.monotonic() - began) * 1e3
        _log.info(
            "rank %d of %d is in the group of epoch %d: %.0f ms",
            self.rank,
            self.ranks,
            member.epoch,
            took_ms,
        )
        return exchange
