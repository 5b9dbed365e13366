"""docs/wire.md from deepmesh/wire/messages.py and packed.py."""

import ast
from itertools import groupby
from pathlib import Path

import numpy as np

from deepmesh.wire import packed
from tools.reference.source import Definition, code, comments_of, definitions, note_of, table

_RULES = Path(__file__).with_name("wire_rules.md")


def wire_page(root: Path) -> str:
    """The whole page."""
    source = (root / "deepmesh/wire/messages.py").read_text()
    doc = ast.get_docstring(ast.parse(source)) or ""
    lines = ["# Wire", "", doc, "", _RULES.read_text().rstrip(), ""]
    kept = [each for each in definitions(source) if each.name not in ("Struct", "Message")]
    lines += ["## Messages", "", *_legend()]
    for section, group in groupby(kept, key=lambda each: each.section):
        lines += ["", f"### {section or 'used everywhere'}"]
        for each in group:
            lines += ["", *_entry(each)]
    lines += ["", "## Packed layouts", "", *_layouts(root)]
    return "\n".join(lines) + "\n"


def _legend() -> list[str]:
    return [
        "A *message* is an array whose element 0 is its name, so its first field is element 1; a",
        "*part* is an array without a name, its first field is element 0. Fields with a default",
        "may be left out at the end of the array. `Ids` are int32, little-endian, packed in `bin`;",
        "`Rid` is 16 bytes; enumerations are integers.",
    ]


def _entry(each: Definition) -> list[str]:
    head = [f"#### {each.name}", "", *([f"{_kind(each)} {each.doc}"])]
    if each.base == "IntEnum":
        rows = [[each.default, code(each.name), each.note] for each in each.fields]
        return [*head, "", *table(["value", "name", ""], rows)]
    if not each.fields:
        return head
    first = 1 if each.base == "Message" else 0
    rows = [
        [str(number), code(f.name), code(f.type), code(f.default), f.note]
        for number, f in enumerate(each.fields, first)
    ]
    return [*head, "", *table(["#", "field", "type", "default", ""], rows)]


def _kind(each: Definition) -> str:
    return {"Message": "*Message.*", "Struct": "*Part.*", "IntEnum": "*Integer.*"}[each.base]


def _layouts(root: Path) -> list[str]:
    source = (root / "deepmesh/wire/packed.py").read_text()
    notes = _tuple_notes(source)
    lines = ["Rows of the fields that say so, without padding, little-endian."]
    for name, value in vars(packed).items():
        if not isinstance(value, np.dtype) or value.names is None:
            continue
        rows = [
            [str(offset), code(key), code(_plain(kind)), notes.get((name, key), "")]
            for key, (kind, offset, *_) in (value.fields or {}).items()
        ]
        lines += ["", f"#### packed.{name}", "", f"{value.itemsize} bytes a row.", ""]
        lines += table(["offset", "field", "type", ""], rows)
    return lines


def _plain(kind: "np.dtype[np.generic]") -> str:
    return f"{'u' if kind.kind == 'u' else ''}int{kind.itemsize * 8}"


def _tuple_notes(source: str) -> dict[tuple[str, str], str]:
    """Comments beside the ("field", "type") pairs of a layout."""
    comments, notes = comments_of(source), dict[tuple[str, str], str]()
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(
                targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List(elts=rows)])
            ):
                for row in rows:
                    if isinstance(row, ast.Tuple) and isinstance(row.elts[0], ast.Constant):
                        note = note_of(comments, ast.copy_location(ast.Expr(row), row))
                        notes[name, str(row.elts[0].value)] = note
            case _:
                pass
    return notes
