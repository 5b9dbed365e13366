"""Streaming HTTP clients in a process of their own.

`python -m bench.rig.clients --url URL --streams 32 --seconds 3`: each stream asks for one chat
after the other. Prints a `Tally` as JSON.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from urllib.parse import urlsplit

import msgspec
import uvloop

CHAT = "40:119"  # tokens


class Tally(msgspec.Struct):
    """What came back."""

    chats: int = 0
    events: int = 0
    errors: list[str] = []
    cpu_ms: float = 0.0  # of this process


async def chat(host: str, port: int, max_tokens: int, tally: Tally) -> None:
    """One streamed chat over a connection of its own; plain sockets cost the least CPU."""
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Count on."}],
            "max_tokens": max_tokens,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(head.encode() + body)
        status = await reader.readline()
        if b" 200 " not in status:
            tally.errors.append(status.decode().strip())
            return
        while line := await reader.readline():
            tally.events += line.startswith(b"data: ")
            if line.startswith(b"data: [DONE]"):
                tally.chats += 1
                return
        tally.errors.append("the stream broke off")
    finally:
        writer.close()


async def stream(
    number: int, host: str, port: int, until: float, tokens: tuple[int, int], tally: Tally
) -> None:
    """Chats one after the other until the time is over; the last one is read to its end."""
    draw = random.Random(number)
    while time.monotonic() < until and not tally.errors:
        await chat(host, port, draw.randint(*tokens), tally)


def lengths(text: str) -> tuple[int, int]:
    """Least and most: "40:119", or one number for both."""
    least, _, most = text.partition(":")
    return int(least), int(most or least)


async def streams(url: str, count: int, seconds: float, tokens: tuple[int, int]) -> Tally:
    """All of them; lengths of chats are drawn."""
    address, tally = urlsplit(url), Tally()
    until = time.monotonic() + seconds
    host, port = address.hostname or "127.0.0.1", address.port or 80
    await asyncio.gather(*(stream(n, host, port, until, tokens, tally) for n in range(count)))
    return tally


def main() -> int:
    """1 if any chat failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--tokens", type=lengths, default=CHAT, help="of a chat: least:most")
    arguments = parser.parse_args()
    counts = arguments.streams, arguments.seconds, arguments.tokens
    tally = uvloop.run(streams(arguments.url, *counts))
    tally.cpu_ms = 1e3 * time.process_time()
    print(msgspec.json.encode(tally).decode())
    return 1 if tally.errors else 0


if __name__ == "__main__":
    sys.exit(main())
