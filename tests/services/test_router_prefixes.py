"""What the router remembers of prefixes: as much as it may, nothing that is known to be gone."""

from deepmesh.prefix_hash import HASH_BYTES
from services.router.prefixes import MAX_LINKS, PrefixSketch, split
from tests.services.router_rig import GRID, generate, points, words

PROMPT = words(1000, 3)


def test_points_lie_on_the_grid_below_the_last_token() -> None:
    assert len(GRID.chain(generate(1, PROMPT))) == 7
    assert len(GRID.chain(generate(1, PROMPT[:512]))) == 3  # a hit never covers the last token
    assert len(GRID.chain(generate(1, PROMPT[:513]))) == 4
    assert GRID.chain(generate(1, PROMPT)) != GRID.chain(generate(1, PROMPT, salt=b"x"))
    assert GRID.chain(generate(1, [])) == []


def test_the_last_point_counts_whatever_lies_below() -> None:
    sketch, chain = PrefixSketch(), GRID.chain(generate(1, PROMPT))
    sketch.tell("a", split(points(PROMPT, 256, 640)), [], first=True)
    assert sketch.known_links(chain, "a") == 5
    sketch.tell("a", [], split(points(PROMPT, 640)), first=False)
    assert sketch.known_links(chain, "a") == 2
    assert sketch.known_links(chain, "b") == 0


def test_points_and_guesses_are_bounded() -> None:
    sketch = PrefixSketch(max_points=4, max_guessed=10)
    for n in range(3):
        sketch.tell("a", [b"%016d" % (10 * n + i) for i in range(3)], [], first=False)
    assert sketch.num_points("a") == 4
    chains = [GRID.chain(generate(n, 1000)) for n in range(3)]  # 7 links each
    for chain in chains:
        sketch.guess(chain, "a")
    assert [sketch.guessed_links(chain, "a") for chain in chains] == [0, 3, 7]
    assert sketch.guessed_links(chains[2], "b") == 0
    long = GRID.chain(generate(9, 100_000))
    roomy = PrefixSketch()
    roomy.guess(long, "a")
    assert roomy.guessed_links(long, "a") == MAX_LINKS


def test_no_more_is_guessed_than_the_replicas_have_room_for() -> None:
    sketch = PrefixSketch(max_guessed=100)
    chains = [GRID.chain(generate(n, 1000)) for n in range(4)]  # 7 links each
    sketch.can_have("a", 10)
    sketch.can_have("b", 1000)
    for chain in chains:
        sketch.guess(chain, "a")
    assert [sketch.guessed_links(chain, "a") for chain in chains] == [7] * 4  # there is b's room
    sketch.can_have("b", 4)
    sketch.guess(chains[3], "b")
    assert [sketch.guessed_links(chain, "a") for chain in chains] == [0, 0, 7, 7]
    alone = PrefixSketch()
    alone.can_have("a", -5)
    alone.guess(chains[0], "a")
    assert alone.guessed_links(chains[0], "a") == 0
    sketch.can_have("a", -1)  # nonsense of a damaged heartbeat
    sketch.guess(chains[2], "a")
    assert sketch.guessed_links(chains[2], "a") == 4


def test_a_guess_ends_with_the_word_that_it_is_gone() -> None:
    sketch, chain = PrefixSketch(), GRID.chain(generate(1, PROMPT))
    sketch.guess(chain, "a")
    sketch.tell("a", [], split(points(PROMPT, 512)), first=False)
    assert sketch.guessed_links(chain, "a") == 3
    sketch.guess(chain, "a")
    sketch.lose("a")
    assert sketch.guessed_links(chain, "a") == 0


def test_hashes_are_split_where_they_were_joined() -> None:
    packed = points(PROMPT, 128, 256, 384)
    assert b"".join(split(packed)) == packed
    assert {len(key) for key in split(packed)} == {HASH_BYTES}
