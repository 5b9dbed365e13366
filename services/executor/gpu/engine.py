"""The engine of one GPU: weights, KV pools and steps on the device, launched ahead of the host."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import msgspec
import numpy as np
import torch

from deepmesh.config import Config
from deepmesh.wire.messages import Capacity, Load, Pool, StepCosts
from services.executor.capacity import verified_tokens
from services.executor.eplb import GroupExperts
from services.executor.flights import Flight, Settling
from services.executor.gpu.costs import measure_device_costs
from services.executor.gpu.drafting import DeviceDrafting
from services.executor.gpu.forwards import ModelForwards
from services.executor.gpu.group import DeviceGroup, geometry_of
from services.executor.gpu.group_steps import DeviceGroupSteps
from services.executor.gpu.launch import Launcher
from services.executor.gpu.memory import fitting_plan, pool_bytes
from services.executor.gpu.model import DeviceModel, load_device_model
from services.executor.gpu.stored import STORED
from services.executor.gpu.stream import CudaStream, DeviceStream, HostStream
from services.executor.interface import OnProgress
from services.executor.kv_cache import KvCache
from services.executor.kv_copy import Bytes, Place
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.memory_plan import MemoryPlan
from services.executor.model_config import load_config
from services.executor.models.numerics import Numerics
from services.executor.rendezvous import make_rendezvous
from services.executor.runner import Model, ModelEngine
from services.executor.weights import ExpertReader


class GpuEngine(ModelEngine):
    """A step is launched while the one before it runs; `Launcher` says what waits for the host."""

    kind = "cuda"
    leaves_out = False
    forwards = ModelForwards
    drafting = DeviceDrafting  # benchmarks have drafts of their own making

    def __init__(
        self,
        config: Config,
        index: int = 0,
        masks: GrammarMasks | None = None,
        device: str = "cuda",
        stream: DeviceStream | None = None,
    ) -> None:
        """
        Args:
            device: as torch names it; "cpu" runs the kernels of any shape on the host, for tests.
            stream: of that device; None: one of its own.
        Raises:
            ValueError: the device is not there.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("executor.device: no CUDA device is here; use 'cpu'")
        super().__init__(config, index, masks)
        self.device = device
        self.kind = "host" if device == "cpu" else "cuda"
        self.fills_memory = device != "cpu"
        self._plan: MemoryPlan | None = None  # None on a host, whose memory is not counted
        self._given_stream = stream
        self._launcher: Launcher | None = None
        self._copied: Bytes | None = None
        self._costs = StepCosts()
        self._steps: DeviceGroupSteps | None = None  # of a rank that is one of several
        self._planned: KvCache | None = None  # the cache that the launcher is for

    def load(self, order: Load, on_progress: OnProgress) -> Capacity:
        """Load the weights unless they are there, plan the pools, and capture the graphs."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)  # steps of the session before
            self._choose_device(order)
        capacity = super().load(order, on_progress)
        launcher = self._launcher
        if launcher is None or self._planned is not self.cache:
            if launcher is not None:
                launcher.close()
            self._stream = self._given_stream or _stream(self.device)
            with self._group.apart() if self._group is not None else nullcontext():
                launcher = self._launcher = self._make_launcher(capacity)
                self._planned, self._costs = self.cache, self._measure(launcher, capacity)
        one_class = not launcher.has_two_classes
        return msgspec.structs.replace(capacity, costs=self._costs, one_kernel_class=one_class)

    def _choose_device(self, order: Load) -> None:
        """Executors that see several GPUs of a host take one each."""
        number = self._index * order.ranks + order.rank
        at = number % torch.cuda.device_count()
        self.device = f"cuda:{at}"
        torch.cuda.set_device(at)

    def _make_launcher(self, capacity: Capacity) -> Launcher:
        model, max_rows = self._model, self._config.scheduler.max_rows
        draft_len = capacity.draft_len
        assert isinstance(model, DeviceModel)
        forwards = self.forwards(
            model,
            self.cache,
            max_rows=max_rows,
            max_blocks=-(-capacity.max_model_len // capacity.block_size),
            max_tokens=verified_tokens(max_rows, draft_len),
        )
        return Launcher(
            model.config,
            capacity,
            model.compressed_ids,
            forwards,
            self._stream,
            max_rows=max_rows,
            masks=self._masks,
            run_ops=self.run_ops,
            group=self._steps,
            drafting=self.drafting,
        )

    def _no_drafts(self) -> str:
        if isinstance(self._group, DeviceGroup):
            return "a group of devices cannot draft"
        if self._config.executor.draft_acceptance == "rejection":
            return 'draft_acceptance "rejection" needs device "cpu"'
        return ""

    def _make_group(self, order: Load) -> DeviceGroup | None:
        self._steps = None
        if isinstance(self._group, DeviceGroup):  # of other ranks, or for another model
            self._group.close()
        if order.ranks == 1:
            return None
        config, scheduler = load_config(Path(order.model)), self._config.scheduler
        meeting = make_rendezvous(
            self._config.group_address(self._index), rank=order.rank, ranks=order.ranks
        )
        geometry = geometry_of(
            config,
            Numerics.named(order.numerics),
            order.ranks,
            max_rows=scheduler.max_rows,
            max_tokens=scheduler.step_tokens,
        )
        return DeviceGroup(meeting, geometry, torch.device(self.device))

    def _measure_costs(self) -> StepCosts:
        # a device's steps are measured as they are launched, behind the capture of their graphs
        return super()._measure_costs() if self.device == "cpu" else StepCosts()

    def _measure(self, launcher: Launcher, capacity: Capacity) -> StepCosts:
        if self.device == "cpu":
            return capacity.costs
        rows, chooses = self._config.scheduler.max_rows, self._config.executor.draft_policy
        return measure_device_costs(
            launcher.launch, capacity, max_rows=rows, with_drafts=chooses == "adaptive"
        )

    def launch(self, settling: Settling, behind: Callable[[], None]) -> Flight:
        """See `LaunchEngine`; what a step computes is noted when that is known."""
        assert self._launcher is not None, "no model is loaded"
        flight = self._launcher.launch(settling, behind)
        live, step = flight.live, settling.turn.step.group_step
        if flight.may_verify:
            flight.note = lambda rows, logits: self.work.note(step, rows, logits)
        else:
            self.work.note(step, live, int(np.count_nonzero(live.samples)))
        return flight

    def _load_model(self, path: Path, order: Load, on_progress: OnProgress) -> Model:
        if self.fills_memory:
            model = load_config(path)
            self._plan = fitting_plan(self._config, model, order.ranks, self.device)
        group = self._group if isinstance(self._group, DeviceGroup) else None
        redundant = self._config.executor.redundant_experts if group is not None else 0
        if self._experts is not None:
            self._experts.close()
        self._experts = None
        loaded = self._read_model(path, order, on_progress, group, redundant)
        if group is not None:
            reader = ExpertReader(path, loaded.config, STORED)
            self._experts = GroupExperts(
                loaded.expert_rooms,
                reader,
                order.rank,
                num_redundant=redundant,
                record_steps=self._config.scheduler.experts_record_steps,
            )
            self._steps = DeviceGroupSteps(group, loaded, self._experts)
        return loaded

    def _read_model(
        self,
        path: Path,
        order: Load,
        on_progress: OnProgress,
        group: DeviceGroup | None,
        redundant: int,
    ) -> DeviceModel:
        return load_device_model(
            path,
            order.numerics,
            self.device,
            progress=on_progress,
            rank=order.rank,
            ranks=order.ranks,
            redundant=redundant,
            exchange=None if group is None else group.exchange,
            drafts=group is None and self._config.executor.draft_tokens > 0,
        )

    def _pool_bytes(self, order: Load) -> int:
        if self._plan is None:
            return super()._pool_bytes(order)
        return pool_bytes(self._plan, self.device)

    def is_lost(self) -> bool:
        """See `LaunchEngine`."""
        try:
            with self._stream.on():
                self._stream.mark().wait()
        except RuntimeError:  # of CUDA: no call in this process succeeds from now on
            return True
        return False

    def export_block(self, pool: Pool, block: int, out: Place) -> None:
        """Copy a block to host memory or into a window, beside the steps that run."""
        with self._stream.beside():
            if isinstance(out, torch.Tensor):
                self.cache.export_block(pool, block, out, waits=False)
                self._stream.mark().wait()
                return
            room = self._room(len(out))
            self.cache.export_block(pool, block, room, waits=False)
            self._stream.mark().wait()
        out[:] = room

    def import_block(self, pool: Pool, block: int, data: Place) -> None:
        """Fill a block from host memory or a window, beside the steps that run."""
        with self._stream.beside():
            given = data
            if not isinstance(data, torch.Tensor):
                given = self._room(len(data))
                given[:] = data
            self.cache.import_block(pool, block, given, waits=False)
            self._stream.mark().wait()

    def _room(self, size: int) -> Bytes:
        """Memory for a copy, of which there is one at a time."""
        if self._copied is None or len(self._copied) < size:
            self._copied = self._stream.shared(size, dtype=torch.uint8).numpy()
        return self._copied[:size]

    def close(self) -> None:
        """A launch that waits for memory ends now."""
        super().close()
        if self._launcher is not None:
            self._launcher.close()

    def leave_group(self) -> None:
        """Give the window back that other ranks write to; behind `close`, when nothing runs."""
        if isinstance(self._group, DeviceGroup):
            self._group.close()


def _stream(device: str) -> DeviceStream:
    return HostStream() if device == "cpu" else CudaStream(torch.device(device))
