"""This rank's part of balancing experts: what it counts, and the experts that it takes in."""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.experts import EMPTY, Places, unpack_places
from deepmesh.wire.messages import ExpertsPlaced, PlaceExperts, SubmitStep
from kernels.quant.linear import Kind, LinearWeight
from services.executor.interface import GroupLost
from services.executor.models.parameters import MoeWeights
from services.executor.models.spread import SpreadExperts
from services.executor.weights import ExpertReader

_log = logging.getLogger(__name__)
PATIENCE_S = 60.0  # a step waits so long for experts that are still being read
NICE = 10  # of the thread that reads them
Report = Callable[[ExpertsPlaced], None]
Staged = tuple[Tensor, Tensor]  # w13 and w2 of an expert, as a device keeps them


class ExpertRoom(Protocol):
    """The routed experts of a layer on this rank, for whoever changes them."""

    @property
    def spread(self) -> SpreadExperts:
        """Where all of them lie."""
        ...

    @property
    def kinds(self) -> tuple[Kind, Kind]:
        """Of w13 and w2."""
        ...

    def stage(self, w13: LinearWeight, w2: LinearWeight) -> Staged:
        """One expert as `put` wants it; called beside the steps.

        Raises:
            ValueError: it is of another kind than those that are held.
        """
        ...

    def put(self, slot: int, staged: Staged) -> None:
        """It takes this slot; between two steps."""
        ...

    def place(self, places: Places) -> None:
        """From now on all lie so; between two steps."""
        ...


class HostRoom:
    """The `ExpertRoom` of a layer on a CPU."""

    def __init__(self, weights: MoeWeights) -> None:
        self._weights, self.spread = weights, weights.spread
        self.kinds = weights.w13.kind, weights.w2.kind

    def stage(self, w13: LinearWeight, w2: LinearWeight) -> Staged:
        """See `ExpertRoom`."""
        return w13.data[0], w2.data[0]

    def put(self, slot: int, staged: Staged) -> None:
        """See `ExpertRoom`."""
        for held, new in zip((self._weights.w13, self._weights.w2), staged, strict=True):
            held.data[slot].copy_(new)

    def place(self, places: Places) -> None:
        """See `ExpertRoom`."""
        self.spread.place(places)


@dataclass(eq=False)
class _Order:
    """A placement of some layers: its experts are read, then a step puts it in force."""

    message: PlaceExperts
    report: Report
    places: dict[int, Places]  # by layer
    before: dict[int, NDArray[np.int32]]  # this rank's slots, as the order finds them
    staged: dict[tuple[int, int], Staged] = field(default_factory=dict)  # by layer and slot
    is_ready: bool = False


