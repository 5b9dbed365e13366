"""The EP group as an executor sees it: a process group per engine epoch, given up as a whole."""

import logging
import threading
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec
from torch import Tensor

from deepmesh.recorder import Kind, Slice
from deepmesh.wire.messages import SubmitStep
from kernels.comm.comm import Arrivals, Exchange, ExchangeError, Loopback
from kernels.comm.gloo import PATIENCE_S, GlooExchange
from services.executor.interface import GroupLost
from services.executor.rendezvous import Rendezvous

_log = logging.getLogger(__name__)
NO_EPOCH = -1


class Membership:
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


class EpochGroup(ABC):
    """The ranks of an EP group, whatever the epoch.

    Connects with the first step of an epoch: only then every rank is known to have loaded.
    `begin_epoch` and `leave` may come from any thread and end what waits; all else belongs to
    the device stream's thread.
    """

    def __init__(self, rendezvous: Rendezvous, patience_s: float) -> None:
        self.rank, self.ranks = rendezvous.rank, rendezvous.ranks
        self._rendezvous, self._patience_s = rendezvous, patience_s
        self._member = Membership(NO_EPOCH)  # replaced, never changed back
        self._entered = self._member  # of the step that runs

    def begin_epoch(self, epoch: int) -> None:
        """Give up the group of the epoch before; steps of this one may come."""
        old, self._member = self._member, Membership(epoch)
        self._give_up(old)

    def leave(self, epoch: int) -> None:
        """Take no further part in this epoch."""
        member = self._member
        if member.epoch == epoch:
            self._give_up(member)

    def _give_up(self, member: Membership) -> None:
        member.give_up()

    @abstractmethod
    def enter(self, step: SubmitStep) -> None:
        """Begin this rank's part of a numbered group step, in the group of its epoch.

        Raises:
            GroupLost: the epoch is over for this rank, or a peer is gone.
        """

    @abstractmethod
    def apart(self) -> AbstractContextManager[None]:
        """Within, exchanges reach nobody: to measure this rank's work before the group meets."""

    def _connected(self, step: SubmitStep) -> GlooExchange:
        """The exchange of the step's epoch, into which this rank has now come."""
        self._entered = member = self._member
        if member.epoch != step.engine_epoch:
            raise GroupLost(f"engine epoch {step.engine_epoch} is over")
        with self._losing():
            return member.exchange or self._connect(member)

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """A failed exchange ends this rank's membership: no later step could be in order."""
        try:
            yield
        except ExchangeError as error:
            self._give_up(self._entered)
            raise GroupLost(str(error)) from error

    def _connect(self, member: Membership) -> GlooExchange:
        began = time.monotonic()
        member.exchange = exchange = GlooExchange(
            self._rendezvous.connect(member.epoch, member.stopped, self._patience_s),
            member.stopped,
            patience_s=self._patience_s,
        )
        self._met(member, exchange)
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

    @abstractmethod
    def _met(self, member: Membership, exchange: GlooExchange) -> None:
        """The ranks of the epoch reach each other; they wait for each other behind this."""


def tag_of(step: SubmitStep) -> int:
    """31 bits that ranks at different steps do not share."""
    agreed = msgspec.msgpack.encode((step.engine_epoch, step.step_id, step.descriptor))
    return zlib.crc32(agreed) >> 1


class ExpertGroup(EpochGroup):
    """The `Exchange` of the model on a CPU."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        *,
        patience_s: float = PATIENCE_S,
        record: Callable[[Slice], None] = lambda piece: None,
    ) -> None:
        """
        Args:
            patience_s: how long a rank waits for another one, while nobody says it is gone.
            record: gets the time of each exchange, for the timeline.
        """
        super().__init__(rendezvous, patience_s)
        self._record, self._group_step = record, 0
        self._loopback: Loopback | None = None  # while this rank measures itself

    def enter(self, step: SubmitStep) -> None:
        """See `EpochGroup`."""
        self._group_step = step.group_step
        self._connected(step).begin(tag_of(step), step.descriptor.padded_tokens)

    def _met(self, member: Membership, exchange: GlooExchange) -> None:
        """See `EpochGroup`: nothing is left to do."""

    def dispatch(
        self,
        x: Tensor,
        expert_ids: Tensor,
        weights: Tensor,
        owners: Tensor,
        meanwhile: Callable[[], None] | None = None,
    ) -> Arrivals:
        """See `Exchange`; raises GroupLost."""
        began_ns = time.time_ns()
        with self._losing():
            arrivals = self._exchange().dispatch(x, expert_ids, weights, owners, meanwhile)
        self._took(began_ns, x)
        return arrivals

    def combine(self, slots: Tensor) -> Tensor:
        """See `Exchange`; raises GroupLost."""
        began_ns = time.time_ns()
        with self._losing():
            combined = self._exchange().combine(slots)
        self._took(began_ns, combined)
        return combined

    def swap(self, sent: Sequence[Tensor], num_from: Sequence[int]) -> list[Tensor]:
        """See `GlooExchange`; raises GroupLost."""
        exchange = self._entered.exchange
        assert exchange is not None, "no group step has been entered"
        began_ns = time.time_ns()
        with self._losing():
            swapped = exchange.swap(sent, num_from)
        self._took(began_ns, *sent)
        return swapped

    def _took(self, began_ns: int, *moved: Tensor) -> None:
        """One exchange of the step; two a layer."""
        num_bytes = sum(each.nbytes for each in moved)
        self._record((Kind.COLLECTIVE, self._group_step, began_ns, time.time_ns(), num_bytes))

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See `EpochGroup`."""
        self._loopback = Loopback(self.ranks)
        try:
            yield
        finally:
            self._loopback = None

    def _exchange(self) -> Exchange:
        if self._loopback is not None:
            return self._loopback
        exchange = self._entered.exchange
        assert exchange is not None, "no group step has been entered"
        return exchange
