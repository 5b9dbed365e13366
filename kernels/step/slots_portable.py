"""State of requests by slot on a device, and what a step makes of it: `csrc/slots_portable.cu`.

All kernels run in the order of one stream and wait for nobody, so a step can be launched before the
host knows what the one before it sampled. Arguments that the host writes, and results that it
reads, are addresses of pinned memory.
"""

from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch
from torch import Tensor

from kernels import portable

ROW_FIELDS = 3  # slot or -1, count of positions, Sampling
NO_SLOT = -1


class Sampling(IntEnum):
    """What a row does behind its last position."""

    NOTHING = 0
    TOKEN = 1
    MISSED = 2  # it would, but its mask is not there: the position is computed again
    KEPT = 3  # it has sampled already: what was written stays


class RowFlag(IntFlag):
    """What became of a row; a row that was over before it began has none."""

    LIVE = 1
    FINITE = 2  # a token was sampled
    DONE = 4  # the request is


@dataclass(frozen=True)
class SlotArrays:
    """Views of one int32 tensor, so that a change of any of them is an index and a value."""

    state: Tensor  # [all]
    kv_len: Tensor  # [slots]: positions that are valid
    max_len: Tensor  # [slots]
    done: Tensor  # [slots]: rows are null rows
    state_block: Tensor  # [slots]
    drafted: Tensor  # [slots]: length of the sequence that the slot's drafts continue; -1: none
    recent: Tensor  # [slots, order]: the newest ids, newest first, -1 for none
    stops: Tensor  # [slots, num_stops]: ids that end the request, -1 for none
    global_blocks: Tensor  # [slots, max_blocks]; as the next, meaningless where none was given
    window_blocks: Tensor  # [slots, max_blocks]

    @staticmethod
    def of(
        num_slots: int, order: int, num_stops: int, max_blocks: int, device: torch.device
    ) -> "SlotArrays":
        """All slots done."""
        shapes = [(num_slots,)] * 5
        shapes += [(num_slots, n) for n in (order, num_stops, max_blocks, max_blocks)]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        state = torch.full((sum(sizes),), -1, dtype=torch.int32, device=device)
        views = [v.view(s) for v, s in zip(state.split(sizes), shapes, strict=True)]
        return SlotArrays(state, *views)

    def start(self, field: Tensor) -> int:
        """Index in `state` of a field's first element."""
        return (field.data_ptr() - self.state.data_ptr()) // self.state.element_size()


def stamp(on: Tensor, out: int) -> None:
    """What the clock of a tensor's device says when it is the kernel's turn, in ns.

    A host's clock is that of the wall, a GPU's its own.

    Args:
        out: address of the int64 that gets it.
    """
    _run("stamp", on, out)


def apply_changes(state: Tensor, changes: int, count: int) -> None:
    """Set elements of the state.

    Args:
        changes: address of [count, 2], int32: index, value; no index comes twice.
    """
    _run("apply_changes", state, changes, count)


def begin_rows(
    rows: Tensor, positions: Tensor, given: int, count: int, arrays: SlotArrays, stamp: int = 0
) -> None:
    """The rows of a step that are still alive, with their first positions.

    Args:
        rows: [count, ROW_FIELDS], int32: as given, NO_SLOT where the request is done.
        positions: [count], int32: -1 where it is.
        given: address of [count, ROW_FIELDS], int32.
        stamp: address of the int64 that gets the time in ns; 0: none.
    """
    _run("begin_rows", rows, positions, given, count, arrays.done, arrays.kv_len, stamp)


def advance_rows(
    rows: Tensor,
    count: int,
    sampled: tuple[Tensor, Tensor],
    arrays: SlotArrays,
    vocab_size: int,
    results: tuple[int, int],
    stamp: int = 0,
) -> None:
    """Write back what the rows did, so that those of the next step find it.

    Args:
        sampled: tokens, and whether they are any: [count], int32.
        results: addresses of [count], int32: RowFlag, and the positions that are valid now.
        stamp: as for `begin_rows`.
    """
    order, num_stops = arrays.recent.shape[1], arrays.stops.shape[1]
    state = (arrays.kv_len, arrays.done, arrays.recent)
    fixed = (arrays.max_len, arrays.stops, order, num_stops, vocab_size)
    _run("advance_rows", rows, count, *sampled, *fixed, *state, *results, stamp)


def plan_tokens(
    rows: Tensor,
    positions: Tensor,
    arrays: SlotArrays,
    tables: tuple[Tensor, ...],
    out: tuple[Tensor, ...],
    block: int,
    drafts: tuple[Tensor, Tensor, tuple[int, int]] | None = None,
) -> None:
    """One token of each row: ids, slots of the window, angles.

    Args:
        drafts: `DraftTables.place_of`, `DraftArrays.ids` and `DraftState.spare` if some tokens
            stand behind drafts: rows are tokens then.
        tables: compressed ids [vocab_size], int64; cosines and sines of both rotations,
            [positions, rope_dim / 2], float32.
        out: ids, last_ids, blocks, state_blocks, window_slots, window_writes, cosines and sines
            as `services.executor.gpu.decode_step.DecodeStep` has them.
        block: positions of a block.
    """
    count, order, max_blocks = positions.shape[0], out[1].shape[1], out[2].shape[1]
    window, half = out[4].shape[1], tables[1].shape[1]
    assert order == arrays.recent.shape[1]
    assert max_blocks == arrays.global_blocks.shape[1]
    state = (arrays.recent, arrays.state_block, arrays.global_blocks, arrays.window_blocks)
    places, ids, spare = drafts or (None, None, (0, 0))
    behind = (places, ids, 0 if ids is None else ids.shape[1], *spare)
    sizes = (order, max_blocks, block, window, half, max(order, max_blocks, window, half))
    _run("plan_tokens", rows, positions, count, *state, *behind, *tables, *sizes, *out)


def plan_entries(
    rows: Tensor,
    positions: Tensor,
    arrays: SlotArrays,
    angles: tuple[Tensor, Tensor],
    out: tuple[Tensor, ...],
    block: int,
    ratio: int,
) -> None:
    """Compressed rows of one ratio that each token sees, and the one that it completes.

    Args:
        angles: cosines and sines, [positions, rope_dim / 2], float32.
        out: slots, visible, write_slots, cosines and sines as `DecodeRatio` has them.
    """
    count, top, half = positions.shape[0], out[0].shape[1], angles[0].shape[1]
    sizes = (arrays.global_blocks.shape[1], block, ratio, top, half, max(top, half))
    _run("plan_entries", rows, positions, count, arrays.global_blocks, *angles, *sizes, *out)


def _run(function: str, *arguments: portable.Argument) -> None:
    portable.run("step", "slots_portable", function, *arguments)
