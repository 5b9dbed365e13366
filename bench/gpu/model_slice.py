"""A slice of a model on a device, with full pools: decode steps and prompts."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from bench.accounting import Touched
from bench.gpu.popularity import make_popular
from bench.gpu.routes_seen import experts_of, routes_seen
from deepmesh.wire.messages import Capacity, Pool, SamplingParams, SlotInit
from deepmesh.wire.packed import BLOCK, pack_ids
from kernels.comm.one_sided import OneSidedExchange
from kernels.step.slots_portable import ROW_FIELDS, Sampling
from services.executor.batch import BatchRow, StepBatch
from services.executor.gpu.decode_program import DecodeProgram
from services.executor.gpu.decode_step import DecodeStep
from services.executor.gpu.random_model import random_device_parts
from services.executor.gpu.slots import DeviceSlots
from services.executor.kv_cache import KvCache
from services.executor.model_config import BLOCK_TOKENS, ModelConfig
from services.executor.presets import preset_config

UE8M0_ONE, E4M3_ONE = 127, 0x38
WINDOW_SPARE = 1  # blocks behind the window, for what the step writes


class ModelSlice:
    """Random weights of real shape, and a cache in which every row has a context."""

    def __init__(
        self,
        preset: str,
        layers: int,
        *,
        rows: int,
        context: int,
        tokens: int,
        device: str,
        exchange: OneSidedExchange | None = None,
    ) -> None:
        """
        Args:
            rows: of the largest decode step, each with `context` tokens.
            tokens: of the longest prompt.
            exchange: of a rank that has a part of the experts; all ranks then do the same.
        """
        raw = preset_config(preset, layers=layers)
        self.model, self.biases = random_device_parts(raw, device=device, exchange=exchange)
        self._first = 0 if exchange is None else exchange.rank * rows  # row of all ranks' rows
        self.config, self.device = self.model.config, self.model.device.name
        self._width = -(-(context + 1) // BLOCK_TOKENS)
        self._held = -(-self.config.sliding_window // BLOCK_TOKENS) + WINDOW_SPARE
        self._prompt_blocks = -(-max(tokens, 1) // BLOCK_TOKENS)
        blocks = max(rows * self._width, self._prompt_blocks)
        windows = max(rows * self._held, self._prompt_blocks)
        self.rows, self.context = rows, context
        self.cache = KvCache(self.config, blocks, windows, rows, device=str(self.device))
        _fill(self.cache)
        capacity = Capacity(
            1, 0, blocks, windows, rows, rows, context + 64, self.config.vocab_size, BLOCK_TOKENS
        )
        self._slots = DeviceSlots(
            self.config, capacity, self.model.compressed_ids, rows, self.device
        )
        self._shared: list[Tensor] = []
        for row in range(rows):
            self._open(row)
        self._apply()
        self._draw = torch.Generator().manual_seed(3 + self._first)

    # ------------------------------------------------------------ decode

    def program(self, rows: int, *, graph: bool) -> DecodeProgram:
        """A step of one token of each of the first `rows` requests, ready to run."""
        step = DecodeStep.empty(self.config, rows, self._slots.max_blocks, self.device)
        if self.model.group is not None:
            self.model.group.padded = rows
        program = DecodeProgram(self.model, self.cache, step)
        if graph:
            program.capture()
        self._plan(step)
        return program

    def touched(self, program: DecodeProgram) -> Touched:
        """What a run of it computes and reads."""
        with routes_seen() as seen:
            program.run()
        step = program.step
        return Touched(
            tuple(experts_of(ids) for ids in seen),
            tuple(step.ids.tolist()),
            tuple(step.positions.tolist()),
        )

    def make_popular(self, zipf: float) -> None:
        """From now on routers of decode steps choose experts as a law of popularity says."""
        program = self.program(self.rows, graph=False)

        def step() -> None:
            ids = program.step.ids
            fresh = torch.randint(20, self.config.vocab_size, ids.shape, generator=self._draw)
            ids.copy_(fresh.int())
            program.run()

        make_popular(self.biases, self.config.num_experts_per_tok, zipf, step)

    def make_popular_in_prompts(self, zipf: float, tokens: int) -> None:
        """The same of prompts of so many tokens."""
        top_k = self.config.num_experts_per_tok
        make_popular(self.biases, top_k, zipf, lambda: self.prefill(self.prompt(tokens)))

    def _open(self, row: int) -> None:
        """A request that has computed all of its context but the newest token."""
        order = self.config.engram_max_ngram_size
        ids = np.random.default_rng(self._first + row).integers(
            20, self.config.vocab_size, order + 1
        )
        self._slots.open(
            SlotInit(
                row,
                1,
                rid=row,
                epoch=0,
                ids=pack_ids(ids.astype(np.int32)),
                prompt_len=self.context,
                max_len=self.context + 64,
                sampling=SamplingParams(),
                start=self.context,
                state_block=row,
            )
        )
        table = [(row, 1, int(Pool.GLOBAL), i, row * self._width + i) for i in range(self._width)]
        first = self._width - self._held
        table += [
            (row, 1, int(Pool.WINDOW), first + i, row * self._held + i)
            for i in range(min(self._held, self._width))
            if first + i >= 0
        ]
        self._slots.append(np.array(table, BLOCK))

    def _apply(self) -> None:
        changes = self._slots.changes.take()
        self._slots.apply(self._host(changes).data_ptr(), len(changes))
        self._settle()

    def _plan(self, step: DecodeStep) -> None:
        given = np.zeros((step.num_tokens, ROW_FIELDS), np.int32)
        given[:, 0], given[:, 1], given[:, 2] = np.arange(len(given)), 1, Sampling.TOKEN
        self._slots.begin(self._host(given).data_ptr(), 0, len(given))
        self._slots.plan(step)
        self._settle()

    def _host(self, values: np.ndarray) -> Tensor:
        held = torch.from_numpy(values)
        self._shared.append(held.pin_memory() if self.device.type == "cuda" else held)
        return self._shared[-1]

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._shared.clear()

    # ------------------------------------------------------------ prefill

    def prompt(self, tokens: int, start: int = 0) -> StepBatch:
        """Positions `start` … of a prompt; the logits of its last token."""
        blocks = range(self._prompt_blocks)
        ids = torch.randint(20, self.config.vocab_size, (tokens,), generator=self._draw).tolist()
        before = [1] * min(start, self.config.context_ids)
        row = BatchRow(ids, start, blocks, blocks, 0, context=before)
        return StepBatch.build([row], self.config.context_ids)

    def prefill(self, batch: StepBatch) -> Tensor:
        """Logits, as the executor computes a prompt's chunk."""
        if self.model.group is not None:
            self.model.group.padded = batch.num_tokens
        if self.model.prefill is not None:
            return self.model.prefill.forward(batch, self.cache).logits
        return self.model.forward(batch, self.cache).logits


