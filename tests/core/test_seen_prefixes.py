"""What is remembered of prefixes for figures takes no more memory with time."""

import tracemalloc

from services.router.prefixes import PrefixSketch
from services.scheduler.core.cache_counts import SeenPrefixes


def keys(count: int, first: int = 0) -> list[bytes]:
    """Hashes; their first bytes differ."""
    return [
        ((first + n) * 0x9E3779B97F4A7C15 % (1 << 128)).to_bytes(16, "little") for n in range(count)
    ]


def test_known_ones_are_counted_up_to_the_first_unknown() -> None:
    seen, chain = SeenPrefixes(), keys(6)
    assert seen.count(chain) == 0
    seen.add(chain[:3])
    seen.add([chain[4]])
    assert seen.count(chain) == 3
    seen.add([bytes(16)])
    assert seen.count([bytes(16), *chain]) == 4


def test_the_latest_are_remembered_and_the_oldest_forgotten() -> None:
    seen = SeenPrefixes(places=1 << 10)
    old, new = keys(400), keys(400, first=1000)
    seen.add(old)
    assert sum(seen.count([key]) for key in old) > 380
    seen.add(keys(4000, first=5000))
    seen.add(new)
    assert sum(seen.count([key]) for key in new) > 380
    assert sum(seen.count([key]) for key in old) < 40


def test_nothing_grows_with_the_number_of_prefixes() -> None:
    seen, sketch = SeenPrefixes(), PrefixSketch(max_points=100, max_guessed=100)
    many = keys(20_000)
    tracemalloc.start()
    try:
        for at in range(0, len(many), 4):
            seen.add(many[at : at + 4])
            sketch.guess(many[at : at + 4], "scheduler-0")
            sketch.tell("scheduler-0", many[at + 1 : at + 2], many[at : at + 4], first=False)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 100_000
