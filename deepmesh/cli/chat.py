"""`deepmesh chat`: one question, or a conversation."""

from typing import TYPE_CHECKING, Annotated

import typer

from deepmesh.cli.options import ApiKeyOption, ConfigOption, UrlOption

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.console import Console

    from deepmesh.client import ChatEvent, Client, Json


def chat(
    text: Annotated[
        str, typer.Argument(help="What to say; without it, a conversation.", show_default=False)
    ] = "",
    config: ConfigOption = None,
    url: UrlOption = "",
    api_key: ApiKeyOption = "",
    model: Annotated[
        str, typer.Option(help="Model name; without it, the first.", show_default=False)
    ] = "",
    system: Annotated[str, typer.Option(help="System message.", show_default=False)] = "",
    stream: Annotated[bool, typer.Option(help="Print tokens as they come.")] = True,
    thinking: Annotated[
        bool | None, typer.Option(help="Think first; without it, the server's default.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option(min=0)] = None,
) -> None:
    """Ask a running mesh; thinking is shown dim.

    Into a pipe or a file goes the answer alone: thinking and notes are on stderr.
    """
    from rich.console import Console

    from deepmesh.cli.options import mesh_url
    from deepmesh.client import Client
    from deepmesh.config import load_config

    console = Console(highlight=False, markup=False, soft_wrap=True)
    notes = console
    if not console.is_terminal:
        notes = Console(highlight=False, markup=False, soft_wrap=True, stderr=True)
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    with Client(mesh_url(url, load_config(config)), api_key=api_key) as client:
        fields: Json = {
            "model": model or first_model(client),
            "thinking": thinking_field(thinking),
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": max_tokens,
            "seed": seed,
        }
        while said := text or _ask(notes):
            messages.append({"role": "user", "content": said})
            ask = client.stream_chat if stream else client.chat
            answer = show(console, notes, ask(messages, fields))
            if text:
                return
            messages.append({"role": "assistant", "content": answer})


def first_model(client: "Client") -> str:
    """The name of the model that answers when the user names none."""
    from deepmesh.client import ClientError

    models = client.models()
    if not models:
        raise ClientError("the mesh serves no model yet; try again in a moment")
    return models[0]


def thinking_field(thinking: bool | None) -> dict[str, str] | None:
    """The `thinking` field of a request."""
    return None if thinking is None else {"type": "enabled" if thinking else "disabled"}


def _ask(console: "Console") -> str:
    try:
        return console.input("you: ").strip()
    except EOFError:
        return ""


def show(console: "Console", notes: "Console", events: "Iterable[ChatEvent]") -> str:
    """Print an answer as it comes, what is not the answer to `notes`; return its text."""
    answer, last = "", ""
    where = console
    try:
        for event in events:
            if event.kind == "finish":
                if event.text != "stop":
                    begin, end = ("\n", "") if notes is console else ("", "\n")
                    notes.print(f"{begin}[{event.text}]", style="dim", end=end)
                continue
            if last == "thinking" and event.kind == "text":
                notes.print("\n")
            where, style = (notes, "dim") if event.kind == "thinking" else (console, None)
            where.print(event.text, end="", style=style)
            last = event.kind
            answer += event.text if event.kind == "text" else ""
    finally:
        where.print()  # an error gets a line of its own
    return answer
