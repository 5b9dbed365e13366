"""Answers to many prompts from Python: `generate(["Once upon a time"], max_tokens=32)`."""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import msgspec

from deepmesh.async_client import AsyncClient
from deepmesh.client_errors import ClientError, check_response
from deepmesh.config import Config, load_config
from deepmesh.supervisor import Mesh

Messages = Sequence[Mapping[str, object]]
Prompt = str | Sequence[int] | Messages  # a raw text, token ids, or a conversation


class Output(msgspec.Struct, frozen=True):
    """The answer to one prompt."""

    text: str
    finish_reason: str
    prompt_tokens: int
    output_tokens: int
    thinking: str = ""  # of a conversation
    others: list[str] = []  # texts of further choices, where `n` is above 1


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    finish_reason: str | None = None
    text: str = ""
    message: _Message = msgspec.field(default_factory=_Message)

    @property
    def answer(self) -> str:
        """Of either endpoint."""
        return self.text or self.message.content or ""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Body(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage


class Engine:
    """A mesh of its own for as long as it is open, or one that runs already.

    with Engine() as engine:
        for output in engine.generate(prompts, max_tokens=64):
            print(output.text)
    """

    def __init__(
        self,
        config: Config | Path | None = None,
        *,
        url: str = "",
        api_key: str = "",
        concurrency: int = 64,
    ) -> None:
        """Nothing starts yet.

        Args:
            config: of the mesh to start: a Config, the path of a mesh.toml, or None for the
                model that ships.
            url: of a gateway that runs already; nothing is started then.
            concurrency: requests open at once.
        """
        self.url = url  # of the gateway, once it is open
        self._config, self._api_key = config, api_key
        self._concurrency = concurrency
        self._mesh: Mesh | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def open(self) -> None:
        """Start the mesh and wait until it can serve."""
        if self.url:
            return
        self._folder = tempfile.TemporaryDirectory(prefix="dm")  # paths of sockets are short
        mesh = Mesh(_private(self._config, self._folder.name))
        try:
            self._mesh = mesh.__enter__()
        except BaseException:
            self._folder.cleanup()
            raise
        self.url = mesh.url

    def close(self) -> None:
        """Stop what was started."""
        if self._mesh is not None:
            self._mesh.stop()
            self._mesh, self.url = None, ""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def generate(self, prompts: Sequence[Prompt], **fields: object) -> list[Output]:
        """One output for each prompt, in order; `fields` are those of the API.

        Raises:
            ClientError: a request was refused, or the mesh cannot be reached.
        """
        return asyncio.run(self.agenerate(prompts, **fields))

    async def agenerate(self, prompts: Sequence[Prompt], **fields: object) -> list[Output]:
        """`generate` for asyncio."""
        if isinstance(prompts, str):
            raise TypeError("prompts: a list of prompts, not a single string")
        room = asyncio.Semaphore(self._concurrency)
        async with AsyncClient(
            self.url, api_key=self._api_key, concurrency=self._concurrency
        ) as client:
            model = fields.pop("model", None) or await client.first_model()

            async def one(prompt: Prompt) -> Output:
                path, body = _request(prompt, {"model": model, **fields})
                async with room:
                    response = await client.post(path, msgspec.json.encode(body))
                check_response(response)
                return _output(response.content)

            tasks = [asyncio.ensure_future(one(prompt)) for prompt in prompts]
            try:
                return list(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.open)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)


def generate(
    prompts: Sequence[Prompt],
    *,
    config: Config | Path | None = None,
    url: str = "",
    api_key: str = "",
    **fields: object,
) -> list[Output]:
    """Start a mesh, answer all prompts, stop it; with `url`, ask the one that runs there.

    Args:
        prompts: texts or lists of token ids, completed as they are; or lists of messages.
        fields: of the API: max_tokens, temperature, seed, n, thinking, …
    Raises:
        ClientError: a request was refused, or the mesh cannot be reached.
    """
    with Engine(config, url=url, api_key=api_key) as engine:
        return engine.generate(prompts, **fields)


async def agenerate(
    prompts: Sequence[Prompt],
    *,
    config: Config | Path | None = None,
    url: str = "",
    api_key: str = "",
    **fields: object,
) -> list[Output]:
    """`generate` for asyncio."""
    async with Engine(config, url=url, api_key=api_key) as engine:
        return await engine.agenerate(prompts, **fields)


def _private(config: Config | Path | None, folder: str) -> Config:
    """The same mesh in a run folder and at a port of its own: another one may run beside it."""
    if not isinstance(config, Config):
        config = load_config(config)
    mesh = msgspec.structs.replace(config.mesh, run_dir=f"{folder}/run")
    gateway = msgspec.structs.replace(config.gateway, port=0)
    return msgspec.structs.replace(config, mesh=mesh, gateway=gateway)


def _request(prompt: Prompt, fields: dict[str, object]) -> tuple[str, dict[str, object]]:
    if isinstance(prompt, str) or not prompt or not isinstance(prompt[0], Mapping):
        return "/v1/completions", {**fields, "prompt": prompt}
    return "/v1/chat/completions", {**fields, "messages": prompt}


def _output(content: bytes) -> Output:
    try:
        body = msgspec.json.decode(content, type=_Body)
    except msgspec.DecodeError as error:
        raise ClientError(f"not the answer of a mesh: {error}") from error
    if not body.choices:
        raise ClientError("the answer has no choices")
    first, *others = body.choices
    return Output(
        text=first.answer,
        finish_reason=first.finish_reason or "",
        prompt_tokens=body.usage.prompt_tokens,
        output_tokens=body.usage.completion_tokens,
        thinking=first.message.reasoning_content or "",
        others=[choice.answer for choice in others],
    )
