"""Drafts on a device for `bench spec`: weights made there, drafts as often right as recorded."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from bench.checkpoints import Checkpoint
from bench.gpu.mesh_run import write_slice
from bench.spec_acceptance import Acceptance, Fate, OracleSpeculation
from bench.spec_roofline import Roofline
from bench.spec_runs import Policies
from deepmesh.config import Config
from deepmesh.wire.messages import Capacity, Load
from services.executor.gpu.draft_step import DraftStep
from services.executor.gpu.drafting import DeviceDrafting
from services.executor.gpu.engine import GpuEngine
from services.executor.gpu.group import DeviceGroup
from services.executor.gpu.linears import Device
from services.executor.gpu.masking import Masking
from services.executor.gpu.model import DeviceModel
from services.executor.gpu.random_model import RandomReader
from services.executor.gpu.sampler import Copy, DeviceSampler
from services.executor.gpu.slots import DeviceSlots
from services.executor.gpu.step_parts import Forwards
from services.executor.gpu.stored import STORED
from services.executor.interface import Engine, OnProgress
from services.executor.model_config import ModelConfig, load_config
from services.executor.models.numerics import Numerics
from services.executor.sample_row import SampleRow
from services.executor.weights import load_weights

STAGES = 3  # of drafts, as released
EDGE = 1e-6  # no confidence is nearer to 0 or 1
BLOCKS_A_ROW = 4  # of short requests


def open_slice(folder: Path, preset: str, layers: int) -> Checkpoint:
    """A checkpoint without weights: engines here make them."""
    write_slice(folder, preset, layers, STAGES)
    return Checkpoint(f"{preset}, {layers} layers", folder, load_config(folder))


class OracleDrafting(DeviceDrafting):
    """The model's draft pass, but other drafts, on the device: see `OracleSpeculation`."""

    def __init__(
        self,
        config: ModelConfig,
        capacity: Capacity,
        forwards: Forwards,
        slots: DeviceSlots,
        sampler: DeviceSampler,
        masking: Masking,
        *,
        max_rows: int,
        device: torch.device,
    ) -> None:
        num, length, places = capacity.num_slots, capacity.max_model_len, capacity.draft_len
        self._ids = torch.zeros(num, length, places, dtype=torch.int32, device=device)
        self._chances = torch.zeros(num, length, places, dtype=torch.int32, device=device)
        self._known = torch.zeros(num, 2, dtype=torch.int32, device=device)  # prompt, tokens
        self._fates: dict[int, tuple[int, Fate | None]] = {}  # by slot, not there yet
        common = (config, capacity, forwards, slots, sampler, masking)
        super().__init__(*common, max_rows=max_rows, device=device)

    def open(self, row: SampleRow) -> None:
        """See `DeviceDrafting`."""
        super().open(row)
        fate = OracleSpeculation.truth.get(row.init.seed)
        self._fates[row.init.slot] = row.init.prompt_len, fate

    def flush(self, copy: Copy) -> None:
        """See `DeviceDrafting`."""
        super().flush(copy)
        for slot, (prompt_len, fate) in self._fates.items():
            count = 0 if fate is None else min(len(fate.ids), self._ids.shape[1])
            if fate is not None:
                sure = np.clip(fate.confidence[:count, : self.places], EDGE, 1 - EDGE)
                chances = np.log(sure / (1 - sure)).astype(np.float32)
                copy(self._ids[slot, :count], np.ascontiguousarray(fate.ids[:count, : self.places]))
                copy(self._chances[slot, :count], chances.view(np.int32))
            copy(self._known[slot], np.array((prompt_len, count), np.int32))
        self._fates.clear()

    def _drafted(self, step: DraftStep) -> None:
        slots = step.rows[0, :, 0].clamp_min(0).long()
        prompt_len, count = self._known[slots].unbind(1)
        index = step.starts + 1 - prompt_len
        is_known = (index >= 0) & (index < count)
        at = index.clamp(0, self._ids.shape[1] - 1).long()
        ids, chances = self._ids[slots, at].t(), self._chances[slots, at].view(torch.float32).t()
        step.drafts.copy_(torch.where(is_known, ids, step.drafts))
        step.chances.copy_(torch.where(is_known, chances, step.chances))


class SharedDeviceEngine(GpuEngine):
    """An engine whose weights others have, too; its pools and graphs are its own."""

    drafting = OracleDrafting

    def __init__(self, config: Config, shared: "SharedModel", device: str) -> None:
        super().__init__(config, device=device)
        self._shared = shared
        self.fills_memory = False  # each of them has pools of the same size

    def _read_model(
        self,
        path: Path,
        order: Load,
        on_progress: OnProgress,
        group: DeviceGroup | None,
        redundant: int,
    ) -> DeviceModel:
        return self._shared.on(self.device, path, order.numerics)


class CountedEngine(SharedDeviceEngine):
    """With the checkpoint's own drafts."""

    drafting = DeviceDrafting


class SharedModel:
    """One model on one device, read or made once."""

    def __init__(self) -> None:
        self._model: DeviceModel | None = None
        self.roofline: Roofline | None = None

    def on(self, device: str, path: Path, numerics: str) -> DeviceModel:
        """The model of a folder; weights are made if it holds none."""
        if self._model is None:
            config, name = load_config(path), torch.device(device)
            if _has_weights(path):
                weights = load_weights(path, config, packing=STORED)
            else:
                weights = RandomReader(config, name, 0).model(Path())
            self.roofline = Roofline(config, weights)
            how = Device(name, Numerics.named(numerics), name.type == "cuda")
            self._model = DeviceModel(config, weights, numerics, how, drafts=True)
        return self._model


def _has_weights(path: Path) -> bool:
    """`write_slice` leaves a file of weights with no tensor in it."""
    files = [file for file in path.glob("*.safetensors") if file.stat().st_size > 8 + len("{}")]
    return bool(files)


class DevicePolicies(Policies):
    """The engines of all policies on a GPU."""

    device: ClassVar[str] = "cuda"

    def __init__(
        self,
        checkpoint: Checkpoint,
        acceptance: Acceptance | None,
        rows: int,
        tokens: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(checkpoint, acceptance, rows, tokens, clock)
        blocks = (rows + 2) * BLOCKS_A_ROW * max(1, -(-self._max_len // 256))
        self.blocks = blocks, blocks + 16 * rows
        self._shared = SharedModel()
        self._on_device: dict[str, SharedDeviceEngine] = {}

    @property
    def roofline(self) -> Roofline:
        """See `Policies`."""
        assert self._shared.roofline is not None, "nothing has run yet"
        return self._shared.roofline

    def _make_engine(self, config: Config, policy: str) -> Engine:
        kind = CountedEngine if self._acceptance is None else SharedDeviceEngine
        engine = self._on_device[policy] = kind(config, self._shared, self.device)
        return engine

    def _end_engines(self) -> None:
        for engine in self._on_device.values():
            engine.close()


class HostPolicies(DevicePolicies):
    """The same on a host, with kernels of any shape."""

    device = "cpu"
