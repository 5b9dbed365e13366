"""A device's place in its EP group: the window that others write to, and the group of an epoch.

`docs/decisions/0032-groups-of-devices.md` says who waits for whom when an engine epoch begins.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from deepmesh.wire.messages import SubmitStep
from kernels.comm.comm import ExchangeError
from kernels.comm.gloo import GlooExchange
from kernels.comm.one_sided import PATIENCE_S, Geometry, OneSidedExchange
from kernels.comm.windows import HANDLE_BYTES, HostWindow, IpcWindow, OwnWindow
from services.executor.interface import GroupLost
from services.executor.model_config import ModelConfig
from services.executor.models.numerics import Numerics
from services.executor.parallel import NO_EPOCH, EpochGroup, Membership, tag_of
from services.executor.rendezvous import Rendezvous

CONNECT_S = 60.0  # for the ranks to meet
MOST_TOKENS = 4096  # of a rank in one exchange; longer prompts go in slices


def geometry_of(
    config: ModelConfig, numerics: Numerics, ranks: int, *, max_rows: int, max_tokens: int
) -> Geometry:
    """What the exchanges of a group of such models carry.

    Args:
        max_rows: decode rows of a rank in a step, at most: they go in one slice.
        max_tokens: prompt tokens of a rank in a step, at most.
    """
    return Geometry(
        ranks=ranks,
        capacity=max(max_rows, min(max_tokens, MOST_TOKENS)),
        hidden=config.hidden_size,
        top_k=config.num_experts_per_tok,
        fp8_rows=numerics.bf16,
        slots=torch.bfloat16 if numerics.bf16 else torch.float32,
    )


class DeviceGroup(EpochGroup):
    """Owns `exchange`, which layers use; a failure is found by `check`, once a step is over."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        geometry: Geometry,
        device: torch.device,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """
        Args:
            device: a GPU, or "cpu" for shared memory in its place.
            patience_s: how long a kernel waits for another rank, while nobody says it is gone.
        Raises:
            CudaError, OSError: no memory for the window.
        """
        super().__init__(rendezvous, CONNECT_S)
        self._device = device
        make = IpcWindow if device.type == "cuda" else HostWindow
        self._window: OwnWindow = make(geometry.window_bytes)
        alone = [self._window.address] * geometry.ranks
        self.exchange = OneSidedExchange(
            geometry, rendezvous.rank, alone, device=str(device), patience_s=patience_s
        )
        self._guard = threading.Lock()  # of the two below
        self._in_force: Membership | None = None  # whose exchanges `exchange` serves
        self._is_closed = self._is_apart = False

    @property
    def capacity(self) -> int:
        """Tokens of a rank in one exchange, at most."""
        return self.exchange.capacity

    def enter(self, step: SubmitStep) -> None:
        """See `EpochGroup`; the tag is set on the current stream."""
        if self._is_apart:
            return
        self._connected(step)
        if self._entered.stopped.is_set():
            raise GroupLost(f"the group of epoch {step.engine_epoch} has been given up")
        self.exchange.set_tag(tag_of(step))

    def check(self, epoch: int) -> None:
        """Whether the exchanges of a step, which is over, took place; waits for nothing.

        Raises:
            GroupLost: not all did, or its epoch is over.
        """
        if self._is_apart:
            return
        member = self._member
        if member.epoch != epoch:
            raise GroupLost(f"engine epoch {epoch} is over")
        try:
            self.exchange.check()
        except ExchangeError as error:
            self._give_up(member)
            raise GroupLost(str(error)) from error

    def _give_up(self, member: Membership) -> None:
        super()._give_up(member)
        with self._guard:
            if self._in_force is member and not self._is_closed:
                self.exchange.stop()

    def _met(self, member: Membership, exchange: GlooExchange) -> None:
        """Windows of this epoch's processes, with nothing of an older one in them."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps of the epoch before have ended
        words = [HANDLE_BYTES] * self.ranks

        def swap(handle: bytes) -> list[bytes]:
            own = torch.frombuffer(bytearray(handle), dtype=torch.uint8)
            return [_bytes(part) for part in exchange.swap([own] * self.ranks, words)]

        try:
            addresses = self._window.meet(self.rank, swap)
        except (OSError, RuntimeError) as error:
            raise ExchangeError(f"windows of the other ranks: {error}") from error
        self._window.clear()  # nobody writes: all have swapped, and so have ended what they did
        with self._guard:
            self._in_force = member
            self.exchange.reset(addresses)
        if member.stopped.is_set():
            raise ExchangeError("the group has been given up")

    @contextmanager
    def apart(self) -> Iterator[None]:
        """See `EpochGroup`: nothing arrives, and sums are 0."""
        with self._guard:
            self._in_force = None
            self.exchange.reset([self._window.address] * self.ranks, is_apart=True)
        self._is_apart = True
        try:
            yield
        finally:
            self._is_apart = False

    def close(self) -> None:
        """Give the window back; the device must be idle."""
        self.begin_epoch(NO_EPOCH)
        with self._guard:
            self._is_closed = True
        self._window.close()


def _bytes(part: Tensor) -> bytes:
    return part.numpy().tobytes()
