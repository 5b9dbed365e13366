"""Token rows of the scheduler -> events of a request's text state."""

import time
from collections.abc import Callable

import numpy as np

from deepmesh.wire.messages import TokenRow
from services.tokenizer.panics import panics_as_errors
from services.tokenizer.request import Request
from services.tokenizer.text_stream import Token


def row_tokens(row: TokenRow, skip: int) -> list[Token]:
    """The tokens of a row but its first `skip`, with logprobs where they were asked for."""
    if len(row.ids) == 4 and not row.logprobs and not skip:  # a step's one token of most streams
        return [Token(int.from_bytes(row.ids, "little", signed=True))]
    ids: list[int] = np.frombuffer(row.ids, "<i4")[skip:].tolist()
    if not row.logprobs:
        return [Token(token) for token in ids]
    logprobs: list[float] = np.frombuffer(row.logprobs, "<f4")[skip:].tolist()
    if not row.top_ids:
        return [Token(*pair) for pair in zip(ids, logprobs, strict=True)]
    rows = len(ids) + skip
    top_ids: list[list[int]] = np.frombuffer(row.top_ids, "<i4").reshape(rows, -1)[skip:].tolist()
    top: list[list[float]] = (
        np.frombuffer(row.top_logprobs, "<f4").reshape(rows, -1)[skip:].tolist()
    )
    best = [list(zip(i, p, strict=True)) for i, p in zip(top_ids, top, strict=True)]
    return [Token(*parts) for parts in zip(ids, logprobs, best, strict=True)]


def feed(
    request: Request, row: TokenRow, stopwatch: Callable[[], int] = time.perf_counter_ns
) -> list[bytes]:
    """Push the row's new tokens one by one; stops behind the token that completes a stop string.

    The row must begin at or below the request's position.
    """
    generation = request.generation
    assert generation is not None
    began = stopwatch()
    events: list[bytes] = []
    with panics_as_errors():
        if not request.has_started:
            request.has_started = True
            request.cached_tokens = max(request.cached_tokens, row.cached_tokens)
            if row.prompt is not None:
                generation.text.take_prompt(row.prompt)
            generation.text.fingerprint = row.fingerprint
            events += generation.text.start(request.cached_tokens)
        for token in row_tokens(row, request.position - row.pos):
            events += generation.text.push(token)
            request.position += 1
            request.output += token.id.to_bytes(4, "little", signed=True)
            if generation.text.stopped:
                break
    request.busy_ns += stopwatch() - began
    return events
