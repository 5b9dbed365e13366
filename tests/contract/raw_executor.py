"""The executor's side of a scheduler's link, by bytes alone."""

import struct
from types import SimpleNamespace

from tests.contract.raw import ENUMS, Dealer, Wire, make, read

ROW = struct.Struct("<QIIIBBBBQIIII")
RESULT = struct.Struct("<QIIIHBBI")
VOCABULARY, MAX_LEN = 1000, 4096


class RawExecutor:
    """Loads at once and answers every step; the next token is a function of the position."""

    def __init__(self, wire: Wire, address: str) -> None:
        self.wire = wire
        self.link: Dealer = wire.dial(address, "executor", "executor-0-0")
        self.slots: dict[int, SimpleNamespace] = {}  # by slot: init, number of tokens there
        self.closed_slots = 0
        wire.workers.append(self.work)

    def work(self) -> None:
        """Answer what has come."""
        mail, self.link.mail = self.link.mail, []
        for message in mail:
            match message.tag:
                case "Load":
                    self.link.send(self._capacity(message))
                case "SubmitStep":
                    self.link.send(self._step(message))
                case "Reset":
                    self.slots.clear()
                case _:
                    pass

    def _capacity(self, load: SimpleNamespace) -> list[object]:
        return make(
            "Capacity",
            engine_epoch=load.engine_epoch,
            rank=load.rank,
            num_global_blocks=512,
            num_window_blocks=512,
            num_state_blocks=128,
            num_slots=96,
            max_model_len=MAX_LEN,
            vocab_size=VOCABULARY,
            window=64,
            fingerprint="raw",
        )

    def _step(self, step: SimpleNamespace) -> list[object]:
        for array in step.init:
            init = read(array, "SlotInit")
            self.slots[init.slot] = SimpleNamespace(init=init, length=len(init.ids) // 4)
        rows, tokens = b"", list[int]()
        for row in ROW.iter_unpack(step.rows):
            rid, epoch, slot, gen, mode, source, sample = row[:7]
            known = self.slots.get(slot)
            token, done = [], ENUMS["DoneReason"].NULL
            if mode == ENUMS["RowMode"].DUMMY:
                known = None
            if known is not None and not sample:
                done = ENUMS["DoneReason"].NONE
            elif known is not None and known.length < known.init.max_len:
                token, known.length = [100 + known.length % 800], known.length + 1
                full = known.length >= known.init.max_len
                done = ENUMS["DoneReason"].LENGTH if full else ENUMS["DoneReason"].NONE
            written = row[9] + row[11] if source == ENUMS["RowSource"].HOST else 0
            if known is not None:
                known.kv = written or known.length - 1  # the last token has no KV yet
            length = known.kv if known is not None else 0
            tokens += token
            rows += RESULT.pack(rid, epoch, slot, gen, len(token), done, 0, length)
        return make(
            "StepResult",
            engine_epoch=step.engine_epoch,
            step_id=step.step_id,
            rank=0,
            status=ENUMS["StepStatus"].OK,
            rows=rows,
            tokens=struct.pack(f"<{len(tokens)}i", *tokens),
            gpu_done=step.step_id,
            ops_done=[[read(op, "BlockOp").op_id, 0] for op in step.ops],
        )
