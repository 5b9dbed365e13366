"""The masks of one engine: the worker process, and the gate that asks it step by step."""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepmesh.config import Config
from services.executor.interface import LiveRows, Sampled
from services.executor.masks.ahead import CompileAhead
from services.executor.masks.gate import Drafted, MaskGate, OnSpan
from services.executor.masks.process import MaskProcess
from services.executor.masks.vocabulary import Words
from services.executor.slots import SlotTable

_log = logging.getLogger(__name__)
READY_S = 60.0  # a vocabulary of 129k ids takes 2 s


class GrammarMasks:
    """Started with the weights, and again with those of another model."""

    def __init__(self, config: Config, name: str, on_span: OnSpan) -> None:
        """`name` is that of the executor; `on_span` gets a span for each traced request."""
        self.ahead = CompileAhead()
        self._config, self._name, self._on_span = config, f"{name}-masks", on_span
        self._of: tuple[Path, int, int, int] | None = None
        self._process: MaskProcess | None = None
        self._gate: MaskGate | None = None

    def start(self, model: Path, *, vocab_size: int, num_slots: int, draft_len: int = 0) -> None:
        """Start the worker for a checkpoint; returns at once. `draft_len`: drafts of a row."""
        if self._of == (model, vocab_size, num_slots, draft_len):
            return
        self.close()
        executor = self._config.executor
        self._process = MaskProcess(
            self._name,
            model,
            vocab_size=vocab_size,
            num_slots=num_slots,
            cache_size=executor.grammar_cache,
            compile_s=executor.grammar_compile_s,
            threads=executor.grammar_threads,
            log_level=self._config.mesh.log_level,
            draft_len=draft_len,
            ahead=self.ahead,
        )
        self._gate = MaskGate(
            self._process,
            num_slots,
            wait_s=executor.mask_wait_ms / 1e3,
            compile_s=executor.grammar_compile_s,
            on_span=self._on_span,
        )
        self._process.start()
        self._of = (model, vocab_size, num_slots, draft_len)

    def wait_ready(self) -> bool:
        """Whether outputs can be kept to grammars; waits for the worker's vocabulary."""
        assert self._process is not None
        if self._process.wait_ready(READY_S):
            return True
        _log.warning("no grammars: the mask worker has no vocabulary; see the log above")
        return False

    def begin(self, live: LiveRows, slots: SlotTable) -> None:
        """See `MaskGate`."""
        self._gate_now.begin(live, slots)

    def most_drafts(self, live: LiveRows, slots: SlotTable) -> NDArray[np.int64]:
        """See `MaskGate`."""
        return self._gate_now.most_drafts(live, slots)

    def places(self, live: LiveRows, slots: SlotTable) -> NDArray[np.int64]:
        """See `MaskGate`."""
        return self._gate_now.places(live, slots)

    def draft(self, at: NDArray[np.int64], positions: NDArray[np.int64], ids: Drafted) -> None:
        """See `MaskGate`."""
        self._gate_now.draft(at, positions, ids)

    def collect(self, live: LiveRows, slots: SlotTable) -> NDArray[np.uint8]:
        """See `MaskGate`."""
        return self._gate_now.collect(live, slots)

    def mask(self, slot: int, place: int = 0) -> Words:
        """See `MaskGate`."""
        return self._gate_now.mask(slot, place)

    def settle(
        self, live: LiveRows, slots: SlotTable, states: NDArray[np.uint8], drawn: Sampled
    ) -> Sampled:
        """See `MaskGate`."""
        return self._gate_now.settle(live, slots, states, drawn)

    @property
    def _gate_now(self) -> MaskGate:
        assert self._gate is not None, "no model is loaded"
        return self._gate

    @property
    def pid(self) -> int:
        """Of the worker; 0 between two lives."""
        return self._process.pid if self._process is not None else 0

    def close(self) -> None:
        """End the worker. A step that still runs finds none."""
        if self._process is not None:
            self._process.close()
        self._of = None
