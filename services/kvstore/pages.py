"""Free pages of a file as runs that grow together again: any request fits if enough are free."""


class PagePool:
    """Hands out runs of pages; a request may get several, so nothing is lost to fragments."""

    def __init__(self) -> None:
        self.num_free = 0
        self._length_from: dict[int, int] = {}  # first page of a run -> pages
        self._start_of: dict[int, int] = {}  # page behind a run -> its first page

    def give(self, start: int, count: int) -> None:
        """These pages are free (again)."""
        assert count > 0
        assert start not in self._length_from
        self.num_free += count
        if (before := self._start_of.pop(start, None)) is not None:
            count += self._length_from.pop(before)
            start = before
        if (behind := self._length_from.pop(start + count, None)) is not None:
            del self._start_of[start + count + behind]
            count += behind
        self._length_from[start] = count
        self._start_of[start + count] = start

    def take(self, count: int) -> list[tuple[int, int]] | None:
        """Runs of (first page, pages) that add up to `count`; None when too few are free."""
        if count > self.num_free:
            return None
        runs: list[tuple[int, int]] = []
        while count:
            start, length = self._length_from.popitem()
            del self._start_of[start + length]
            if length > count:
                self._length_from[start + count] = length - count
                self._start_of[start + length] = start + count
                length = count
            runs.append((start, length))
            self.num_free -= length
            count -= length
        return runs
