"""Two groups in one simulated time: one computes prompts for the other, which has the clients."""

from collections.abc import Callable
from functools import partial

from deepmesh.config import SchedulerConfig
from deepmesh.wire.messages import (
    Capacity,
    HandOff,
    HandOffDone,
    HandOffRefused,
    HandOffRenew,
    PrefillFor,
)

from ..core.events import DecoderDown, Mail, PrefillerDown, PrefillerUp, Send
from .clock import SECOND, Clock, Times
from .garbage import without_cycle_search
from .link import Link
from .requests import SimRequest
from .store import OpFaults
from .world import RECONNECT_NS, World

SETTLE_NS = SECOND  # for messages that were sent when all was over
MAIL = (PrefillFor, HandOff, HandOffRefused, HandOffRenew, HandOffDone)


class Pair:
    """A decode group with clients, a prefill group without, and the link between their schedulers.

    "there" is from the decode side to the prefill side.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        capacity: Capacity,
        *,
        seed: int,
        ranks: int = 1,
        kvstores: int = 0,
        times: Times | None = None,
        faults: OpFaults | None = None,
        prefill_capacity: Capacity | None = None,
    ) -> None:
        self.clock = Clock(seed)
        times = times or Times()
        self.decode = World(
            config,
            capacity,
            seed=seed,
            ranks=ranks,
            kvstores=kvstores,
            times=times,
            op_faults=faults,
            clock=self.clock,
        )
        self.prefill = World(
            config,
            prefill_capacity or capacity,
            seed=seed,
            ranks=ranks,
            tokenizers=0,
            times=times,
            op_faults=faults,
            clock=self.clock,
            index=1,
            requests=self.decode.requests,
        )
        self.link = Link(self.clock, times)
        self.link.on_broken = self.cut
        self.prefill.to_group = partial(self._post, self.decode, "back")
        self.decode.to_group = partial(self._post, self.prefill, "there")
        for world in (self.decode, self.prefill):
            world.on_scheduler = self._on_scheduler
        areas = {e.name: e.transfers.area for e in self.prefill.executors}
        for executor in self.decode.executors:
            executor.transfers.areas = areas
        self.clock.at(0, self._open)

    def submit(self, request: SimRequest) -> None:
        """Let a request arrive at the decode side, which asks the other one for its prompt."""
        request.prefill_at = self.prefill.name
        self.decode.submit(request)

    def run(self, limit_ns: int = 10**12, *, progress: Callable[[], None] = lambda: None) -> None:
        """Until every request has ended, both devices are idle and no hand-over is open.

        Raises:
            AssertionError: something does not come to an end.
        """
        with without_cycle_search():
            while not self._is_over():
                assert self.clock.now < limit_ns, f"unfinished: {self.decode.unfinished()}"
                self.clock.step()
                progress()
            # What drops the last copies may be on its way.
            settled = self.clock.now + SETTLE_NS
            while self._num_copies() and self.clock.now < settled:
                self.clock.step()

    def verify(self) -> None:
        """Right tokens, no block of either side lost, no copy left."""
        self.decode.verify()
        self.prefill.verify()
        kept = self._num_copies()
        assert kept == 0, f"{self.prefill.name} keeps {kept} copies that nobody wants"

    def cut(self) -> None:
        """The link between the schedulers breaks; it is dialled again."""
        if self.link.is_up:
            self.link.cut()
            self.decode.feed(PrefillerDown(self.prefill.name))
            self.prefill.feed(DecoderDown(self.decode.name))
        self.clock.at(RECONNECT_NS, self._open)

    # ------------------------------------------------------------ parts

    def _open(self) -> None:
        if not self.link.is_up and not self.decode.is_down and not self.prefill.is_down:
            self.link.open()
            self.decode.feed(PrefillerUp(self.prefill.name))

    def _on_scheduler(self, is_up: bool) -> None:
        """One of them died, or its successor listens."""
        if is_up:
            self.clock.at(RECONNECT_NS, self._open)
        else:
            self.cut()

    def _post(self, target: World, way: str, send: Send, after_ns: int) -> bool:
        message = send.message
        if send.peer != target.name or not isinstance(message, MAIL):
            return False
        source = self.decode if target is self.prefill else self.prefill
        mail = Mail(source.name, message)
        self.link.send(way, lambda: target.feed(mail), after_ns=after_ns)
        return True

    def _num_copies(self) -> int:
        """Of prompts, kept for the decode side."""
        return sum(e.transfers.area.num_copies for e in self.prefill.executors)

    def _is_over(self) -> bool:
        if not (self.decode.is_over and self.prefill.is_over):
            return False
        asks = self.decode.core.handovers.asks.num_open
        return not asks and not self.prefill.core.handovers.offers.num_open
