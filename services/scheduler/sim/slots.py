"""What a simulated device keeps of its requests between steps: one column per field, by slot."""

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import Capacity, Pool, SlotInit
from deepmesh.wire.packed import BLOCK, unpack_ids

from .hashing import mix
from .oracle import chain_of
from .shadow import Cells, ShadowError, Table

WORD = (1 << 64) - 1


class Slots:
    """The columns. `length` tokens of a request are known, `kv_len` positions are computed."""

    def __init__(self, capacity: Capacity) -> None:
        count, size = capacity.num_slots, capacity.block_size
        self.capacity = capacity
        self.blocks = -(-(capacity.max_model_len + capacity.window) // size) + 3
        width = self.blocks * size
        self.inits: list[SlotInit | None] = [None] * count
        self.stop_ids: list[frozenset[int]] = [frozenset()] * count
        self.rid = np.zeros(count, np.uint64)  # 0: the slot is closed
        self.gen = np.zeros(count, np.uint32)
        self.seed = np.zeros(count, np.uint64)
        self.sub_index = np.zeros(count, np.uint64)
        self.max_len = np.zeros(count, np.int64)
        self.kv_len = np.zeros(count, np.int64)
        self.length = np.zeros(count, np.int64)
        self.producer = np.zeros(count, np.int64)
        self.done = np.zeros(count, np.bool_)
        self.drafted = np.zeros(count, np.int64)  # drafts behind the last token
        # the upper layers have run at all positions from here on; 0: and what was resumed is exact
        self.upper_from = np.zeros(count, np.int64)
        self.state_block = np.zeros(count, np.int32)
        self.ids = np.zeros((count, width), np.int32)
        self.chain = np.zeros((count, width), np.int64)  # hash up to and including each token
        # What the cell of each position must hold: the chain, and where the two kernel classes
        # differ in bits, which of them computed it.
        self.want = self.chain if capacity.one_kernel_class else np.zeros_like(self.chain)
        self.tables = [np.full((count, self.blocks), -1, np.int32) for _ in range(2)]
        self.maybe_stop = np.zeros(capacity.vocab_size, np.bool_)  # a stop id of some request

    def init_of(self, slot: int) -> SlotInit:
        """The request of a slot that is known to be open."""
        init = self.inits[slot]
        if init is None:
            raise ShadowError(f"slot {slot} is not open (I16)")
        return init

    def open(self, init: SlotInit) -> None:
        """A request enters."""
        slot = init.slot
        if self.inits[slot] is not None:
            raise ShadowError(f"slot {slot} is given away while in use (I16)")
        ids = unpack_ids(init.ids)
        stops = unpack_ids(init.stop_ids)
        self.inits[slot], self.stop_ids[slot] = init, frozenset(stops.tolist())
        self.maybe_stop[stops] = True
        self.rid[slot], self.gen[slot] = init.rid, init.gen
        self.seed[slot], self.sub_index[slot] = init.seed & WORD, init.sub_index
        self.max_len[slot], self.kv_len[slot] = init.max_len, init.start
        self.length[slot] = len(ids)
        self.producer[slot], self.done[slot], self.drafted[slot] = 0, False, 0
        self.state_block[slot], self.upper_from[slot] = init.state_block, 0
        self.ids[slot, : len(ids)] = ids
        self.chain[slot, : len(ids)] = chain_of(ids.tolist())
        self._mark_classes(slot, 0, len(ids))
        for table in self.tables:
            table[slot] = -1

    def close(self, slot: int, gen: int) -> SlotInit:
        """The request has left."""
        init = self.inits[slot]
        if init is None or init.gen != gen:
            raise ShadowError(f"slot {slot} generation {gen} is closed but not open (I16)")
        self.inits[slot] = None
        self.rid[slot] = 0
        return init

    def append_blocks(self, packed: bytes) -> None:
        """Block tables grow."""
        if not packed:
            return
        blocks = np.frombuffer(packed, BLOCK)
        if (self.gen[blocks["slot"]] != blocks["gen"]).any():
            raise ShadowError("blocks for another generation of their slot (I16)")
        for pool in (Pool.GLOBAL, Pool.WINDOW):
            mine = blocks[blocks["pool"] == pool]
            self.tables[pool][mine["slot"], mine["index"]] = mine["block"]

    def append(self, slot: int, token: int) -> None:
        """A token was sampled."""
        at = int(self.length[slot])
        self.ids[slot, at] = token
        self.chain[slot, at] = mix(int(self.chain[slot, at - 1]), token)
        self._mark_classes(slot, at, at + 1)
        self.length[slot] = at + 1

    def append_many(
        self, slots: NDArray[np.int64], tokens: NDArray[np.int64], chains: Cells
    ) -> None:
        """One token for each of several requests."""
        at = self.length[slots]
        self.ids[slots, at] = tokens
        self.chain[slots, at] = chains
        if self.want is not self.chain:  # beyond the prompt: the decode kernels' class
            self.want[slots, at] = chains | 1
        self.length[slots] = at + 1

    def exact_from(self, slot: int) -> int:
        """The first position whose window rows do not depend on what the upper layers left out."""
        first, capacity = int(self.upper_from[slot]), self.capacity
        return first + capacity.prefill_halo - capacity.window if first else 0

    def table(self, slot: int, pool: Pool) -> Table:
        """Block table of a request in a pool."""
        if pool == Pool.STATE:
            return self.state_block[slot : slot + 1]
        return self.tables[pool][slot]

    def _mark_classes(self, slot: int, start: int, end: int) -> None:
        if self.want is not self.chain:
            is_decode = np.arange(start, end) >= self.init_of(slot).prompt_len
            self.want[slot, start:end] = self.chain[slot, start:end] & ~1 | is_decode
