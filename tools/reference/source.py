"""Classes and fields as they stand in a source file, comments included."""

import ast
import io
import tokenize
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Field:
    """One annotated name of a class body, or one member of an enumeration."""

    name: str
    type: str
    default: str
    note: str


@dataclass(frozen=True)
class Definition:
    """A class, or a constant of the module."""

    name: str
    base: str
    doc: str
    section: str  # the last banner comment above it
    fields: list[Field] = field(default_factory=list[Field])


def comments_of(source: str) -> dict[int, str]:
    """Comments by line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokens
        if token.type == tokenize.COMMENT
    }


def note_of(comments: dict[int, str], node: ast.stmt) -> str:
    """The comment beside a statement."""
    lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
    return " ".join(comments[line] for line in lines if line in comments)


def definitions(source: str) -> list[Definition]:
    """Every class of a module, in order."""
    comments = comments_of(source)
    banners = {line: text.strip("- ") for line, text in comments.items() if text.startswith("--")}
    found: list[Definition] = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        above = [line for line in banners if line < node.lineno]
        section = banners[max(above)] if above else ""
        base = ast.unparse(node.bases[0]) if node.bases else ""
        doc = ast.get_docstring(node) or ""
        fields = [each for item in node.body if (each := _field(comments, item)) is not None]
        found.append(Definition(node.name, base, doc, section, fields))
    return found


def _field(comments: dict[int, str], node: ast.stmt) -> Field | None:
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), annotation=kind, value=value):
            default = ast.unparse(value) if value is not None else ""
            return Field(name, ast.unparse(kind), default, note_of(comments, node))
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            return Field(name, "", ast.unparse(value), note_of(comments, node))
        case _:
            return None


def constants(source: str) -> list[Field]:
    """Simple assignments of a module, with their comments."""
    comments = comments_of(source)
    fields = [_field(comments, node) for node in ast.parse(source).body]
    return [each for each in fields if each is not None]


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table; cells are escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return lines


def code(text: str) -> str:
    """In code type, if there is anything."""
    return f"`{text}`" if text else ""
