"""docs/configuration.md from deepmesh/config.py."""

from pathlib import Path

from tools.reference.source import Field, code, definitions, table

_INTRO = """# Configuration

`deepmesh up --config mesh.toml` reads one file, and every process of the mesh reads the same one.
Keys that are left out keep their defaults; unknown keys, wrong types and values out of range are
errors that name the key. `deepmesh doctor --config mesh.toml` checks a file. Paths are relative to
it.

An `address` puts another program in the place of a service: `deepmesh up` then starts none, and
the others talk to whatever listens there and speaks `wire.md` (`[gateway]`: the URL of an HTTP
server; `[executor]`: any text, executors dial the scheduler). `{index}` in the address of a
tokenizer, scheduler or kvstore becomes its number, where there are several.
"""


def configuration_page(root: Path) -> str:
    """The whole page."""
    classes = {each.name: each for each in definitions((root / "deepmesh/config.py").read_text())}
    lines = [_INTRO.rstrip()]
    for section in classes["Config"].fields:
        each = classes[section.type]
        doc = each.doc.removeprefix(f"[{section.name}]: ")
        lines += ["", f"## [{section.name}]", "", doc[:1].upper() + doc[1:], ""]
        lines += table(["key", "type", "default", ""], [_row(field) for field in each.fields])
    return "\n".join(lines) + "\n"


def _row(field: Field) -> list[str]:
    kind = field.type
    if kind.startswith("Literal["):
        kind = " | ".join(kind.removeprefix("Literal[").removesuffix("]").split(", "))
    default = field.default.replace("'", '"')
    default = {"True": "true", "False": "false"}.get(default, default)
    if "<<" in default:
        base, shift = default.split(" << ")
        default = str(int(base) << int(shift))
    return [code(field.name), code(kind.replace("'", '"')), code(default), field.note]
