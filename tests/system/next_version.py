"""Run while an image is built: makes the installed deepmesh the next one, a wire minor version on.

Messages of all kinds of links get a field at their end, as a real next version would have it.
"""

import re
from pathlib import Path

import deepmesh

NEW_FIELD = '    of_the_next_version: str = "not known to the one before"\n'
MESSAGES = ("Heartbeat", "Submit", "Cancel", "Generate", "Abort", "Ack", "DeltaBatch", "TokenBatch")


def main() -> None:
    folder = Path(deepmesh.__file__).parent
    messages = folder / "wire/messages.py"
    text, changed = re.subn(
        r"^PROTOCOL_MINOR = (\d+)",
        lambda found: f"PROTOCOL_MINOR = {int(found[1]) + 1}",
        messages.read_text(),
        flags=re.MULTILINE,
    )
    assert changed == 1
    for name in MESSAGES:
        begin = text.index(f"\nclass {name}(Message")
        end = text.index("\n\n\n", begin) + 1
        text = text[:end] + NEW_FIELD + text[end:]
    messages.write_text(text)
    version = folder / "__init__.py"
    version.write_text(
        re.sub(r'__version__ = "[^"]+"', '__version__ = "0.1.1"', version.read_text())
    )


if __name__ == "__main__":
    main()
