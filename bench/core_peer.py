"""The other side of `bench/core.py` with sockets: one process that plays all executors and the
tokenizers over real links, and answers all ranks of a step at once."""

import sys

from bench.core_rig import NUM_TOKENIZERS, TIMEOUT_S, answer, capacity_of, requests_of
from deepmesh.config import LinksConfig
from deepmesh.wire.messages import Load, SubmitStep
from deepmesh.wire.sockets import Dialer, Identity, Mail, PeerDown, PeerUp

WAIT_MS = 20


class Mesh:
    """All links to one scheduler. It ends when the scheduler does."""

    def __init__(self, address: str, ranks: int, rows: int) -> None:
        links = LinksConfig(timeout_s=TIMEOUT_S)
        self._rows = rows
        self._executors = [
            Dialer(address, Identity.new("executor", f"executor-0-{rank}"), links)
            for rank in range(ranks)
        ]
        self._tokenizers = [
            Dialer(address, Identity.new("tokenizer", f"tokenizer-{number}"), links)
            for number in range(NUM_TOKENIZERS)
        ]
        self._up: set[str] = set()
        self._steps: dict[int, dict[int, SubmitStep]] = {}  # step id -> rank -> its part

    def serve(self) -> None:
        """Answer until the link is lost."""
        num_links, asked = len(self._executors) + len(self._tokenizers), False
        while True:
            for rank, dialer in enumerate(self._executors):
                for event in dialer.receive():
                    match event:
                        case PeerUp():
                            self._up.add(f"executor-{rank}")
                        case PeerDown():
                            return
                        case Mail(message=message):
                            self._take(rank, dialer, message)
            for number, dialer in enumerate(self._tokenizers):
                for event in dialer.receive():
                    if isinstance(event, PeerUp):
                        self._up.add(f"tokenizer-{number}")
            if not asked and len(self._up) == num_links:
                asked = True
                self._ask()
            if not self._answer():
                # the last rank's part of a step is the last to be sent: one wake-up for all
                self._executors[-1].socket.poll(WAIT_MS)

    def _take(self, rank: int, dialer: Dialer, message: object) -> None:
        match message:
            case Load(engine_epoch=epoch):
                dialer.send(capacity_of(rank, self._rows, epoch))
            case SubmitStep():
                self._steps.setdefault(message.step_id, {})[rank] = message
            case _:
                pass

    def _ask(self) -> None:
        for name, generate in requests_of(len(self._executors), self._rows):
            self._tokenizers[int(name.rsplit("-", 1)[1])].send(generate)

    def _answer(self) -> bool:
        """Answer the oldest step if all ranks have it."""
        oldest = min(self._steps, default=0)
        if not oldest or len(self._steps[oldest]) < len(self._executors):
            return False
        parts = self._steps.pop(oldest)
        results = answer([parts[rank] for rank in range(len(parts))])
        for dialer, result in zip(self._executors, results, strict=True):
            dialer.send(result)
        return True


if __name__ == "__main__":
    Mesh(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])).serve()
