"""A decode step of one bucket as one CUDA graph: index tensors in, logits out, all on the device.

`DecodeProgram(model, cache, step)` computes what `DeviceModel.forward` does for rows of one token,
with its bits, from a `DecodeStep` whose tensors somebody else fills on the device before each run.
`capture()` once, then `replay()` in the current stream; or `run()`, operation by operation. All
leave their results in `logits` and `features`, the same tensors each time. Nothing in a run waits
for the device or looks at its values.
"""

from collections.abc import Iterable

import torch

from services.executor.gpu.aside import Asides
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.model import DeviceModel
from services.executor.kv_cache import KvCache

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # rows; beyond, multiples of the last


def bucket_sizes(max_rows: int) -> list[int]:
    """Rows that there are graphs for, ascending; the last takes `max_rows`, the most of a step."""
    top = BUCKETS[-1]
    sizes = [*BUCKETS, *range(2 * top, max_rows + top, top)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def bucket_for(sizes: Iterable[int], rows: int) -> int:
    """The smallest of ascending `sizes` that has room for `rows`."""
    return next(size for size in sizes if size >= rows)


class DecodeProgram:
    """The forward of one bucket over one cache."""

    def __init__(self, model: DeviceModel, cache: KvCache, step: DecodeStep) -> None:
        """
        Args:
            step: on the model's device; its tensors are read anew in each run.
        Raises:
            ValueError: the cache holds rows of other numerics.
        """
        model.check(cache)
        self.step = step
        self._model, self._cache = model, cache
        config, device = model.config, model.device
        rows, targets = step.num_tokens, len(config.dspark_target_layer_ids)
        self.logits = torch.empty(rows, config.vocab_size, device=device.name)  # float32
        shape = rows, targets * config.hidden_size
        self.features = torch.empty(shape, dtype=device.dtype, device=device.name)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._asides = Asides.of(device.name)

    @torch.inference_mode()
    def run(self) -> None:
        """Operation by operation."""
        self._model.decode(self.step, self._cache, self.logits, self.features, self._asides)

    def capture(self, pool: "torch.cuda._POOL_HANDLE | None" = None) -> None:
        """Make the graph; later replays allocate nothing.

        Runs the step once, over rows that must all be padding (`DecodeStep.empty`), so that
        every kernel is loaded before.

        Args:
            pool: of memory, shared by graphs that never run at the same time.
        """
        current = torch.cuda.current_stream(self._model.device.name)
        stream = torch.cuda.Stream(self._model.device.name)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.run()
        current.wait_stream(stream)
        torch.cuda.synchronize(self._model.device.name)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self.run()
        self._graph = graph

    def replay(self) -> None:
        """One launch in the current stream. Needs `capture`."""
        assert self._graph is not None, "capture() comes first"
        self._graph.replay()
