"""A router's state with replicas that say what a test tells them to."""

import numpy as np

from deepmesh.wire.messages import (
    AckRow,
    Generate,
    KvItem,
    KvKind,
    PrefixEvents,
    ReplicaStats,
    ServiceStats,
)
from deepmesh.wire.packed import pack_ids
from services.router.placements import Placements
from services.router.prefixes import Grid

PRINT = "weights"  # of all engines here
GRID = Grid(PRINT)
ROWS = 16  # that a replica runs at once
TOKEN_NS, ROW_NS, KILOTOKEN_NS = 100_000, 200_000, 10_000


def stats(
    requests: int = 0,
    *,
    ready: bool = True,
    draining: bool = False,
    paused: bool = False,
    role: str = "both",
    waiting_tokens: int = 0,
    context_tokens: int = 0,
    token_ns: int = TOKEN_NS,
    row_ns: int = ROW_NS,
) -> ServiceStats:
    """A heartbeat; `token_ns` 0: a replica without a profile."""
    return ServiceStats(
        ready,
        requests,
        [
            ReplicaStats(
                "s",
                ready,
                fingerprint=PRINT,
                draining=draining,
                paused=paused,
                role=role,
                waiting_tokens=waiting_tokens,
                context_tokens=context_tokens,
                prefill_token_ns=token_ns,
                decode_row_ns=row_ns if token_ns else 0,
                context_kilotoken_ns=KILOTOKEN_NS if token_ns else 0,
            )
        ],
    )


def words(count: int, seed: int) -> list[int]:
    """Token ids."""
    return np.random.default_rng(seed).integers(0, 4096, count).tolist()


def generate(
    number: int,
    prompt: list[int] | int = 2,
    attempt: int = 1,
    *,
    tokenizer: str = "tokenizer-0",
    max_tokens: int = 16,
    salt: bytes = b"",
) -> Generate:
    """A request; an int stands for a prompt of so many tokens that nobody else has."""
    ids = words(prompt, 1000 + number) if isinstance(prompt, int) else prompt
    return Generate(
        number.to_bytes(16, "big"),
        attempt,
        tokenizer,
        pack_ids(ids),
        len(ids),
        max_tokens=max_tokens,
        salt=salt,
    )


def router(*loads: int, room: int = 100, roles: str = "", token_ns: int = TOKEN_NS) -> Placements:
    """A router; `loads` are requests of others at s0, s1, ...; `roles` a letter of each."""
    made = Placements(room, min(room, ROWS))
    for index, load in enumerate(loads):
        role = {"p": "prefill", "d": "decode"}.get(roles[index : index + 1], "both")
        made.replicas.up(f"s{index}")
        made.heartbeat(f"s{index}", stats(load, role=role, token_ns=token_ns), 0.0)
    return made


def place(router: Placements, message: Generate, now: float = 0.0) -> str:
    """Where a request goes; it stays there."""
    (send,) = router.generate("tokenizer-0", message, now)
    assert isinstance(send.message, Generate), send
    return send.name


def over(router: Placements, *messages: Generate, now: float = 0.0, output: int = 8) -> None:
    """They have ended."""
    router.ack([AckRow(message.rid, output, done=True) for message in messages], now)


def visit(router: Placements, message: Generate, now: float = 0.0) -> str:
    """Where a request goes; it is over at once."""
    name = place(router, message, now)
    over(router, message, now=now)
    return name


def points(prompt: list[int], *tokens: int, salt: bytes = b"") -> bytes:
    """Names of the prompt's points at these positions."""
    chain = GRID.chain(generate(0, [*prompt, 0], salt=salt))
    return b"".join(chain[at // GRID.step - 1] for at in tokens)


def tell(
    router: Placements, name: str, added: bytes = b"", dropped: bytes = b"", *, first: bool = False
) -> None:
    """A replica says which points it has."""
    events = PrefixEvents(first, PRINT, GRID.block_size, GRID.step, added, dropped)
    router.replicas.prefixes(name, events)


def items(packed: bytes, kind: KvKind = KvKind.POINT) -> list[KvItem]:
    """As kvstores name them."""
    return [KvItem(packed[at : at + 16], kind) for at in range(0, len(packed), 16)]
