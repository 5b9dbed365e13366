"""The engine of one GPU: `ModelEngine` with weights, KV pools and forward on the device."""

from pathlib import Path

import torch

from deepmesh.config import Config
from deepmesh.wire.messages import Load
from services.executor.gpu.model import load_device_model
from services.executor.interface import OnProgress
from services.executor.masks.grammar_masks import GrammarMasks
from services.executor.runner import Model, ModelEngine

GPU_POOL_SHARE = 0.8  # of the memory that the weights leave, for KV pools


class GpuEngine(ModelEngine):
    """A step runs operation by operation; sampling is the CPU's, on logits in host memory."""

    kind = "cuda"

    def __init__(
        self,
        config: Config,
        index: int = 0,
        masks: GrammarMasks | None = None,
        device: str = "cuda",
    ) -> None:
        """
        Args:
            device: as torch names it; "cpu" runs the kernels of any shape on the host, for tests.
        Raises:
            ValueError: the device is not there, or the configuration asks for a group of ranks.
        """
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("executor.device: no CUDA device is here; use 'cpu'")
        if config.executor.ranks > 1:
            raise ValueError("executor.ranks: a group of ranks needs executor.device = 'cpu'")
        super().__init__(config, index, masks)
        self.device = device

    def _load_model(self, path: Path, order: Load, on_progress: OnProgress) -> Model:
        return load_device_model(path, order.numerics, self.device, progress=on_progress)

    def _pool_bytes(self, order: Load) -> int:
        if self.device == "cpu":
            return super()._pool_bytes(order)
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free * GPU_POOL_SHARE)