class ExpertMover:
    """Reads experts beside the steps, from the checkpoint, and puts them in place between two.

    `order` and `cancel` may come from any thread; `apply` belongs to the device stream's.
    """

    def __init__(self, layers: Sequence[ExpertRoom], reader: ExpertReader, rank: int) -> None:
        self._layers, self._reader, self._rank = layers, reader, rank
        self._changed = threading.Condition()  # guards everything below
        self._orders: list[_Order] = []
        self._in_force = 0
        self._closing = False
        self._thread: threading.Thread | None = None

    def order(self, message: PlaceExperts, report: Report) -> None:
        """Begin to read what this rank lacks for the placement; `report` says when it is there.

        Orders that are not in force once `message.base` is are forgotten.
        """
        with self._changed:
            self._orders = self._upto(message.base)
            places = {at: unpack_places(data, self._ranks) for at, data in message.layers}
            before = {at: self._layers[at].spread.places[self._rank] for at in places}
            for earlier in self._orders:
                for at, new in earlier.places.items():
                    if at in before:
                        before[at] = new[self._rank]
            self._orders.append(_Order(message, report, places, before))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="experts", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _upto(self, number: int) -> list[_Order]:
        """Orders that are in force together once this one is, in their order."""
        found: list[_Order] = []
        for order in reversed(self._orders):
            if order.message.number == number:
                found.insert(0, order)
                number = order.message.base
        return found

    @property
    def _ranks(self) -> int:
        return len(self._layers[0].spread.places)

    def cancel(self) -> None:
        """Forget what is not in force; a step that waits for it ends with `GroupLost`."""
        with self._changed:
            self._orders.clear()
            self._changed.notify_all()

    def apply(self, number: int) -> None:
        """Put the placement of this number in force, if it is not.

        Raises:
            GroupLost: it was cancelled, or never ordered, or is not read in time.
        """
        if number == self._in_force:
            return
        with self._changed:
            wanted = self._upto(number)
            if not wanted:
                raise GroupLost(f"placement {number} is not known here")
            self._changed.wait_for(
                lambda: all(o.is_ready for o in wanted) or wanted[-1] not in self._orders,
                PATIENCE_S,
            )
            if not all(o.is_ready and o in self._orders for o in wanted):
                raise GroupLost(f"the experts of placement {number} are not here")
            for order in wanted:
                self._put(order)
            self._orders = [order for order in self._orders if order not in wanted]
            self._in_force = number

    @torch.inference_mode()
    def _put(self, order: _Order) -> None:
        for (layer, slot), staged in order.staged.items():
            self._layers[layer].put(slot, staged)
        for layer, places in order.places.items():
            self._layers[layer].place(places)
        _log.info("placement %d: %d experts came", order.message.number, len(order.staged))

    def close(self) -> None:
        """End the thread; whatever waits ends, too."""
        with self._changed:
            self._closing = True
            self._orders.clear()
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ------------------------------------------------------------ the thread

    def _work(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        torch.set_num_threads(1)
        while (order := self._next()) is not None:
            error = ""
            try:
                self._read(order)
            except (OSError, ValueError, LookupError, RuntimeError) as failure:
                _log.exception("placement %d", order.message.number)
                error = f"{type(failure).__name__}: {failure}"
            with self._changed:
                is_wanted = order in self._orders
                order.is_ready = not error
                if error and is_wanted:
                    self._orders.remove(order)
                self._changed.notify_all()
            if is_wanted:
                message = order.message
                order.report(ExpertsPlaced(message.engine_epoch, self._rank, message.number, error))

    def _next(self) -> _Order | None:
        """The oldest order that is not ready; None once this is closed."""
        with self._changed:
            while not self._closing:
                for order in self._orders:
                    if not order.is_ready:
                        return order
                self._changed.wait()
        return None

    def _read(self, order: _Order) -> None:
        for layer, places in order.places.items():
            room = self._layers[layer]
            if places.shape != room.spread.places.shape:
                raise ValueError(f"layer {layer}: {places.shape}, not {room.spread.places.shape}")
            own = places[self._rank]
            for slot in np.flatnonzero((own != order.before[layer]) & (own != EMPTY)).tolist():
                if order not in self._orders:  # cancelled: whoever asked does not wait for it
                    return
                weights = self._reader.read(layer, int(own[slot]))
                for kind, new in zip(room.kinds, weights, strict=True):
                    if kind != new.kind:
                        raise ValueError(f"expert {own[slot]} of layer {layer} is {new.kind.name}")
                order.staged[layer, slot] = room.stage(*weights)


class GroupExperts:
    """Experts of a rank that is one of several: counts their rows, and changes who has them."""

    def __init__(
        self,
        rooms: Sequence[ExpertRoom],
        reader: ExpertReader,
        rank: int,
        *,
        num_redundant: int,
        record_steps: int,
    ) -> None:
        """
        Args:
            rooms: by layer.
            reader: of the checkpoint.
            num_redundant: copies of experts of a layer beside one of each, over all ranks.
            record_steps: group steps between two reports of loads.
        """
        self._spread = [room.spread for room in rooms]
        self._every, self._epoch = record_steps, -1
        self.shape = (len(rooms), self._spread[0].num_experts, num_redundant)
        self._mover = ExpertMover(rooms, reader, rank)
        self.place, self.cancel = self._mover.order, self._mover.cancel
        self.close = self._mover.close

    def before(self, step: SubmitStep) -> None:
        """The step's placement is in force from here on; raises GroupLost."""
        if step.engine_epoch != self._epoch:
            self._epoch = step.engine_epoch
            self._forget()
        if step.descriptor.placement:
            self._mover.apply(step.descriptor.placement)

    def _forget(self) -> None:
        """Counts of the epoch before."""
        for spread in self._spread:
            spread.counts.zero_()

    def reports(self, step: SubmitStep) -> bool:
        """Whether the loads since the last report go with this step's result."""
        return step.group_step % self._every == 0

    def rows(self) -> bytes:
        """StepResult.expert_rows of the step that has run."""
        return np.array([spread.rows for spread in self._spread], "<u4").tobytes()

    def loads(self, step: SubmitStep) -> bytes:
        """StepResult.expert_loads: of most steps nothing."""
        if not self.reports(step):
            return b""
        counts = torch.stack([spread.counts for spread in self._spread])
        for spread in self._spread:
            spread.counts.zero_()
        return counts.numpy().astype("<u4").tobytes()