def _fill(cache: KvCache) -> None:
    """Random codes everywhere, all with scales near one."""
    config = cache.config
    window, compressed = config.head_dim, config.head_dim // 2
    parts: list[tuple[Tensor, int, int]] = [(cache.window, window, UE8M0_ONE - 9)]
    parts += [(pool, compressed, E4M3_ONE) for pool in cache.compressed.values()]
    for pool, first, scale in parts:
        pool.random_(0, 120)
        pool[..., first:] = scale
    for source, keys in cache.index_keys.items():  # codes of a block's keys, then their scales
        entries = BLOCK_TOKENS // config.compress_ratios[source]
        keys.random_(0, 120)
        codes = entries * config.index_head_dim // 2
        keys.view(-1, entries * keys.shape[1])[:, codes:] = UE8M0_ONE


def mean_touched(steps: Sequence[Touched]) -> float:
    """Experts of a layer."""
    counts = [len(layer) for step in steps for layer in step.experts]
    return sum(counts) / len(counts)


def layer_kinds(config: ModelConfig) -> list[str]:
    """What each layer is, for the report."""
    kinds: list[str] = []
    for layer in range(config.num_hidden_layers):
        ratio = config.compress_ratios[layer]
        kind = "window" if not ratio else f"ratio {ratio}"
        if layer in config.kv_source_layer_ids:
            kind += ", rows"
        if layer in config.index_source_layer_ids:
            kind += ", index"
        if layer in config.engram_layer_ids:
            kind += ", Engram"
        kinds.append(kind)
    return kinds
