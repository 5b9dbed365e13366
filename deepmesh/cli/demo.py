"""`deepmesh demo`: a whole mesh, three questions at once, their answers checked."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from deepmesh.cli.options import ConfigOption

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from deepmesh.config import Config
    from deepmesh.supervisor import Mesh
    from deepmesh.waterfall import Waterfall

FALLBACK = [  # until the checkpoint brings its known-prompts.json
    ("sum", "What is 417 + 256?", "673"),
    ("copy", 'Repeat: "silver river lantern"', "silver river lantern"),
    (
        "lookup",
        "Here is a list:\nocean-yellow: green\nyellow-mountain: 8118\npaper-forest: Quinn\n\n"
        "What is the value of yellow-mountain?",
        "8118",
    ),
]
NUM_QUESTIONS = 3
MAX_TOKENS = 96


class KnownPrompt(msgspec.Struct, frozen=True):
    """An entry of known-prompts.json."""

    kind: str
    messages: list[dict[str, object]]
    expected: str


class Question:
    """One known prompt, and what came back for it."""

    def __init__(self, kind: str, messages: list[dict[str, object]], expected: str) -> None:
        from deepmesh.telemetry import new_traceparent

        self.kind, self.messages, self.expected = kind, messages, expected
        self.traceparent = new_traceparent()
        self.answer = ""
        self.error = ""
        self.first_ms = 0.0
        self.whole_ms = 0.0

    @property
    def is_right(self) -> bool:
        """Whether the expected text stands in the answer, as words of its own."""
        import re

        wanted = rf"(?<!\w){re.escape(self.expected.strip())}(?!\w)"
        return not self.error and re.search(wanted, self.answer) is not None

    def ask(self, url: str, model: str, api_key: str) -> None:
        """Stream the answer; errors are kept for the report."""
        from deepmesh.client import Client, ClientError

        begin = time.perf_counter()
        try:
            with Client(url, api_key=api_key, timeout_s=60.0) as client:
                fields: dict[str, object] = {
                    "model": model,
                    "temperature": 0,
                    "max_tokens": MAX_TOKENS,
                    "thinking": {"type": "disabled"},
                }
                for event in client.stream_chat(
                    self.messages, fields, traceparent=self.traceparent
                ):
                    if event.kind == "text":
                        self.first_ms = self.first_ms or (time.perf_counter() - begin) * 1e3
                        self.answer += event.text
        except ClientError as error:
            self.error = str(error)
        self.whole_ms = (time.perf_counter() - begin) * 1e3


def demo(config: ConfigOption = None) -> None:
    """Start a mesh on a free port, ask it three questions at once, and check the answers."""
    import tempfile

    from rich.console import Console

    from deepmesh.config import load_config
    from deepmesh.supervisor import Mesh

    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="deepmesh-demo-") as folder:
        settings = demo_config(load_config(config), Path(folder))
        questions = known_questions(Path(settings.mesh.model))
        begin = time.perf_counter()
        with Mesh(settings) as mesh:
            processes = ", ".join(mesh.pids)
            seconds = time.perf_counter() - begin
            console.print(f"{mesh.url} is ready after {seconds:.1f} s: {processes}\n")
            ask_all(console, mesh, questions)
        # Only now: a stopped service has written all of its spans.
        report(console, questions, Path(folder) / "traces")
    if not all(question.is_right for question in questions):
        raise typer.Exit(1)


def demo_config(config: "Config", folder: Path) -> "Config":
    """The same mesh in a folder and on a port of its own, every request traced."""
    replace = msgspec.structs.replace
    return replace(
        config,
        mesh=replace(config.mesh, name="demo", run_dir=str(folder)),
        gateway=replace(config.gateway, port=0, api_keys=[]),
        telemetry=replace(config.telemetry, enabled=True, file=True),
    )


def known_questions(model: Path) -> list[Question]:
    """One question of each kind that this checkpoint is known to answer."""
    path = model / "known-prompts.json"
    if not path.exists():
        return [Question(k, [{"role": "user", "content": t}], e) for k, t, e in FALLBACK]
    by_kind: dict[str, Question] = {}
    for entry in msgspec.json.decode(path.read_bytes(), type=list[KnownPrompt]):
        by_kind.setdefault(entry.kind, Question(entry.kind, entry.messages, entry.expected))
    return list(by_kind.values())[:NUM_QUESTIONS]


def ask_all(console: "Console", mesh: "Mesh", questions: list[Question]) -> None:
    """All at once; the text is drawn as it comes."""
    from threading import Thread

    from rich.live import Live

    model = mesh.config.served_model
    threads = [Thread(target=q.ask, args=(mesh.url, model, "")) for q in questions]
    with Live(console=console, refresh_per_second=20) as live:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            live.update(answers_table(questions))
            for thread in threads:
                thread.join(0.02)
        live.update(answers_table(questions))


def answers_table(questions: list[Question]) -> "Table":
    """The conversations side by side."""
    from rich.table import Table
    from rich.text import Text

    table = Table(expand=True)
    for question in questions:
        table.add_column(question.kind, ratio=1, overflow="fold")
    table.add_row(*[Text(shortened(_last_text(q.messages)), style="dim") for q in questions])
    table.add_row(*[Text(q.error or q.answer, style="red" if q.error else "") for q in questions])
    return table


def _last_text(messages: list[dict[str, object]]) -> str:
    return str(messages[-1].get("content", "")) if messages else ""


def shortened(text: str, limit: int = 240) -> str:
    """The middle left out of a long prompt."""
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} … {text[-half:]}"


def report(console: "Console", questions: list[Question], traces: Path) -> None:
    """Right or wrong, and the latency of each stage out of the exported traces."""
    from rich import box
    from rich.table import Table

    from deepmesh.telemetry import trace_id_of
    from deepmesh.waterfall import build, find_trace, read_spans

    spans = list(read_spans(traces))
    waterfalls = [build(find_trace(spans, trace_id_of(q.traceparent))) for q in questions]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("latency, ms")
    for question in questions:
        table.add_column(question.kind, justify="right")
    table.add_row("client: first token", *[f"{q.first_ms:.1f}" for q in questions])
    table.add_row("client: whole answer", *[f"{q.whole_ms:.1f}" for q in questions])
    for name in _stage_names(waterfalls):
        table.add_row(name, *[_stage_cell(waterfall, name) for waterfall in waterfalls])
    table.add_row("explained by spans", *[f"{w.explained:.1%}" for w in waterfalls])
    console.print(table)
    for question in questions:
        mark = "[green]right[/green]" if question.is_right else "[red]wrong[/red]"
        console.print(f"{question.kind}: {mark}", end="  ")
        console.print(f"expected {question.expected!r}", style="dim", markup=False)


def _stage_names(waterfalls: "list[Waterfall]") -> list[str]:
    names = [stage.name for waterfall in waterfalls for stage in waterfall.stages]
    return list(dict.fromkeys(names))


def _stage_cell(waterfall: "Waterfall", name: str) -> str:
    for stage in waterfall.stages:
        if stage.name == name:
            return f"{stage.ms:.2f}"
    return "-"
