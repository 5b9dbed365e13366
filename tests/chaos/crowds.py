"""Clients as faults: those that read slowly or not at all, and far too many at once."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec

from tests.chaos.answers import Cut, Refused
from tests.chaos.load import Load
from tests.chaos.requests import NUM_LONG, REQUESTS

DEAF, SLOW = 6, 6
OVERLOAD = 10  # times the streams
_SLOW_BYTES_PER_S = 40_000
_FREE_WITHIN_S = 100.0  # of all of it, and mesh.SLOW_S of a connection that takes no more
# More than the buffers of a connection take: 20 log probabilities of each token.
_LONG = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Tell me a very long story."}],
    "thinking": {"type": "disabled"},
    "logprobs": True,
    "top_logprobs": 20,
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
}


async def slow_clients(load: Load, num_open: Callable[[], int]) -> str:
    """Some read slowly to the end and get all of it; some read nothing, and must not be kept.

    `num_open`: streams that the gateway has open.
    """
    deaf = [await _deaf(load.url) for _ in range(DEAF)]
    try:
        slow = [asyncio.create_task(load.ask_right(i, pace=_pace)) for i in range(SLOW)]
        await asyncio.gather(*slow)
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FREE_WITHIN_S
        while await loop.run_in_executor(None, num_open) > load.num_streams:
            assert loop.time() < deadline_s, "clients that read nothing are kept"
            await asyncio.sleep(0.1)
        num_cut = sum(bool(one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)) for one in deaf)
    finally:
        for one in deaf:
            one.close()
    return f"{SLOW} slow, {DEAF} deaf, {num_cut} cut off"


def _short(number: int) -> int:
    return NUM_LONG + number % (len(REQUESTS) - NUM_LONG)


def _pace(num_bytes: int) -> float:
    return num_bytes / _SLOW_BYTES_PER_S


async def _deaf(url: str) -> socket.socket:
    """A client that has asked and never reads."""
    where, body = urlsplit(url), msgspec.json.encode(_LONG)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    raw = socket.socket()
    raw.setblocking(False)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, (where.hostname, where.port))
    await loop.sock_sendall(raw, head.encode() + body)
    return raw


async def overload(load: Load) -> str:
    """Ten times the streams at once: each is answered rightly, or refused in time and in words."""
    ends: Counter[str] = Counter()
    number = OVERLOAD * load.num_streams
    await asyncio.gather(*(_ask_once(load, _short(n), ends) for n in range(number)))
    strange = set(ends) - {"answered", "429", "503"}
    assert not strange, ends
    return f"{number} requests, {ends['429'] + ends['503']} refused"


async def _ask_once(load: Load, index: int, ends: Counter[str]) -> None:
    try:
        await load.ask_right(index)
    except Refused as refused:
        word = str(refused.status) if refused.may_be_asked_again else str(refused)
        ends[word] += 1
    except Cut as cut:
        ends[repr(cut)] += 1
    else:
        ends["answered"] += 1
