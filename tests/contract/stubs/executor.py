"""An executor that makes up tokens: `executor.py --dial SCHEDULER`."""

import struct
import zlib
from typing import Any

from link import Message, Node, options

ROW, RESULT = struct.Struct("<QIIIBBBBQIIII"), struct.Struct("<QIIIHBBI")
SLOT = struct.Struct("<II")
DUMMY, HOST = 3, 0
NONE, EOS, LENGTH, NULL = 0, 1, 2, 3
FAILED = 4
VOCABULARY, SLOTS, BLOCKS, MAX_LEN = 4096, 16, 256, 2048


def unpack(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}i", packed))


class Slot:
    """A request on the device."""

    def __init__(self, init: list[Any]) -> None:
        given = [*init, *[0, [], 0, 0, b""][len(init) - 7 :]]
        self.gen, self.rid, self.epoch = given[1:4]
        self.ids, self.max_len, self.min_len = unpack(given[4]), given[6], given[7]
        self.seed, self.stop_ids = given[9], set(unpack(given[11] if len(given) > 11 else b""))
        self.written, self.is_over = 0, False

    def sample(self) -> int:
        history = struct.pack(f"<{len(self.ids)}i", *self.ids)
        self.ids.append(600 + zlib.crc32(history, self.seed & 0xFFFFFFFF) % 3000)
        if self.ids[-1] in self.stop_ids and len(self.ids) > self.min_len:
            self.is_over = True
            return EOS
        self.is_over = len(self.ids) >= self.max_len
        return LENGTH if self.is_over else NONE


class Executor:
    def __init__(self, node: Node) -> None:
        self.node = node
        self.epoch, self.rank = -1, 0
        self.slots: dict[int, Slot] = {}

    def on_message(self, peer: str, message: Message) -> None:
        try:
            match message:
                case ["Load", int() as epoch, int() as rank, int(), str(), *_]:
                    self.epoch, self.rank, self.slots = epoch, rank, {}
                    self.node.send(peer, "Progress", "nothing", 1, 1)
                    sizes = [BLOCKS, BLOCKS, BLOCKS, SLOTS, MAX_LEN, VOCABULARY, 64]
                    self.node.send(peer, "Capacity", epoch, rank, *sizes)
                case ["Reset", int() as epoch]:
                    self.epoch, self.slots = epoch, {}
                case ["CompileGrammars", int() as epoch, list() as orders, *_]:
                    self.node.send(
                        peer, "GrammarsCompiled", epoch, self.rank, [n for n, _ in orders]
                    )
                case [
                    "StoreBlocks" | "LoadBlocks",
                    int() as op,
                    int() as epoch,
                    _,
                    list() as moves,
                    *_,
                ]:
                    if epoch == self.epoch:  # no kvstore here: nothing is moved
                        self.node.send(peer, "OpDone", op, epoch, FAILED, bytes(len(moves)))
                case ["SubmitStep", int() as epoch, int(), int(), int(), list(), bytes(), *_]:
                    if epoch == self.epoch:
                        self.step(peer, message[1:])
                case _:
                    pass
        except (TypeError, ValueError, IndexError, struct.error):
            pass  # a message of the wrong shape

    def step(self, peer: str, fields: list[Any]) -> None:
        given = [*fields, *[[], b"", [], b"", b""][len(fields) - 6 :]]
        step_id, rows = given[1], given[5]
        for init in given[6]:
            self.slots[init[0]] = Slot(init)
        results, tokens, error = b"", list[int](), ""
        for number, row in enumerate(ROW.iter_unpack(rows)):
            new, done, written = [], NULL, 0
            if row[4] != DUMMY and not error:
                error = self.wrong(row)
                if error:
                    error = f"row {number}: {error}"
                else:
                    new, done, written = self.row(row)
            tokens += new
            results += RESULT.pack(row[0], row[1], row[2], row[3], len(new), done, 0, written)
        for slot, gen in SLOT.iter_unpack(given[9]):
            if slot in self.slots and self.slots[slot].gen == gen:
                del self.slots[slot]
        flat = struct.pack(f"<{len(tokens)}i", *tokens)
        tail = [b"", b"", b"", b"", step_id, [[op[0], 0] for op in given[8]], [], error]
        status = int(bool(error))
        self.node.send(
            peer, "StepResult", self.epoch, step_id, self.rank, status, results, flat, *tail
        )

    def wrong(self, row: tuple[int, ...]) -> str:
        held = self.slots.get(row[2])
        if held is None or (held.rid, held.epoch, held.gen) != (row[0], row[1], row[3]):
            return f"slot {row[2]} does not hold rid {row[0]}"
        follows = row[9] == held.written and row[9] + row[11] <= len(held.ids)
        if row[5] == HOST and not held.is_over and not follows:
            return "its positions do not follow, or its ids are not known"
        return ""

    def row(self, row: tuple[int, ...]) -> tuple[list[int], int, int]:
        slot = self.slots[row[2]]
        if slot.is_over:
            return [], NULL, slot.written
        slot.written = row[9] + row[11] if row[5] == HOST else len(slot.ids)
        if not row[6]:
            return [], NONE, slot.written
        done = slot.sample()
        return [slot.ids[-1]], done, slot.written

    def on_down(self, name: str) -> None:
        self.epoch, self.slots = -1, {}


if __name__ == "__main__":
    node = Node("executor", "executor-0-0")
    node.dial(options()["dial"][0])
    executor = Executor(node)
    node.run(executor.on_message, executor.on_down)
