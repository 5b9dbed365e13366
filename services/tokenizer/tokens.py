"""Token rows of the scheduler -> events of a request's text state."""

import time
from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from deepmesh.wire.messages import Rid, TokenBatch, TokenRow
from services.tokenizer.events import RecipeStream
from services.tokenizer.panics import panics_as_errors
from services.tokenizer.request import Request
from services.tokenizer.text_stream import TextStream, Token


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
            request.fingerprint = generation.text.fingerprint = row.fingerprint
            events += generation.text.start(request.cached_tokens)
        skip = request.position - row.pos
        if isinstance(generation.text, RecipeStream) and not row.logprobs:
            ids: list[int] = np.frombuffer(row.ids, "<i4")[skip:].tolist()
            count, more = generation.text.push_ids(ids)
            events += more
            request.position += count
            request.output += row.ids[4 * skip : 4 * (skip + count)]
        else:
            before = request.position
            _push_each(request, generation.text, row_tokens(row, skip), events)
            request.probs.take(row, skip, request.position - before)
    request.busy_ns += stopwatch() - began
    return events


def _push_each(
    request: Request, text: TextStream, tokens: list[Token], events: list[bytes]
) -> None:
    for token in tokens:
        events += text.push(token)
        request.position += 1
        request.output += token.id.to_bytes(4, "little", signed=True)
        if text.stopped:
            return


def joined(batches: Sequence[TokenBatch]) -> list[TokenRow]:
    """All rows of some batches of one scheduler, with those of a request in one where they follow
    each other: under load a request costs once for several steps."""
    if len(batches) == 1:
        return batches[0].rows
    by_rid: dict[Rid, list[TokenRow]] = {}
    for batch in batches:
        for row in batch.rows:
            rows = by_rid.get(row.rid)
            if rows is None:
                by_rid[row.rid] = [row]
            else:
                rows.append(row)
    found: list[TokenRow] = []
    for rows in by_rid.values():
        found += rows if len(rows) == 1 else _runs(rows)
    return found


def _runs(rows: list[TokenRow]) -> list[TokenRow]:
    """Neighbouring rows of one request without logprobs, as one."""
    found: list[TokenRow] = []
    first, ids, end = rows[0], [rows[0].ids], rows[0].pos + len(rows[0].ids) // 4
    for row in rows[1:]:
        if row.pos == end and not (row.logprobs or first.logprobs):
            ids.append(row.ids)
        else:
            found.append(_with_ids(first, ids))
            first, ids = row, [row.ids]
        end = row.pos + len(row.ids) // 4
    found.append(_with_ids(first, ids))
    return found


def _with_ids(row: TokenRow, ids: list[bytes]) -> TokenRow:
    """What comes with token 0 alone is in the first row."""
    return row if len(ids) == 1 else replace(row, ids=b"".join(ids))
