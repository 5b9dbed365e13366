"""Events of plain text, made without parsing and writing the JSON around it again."""

import re

_TEXT = re.compile(r'"(content|reasoning_content|text|thinking)":"([^"\\]+)"')


class TextTemplate:
    """Most chunks of a stream differ in their text alone: what is around it, in the recipe's JSON
    and in the event made of that, is learned from one that took the long way.

    Only text that JSON writes as it is passes here, so the bytes are those of the long way, which
    must depend on nothing but the chunk.
    """

    def __init__(self) -> None:
        self._head = self._tail = ""  # of the recipe's JSON
        self._before = self._behind = b""  # of the event

    def event(self, chunk: str) -> bytes | None:
        """The event of a chunk; None if it must take the long way."""
        start, end = len(self._head), len(chunk) - len(self._tail)
        if not (start < end and chunk.startswith(self._head) and chunk.endswith(self._tail)):
            return None
        text = chunk[start:end]
        if '"' in text or "\\" in text:
            return None
        return b"%b%b%b" % (self._before, text.encode(), self._behind)

    def learn(self, chunk: str, event: bytes) -> None:
        """This event was made of this chunk."""
        found = _TEXT.findall(chunk)
        if len(found) != 1:
            return
        key, text = found[0]
        quoted = f'"{key}":"{text}"'
        field = quoted.encode()
        if event.count(field) != 1:
            return
        offset = len(key) + 4
        at, place = chunk.index(quoted) + offset, event.index(field) + offset
        self._head, self._tail = chunk[:at], chunk[at + len(text) :]
        self._before, self._behind = event[:place], event[place + len(text.encode()) :]
