"""Sampling on a device: what requests ask for, by slot, and tokens without a look at the host."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepmesh.wire.messages import SlotInit
from kernels.sampling.sample_cuda import (
    CHANGE,
    CHANGE_WORDS,
    IN_PROMPT,
    Has,
    SampleBuffers,
    SampleOut,
    mask_words,
    put_records,
    sample_rows,
)
from services.executor.sample_row import SampleRow, SampleSettings

NUM_GIVEN = 16  # steps whose changes a device may yet have to read; fewer are in flight
_NO_TABLE = np.zeros(0, np.int32)
Copy = Callable[[Tensor, NDArray[np.int32]], None]


class DeviceSampler:
    """`services.executor.sampler.sample` in a graph, with the same tokens and bits.

    A step of the runner, all of it on one stream:
    1. `stage` each request that enters a slot (once; with all tokens it has by then), from any
       thread that holds no other call. It writes host memory only.
    2. `flush` before the step's `sample`, at most once a step: one kernel, which reads what was
       staged from host memory; tables are copied in front of it.
    3. Fill `masks[i]` and `states[i]` of the rows that have a grammar, i being the row's place in
       the step: MaskFlag.MASK with its mask, FREE without; a row with any other state samples
       nothing, and its kind of row becomes MISSED in `rows`. All others must be FREE.
    4. `sample`: launches only, and only one where `capture` has seen the same tensors.
    5. Copy `out.all` to pinned memory, where `SampleOut.over` reads it. `out.tokens` and
       `out.found` are what `kernels.step.slots_portable.advance_rows` takes.

    State that sampling changes (counts for penalties, the ring for bad words) belongs to the slot
    and moves only when a token is found, so a missed row may come again.
    """

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        max_rows: int,
        device: torch.device,
        *,
        is_plain: bool = False,
    ) -> None:
        """
        Args:
            max_rows: of a step, padding included.
            is_plain: penalties, biases, bans and log-probabilities are left out, as drafts want it.
        """
        self._is_plain = is_plain
        self._buffers = SampleBuffers.of(num_slots, vocab_size, max_rows, device)
        self._device = device
        # A copy in front of the kernel would cost as much as the rest of a gap between steps.
        given = torch.zeros(NUM_GIVEN, num_slots * CHANGE_WORDS, dtype=torch.int32)
        self._given = given.pin_memory() if device.type == "cuda" else given
        self._num_flushes = 0
        self._staged: dict[int, tuple[SlotInit, int, NDArray[np.int32]]] = {}
        self._tables: dict[int, Tensor] = {}  # of slots that need one
        self._graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}

    @property
    def states(self) -> Tensor:
        """[max_rows], int32: MaskFlag of each row."""
        return self._buffers.states

    @property
    def masks(self) -> Tensor:
        """[max_rows, ⌈vocab_size / 32⌉], int32: bit i % 32 of word i // 32 allows id i."""
        return self._buffers.masks

    @property
    def out(self) -> SampleOut:
        """Results of the latest step."""
        return self._buffers.out

    def stage(self, row: SampleRow) -> None:
        """A request is in its slot from the next `flush` on; the last one of a slot counts."""
        parts: dict[Has, NDArray[np.int32]] = {}
        if not self._is_plain:
            parts = _parts(row, row.resolved, self._buffers.vocab_size)
        table = np.concatenate(list(parts.values())) if parts else _NO_TABLE
        self._staged[row.init.slot] = row.init, sum(parts), table

    def flush(self, copy: Copy) -> None:
        """Bring what was staged to the device, behind the steps launched before.

        Args:
            copy: enqueues a copy of its second argument, which may change once it returns, into
                its first, on the current stream.
        """
        if not self._staged:
            return
        changes = b"".join(self._change(*staged, copy) for staged in self._staged.values())
        given = self._given[self._num_flushes % NUM_GIVEN]
        given.numpy()[: len(changes) // 4] = np.frombuffer(changes, np.int32)
        put_records(given.data_ptr(), len(self._staged), self._buffers)
        self._num_flushes += 1
        self._staged.clear()

    def _change(self, init: SlotInit, has: int, table: NDArray[np.int32], copy: Copy) -> bytes:
        """For the device, where the table goes, too."""
        self._tables.pop(init.slot, None)
        address = 0
        if len(table):
            held = torch.empty(len(table), dtype=torch.int32, device=self._device)
            copy(held, table)
            self._tables[init.slot], address = held, held.data_ptr()
        asks = init.sampling
        return CHANGE.pack(
            init.slot,
            *(asks.temperature, asks.top_p, asks.min_p, max(0, asks.top_k)),
            *(asks.presence_penalty, asks.frequency_penalty, asks.repetition_penalty, has),
            *(init.seed % 2**64, init.sub_index % 2**64, address),
            *(init.min_len, -1 if self._is_plain else init.n_logprobs),
        )

    def capture(self, logits: Tensor, rows: Tensor, starts: Tensor) -> None:
        """From now on `sample` of these tensors, by their addresses, is one launch of a graph.

        Runs once, over rows that must all be padding. No other work may be on the device.
        """
        if not logits.is_cuda:
            return
        sample_rows(logits, rows, starts, self._buffers)  # loads the kernels
        torch.cuda.synchronize(logits.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            sample_rows(logits, rows, starts, self._buffers)
        self._graphs[_addresses(logits, rows, starts)] = graph

    def sample(self, logits: Tensor, rows: Tensor, starts: Tensor) -> None:
        """Draw a token for each row that samples; see `sample_rows`."""
        graph = self._graphs.get(_addresses(logits, rows, starts))
        if graph is not None:
            graph.replay()
        else:
            sample_rows(logits, rows, starts, self._buffers)


def _addresses(logits: Tensor, rows: Tensor, starts: Tensor) -> tuple[int, ...]:
    return len(logits), logits.data_ptr(), rows.data_ptr(), starts.data_ptr()


def _parts(
    row: SampleRow, settings: SampleSettings, vocab_size: int
) -> dict[Has, NDArray[np.int32]]:
    """Of the slot's table, in order."""
    parts: dict[Has, NDArray[np.int32]] = {}
    if settings.allowed is not None or len(settings.bad_ids):
        may = np.full(vocab_size, settings.allowed is None)
        if settings.allowed is not None:
            may[settings.allowed] = True
        may[settings.bad_ids] = False
        parts[Has.BANS] = _bits(may)
    if len(row.tokens) < row.init.min_len:
        stops = np.zeros(vocab_size, bool)
        stops[settings.stop_ids[settings.stop_ids < vocab_size]] = True
        parts[Has.STOPS] = _bits(stops)
    if len(settings.bias_ids):
        bias = np.zeros(vocab_size, np.float32)
        np.add.at(bias, settings.bias_ids, settings.bias)
        parts[Has.BIAS] = bias.view(np.int32)
    if settings.has_penalty:
        output = row.tokens[row.init.prompt_len :]
        counts = np.bincount(output, minlength=vocab_size).astype(np.int32)
        counts[row.tokens[: row.init.prompt_len]] |= IN_PROMPT
        parts[Has.PENALTIES] = counts
    if settings.bad_words:
        parts[Has.WORDS] = _words(settings.bad_words, row.tokens[row.init.prompt_len :])
    return parts


def _bits(chosen: NDArray[np.bool_]) -> NDArray[np.int32]:
    padded = np.zeros(mask_words(len(chosen)) * 32, bool)
    padded[: len(chosen)] = chosen
    return np.packbits(padded, bitorder="little").view("<i4")


def _words(words: list[NDArray[np.int32]], output: NDArray[np.int32]) -> NDArray[np.int32]:
    """See `Has.WORDS`; the ring holds what the longest word looks back on."""
    size = max(map(len, words)) - 1
    ring = np.zeros(size, np.int32)
    for at in range(max(0, len(output) - size), len(output)):
        ring[at % size] = output[at]
    begins = np.cumsum([0, *map(len, words)])
    head = np.array([len(words), size, len(output)])
    return np.concatenate([head, ring, begins, *words]).astype(np.int32)
