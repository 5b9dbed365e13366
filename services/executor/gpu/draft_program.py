"""The draft pass of one bucket of rows as one CUDA graph: anchors in, drafts out, on the device."""

import torch

from services.executor.gpu.draft_step import DraftStep
from services.executor.gpu.drafter import DeviceDrafter, Draw
from services.executor.kv_cache import KvCache


class DraftProgram:
    """As `DecodeProgram`: `capture()` once, then `replay()`; or `run()`."""

    def __init__(self, drafter: DeviceDrafter, cache: KvCache, step: DraftStep, draw: Draw) -> None:
        """
        Args:
            step: on the model's device; somebody else fills it before each run.
            draw: launches the sampling of one place.
        """
        self.step = step
        self._drafter, self._cache, self._draw = drafter, cache, draw
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.inference_mode()
    def run(self) -> None:
        """Operation by operation."""
        self._drafter(self.step, self._cache, self._draw)

    def capture(self, pool: "torch.cuda._POOL_HANDLE | None" = None) -> None:
        """See `DecodeProgram`."""
        device = self.step.starts.device
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.run()
        current.wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.run()
        self._graph = graph

    def launch(self) -> None:
        """One launch in the current stream of what was captured; else operation by operation."""
        if self._graph is None:
            self.run()
        else:
            self._graph.replay()
