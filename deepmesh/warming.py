"""Prompts of a file, each computed once, so that their prefixes are in the caches."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from deepmesh.async_client import AsyncClient
from deepmesh.errors import UserError

_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}
_LENGTHS = {"/v1/responses": "max_output_tokens"}
Json = dict[str, object]


class WarmError(UserError):
    """The file, or a line of it, cannot be used."""


class Prompt(msgspec.Struct, frozen=True):
    """A request without its answer."""

    path: str
    body: Json


class Warmed(msgspec.Struct):
    """How far it is."""

    prompts: int = 0
    done: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of these, those that were there
    error: str = ""  # the first one


class _Details(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    input_tokens: int = 0
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    usage: _Usage | None = None


def read_prompts(path: Path) -> list[Prompt]:
    """One a line: a JSON string, a request with `messages`, `prompt` or `input`, or a batch line.

    Raises:
        WarmError: which line is wrong.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise WarmError(f"{path}: {error.strerror}") from error
    return [_prompt(raw, f"{path}:{number}") for number, raw in enumerate(lines, 1) if raw.strip()]


async def warm(
    prompts: list[Prompt],
    client: AsyncClient,
    *,
    concurrency: int,
    on_progress: Callable[[Warmed], None],
) -> Warmed:
    """Ask each with one token of output; nothing of the answers is kept."""
    model = await client.first_model()
    totals = Warmed(len(prompts))
    left = iter(prompts)
    workers = [_work(left, client, model, totals, on_progress) for _ in range(concurrency)]
    await asyncio.gather(*workers)
    return totals


async def _work(
    left: Iterator[Prompt],
    client: AsyncClient,
    model: str,
    totals: Warmed,
    on_progress: Callable[[Warmed], None],
) -> None:
    for prompt in left:
        length = _LENGTHS.get(prompt.path, "max_tokens")
        body = {"model": model, **prompt.body, length: 1, "stream": False}
        if prompt.path == "/v1/responses":
            body["store"] = False
        for unwanted in ("n", "background", "stream_options", "max_completion_tokens"):
            body.pop(unwanted, None)
        response = await client.post(prompt.path, msgspec.json.encode(body))
        if response.status_code == 200:
            _count(totals, msgspec.json.decode(response.content, type=_Answer))
        else:
            totals.failed += 1
            totals.error = totals.error or f"{response.status_code}: {response.text[:300]}"
        totals.done += 1
        on_progress(totals)


def _count(totals: Warmed, answer: _Answer) -> None:
    usage = answer.usage or _Usage()
    details = usage.prompt_tokens_details or usage.input_tokens_details or _Details()
    totals.prompt_tokens += usage.prompt_tokens + usage.input_tokens
    totals.cached_tokens += details.cached_tokens


def _prompt(raw: bytes, where: str) -> Prompt:
    try:
        found: str | Json = msgspec.json.decode(raw, type=str | Json)
    except msgspec.DecodeError as error:
        raise WarmError(f"{where}: {error}") from error
    if isinstance(found, str):
        return Prompt(_PATHS["prompt"], {"prompt": found})
    path = found.get("url")
    if isinstance(path, str):
        try:
            return Prompt(path, msgspec.convert(found.get("body"), Json))
        except msgspec.ValidationError as error:
            raise WarmError(f"{where}: body: {error}") from error
    for field, path in _PATHS.items():
        if field in found:
            return Prompt(path, found)
    raise WarmError(f"{where}: neither a string nor an object with messages, prompt or input")
