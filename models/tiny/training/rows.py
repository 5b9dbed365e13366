"""Rows of training tokens: conversations and text packed end to end, made by worker processes."""

import json
import multiprocessing as mp
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from models.tiny.training import lookup, tasks
from models.tiny.training.material import Material
from models.tiny.training.render import BOS, EOS, PAD, SPECIAL_TOKENS, Conversation, Piece

PROMPT_WEIGHT = 2  # of 100; assistant tokens and text weigh 100
FULL_WEIGHT = 100
CHUNK_ROWS = 8


@dataclass(frozen=True)
class Mixture:
    """Which share of the rows is of which kind; the rest is packed conversations."""

    text: float
    random_repeats: float
    recalls: float
    long_lookups: float


@dataclass
class TokenRows:
    """Rows [rows, tokens + 1]: ids, loss weights in hundredths, start of each token's document."""

    ids: np.ndarray
    weights: np.ndarray
    starts: np.ndarray


class Corpus:
    """The tokenizer, the text ids and the material of the generated conversations."""

    def __init__(self, data: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
        with np.load(data / "text.npz") as stored:
            self.train, self.held_out = stored["train"], stored["held_out"]
        stored = json.loads((data / "material.json").read_text())
        self.material = Material(**stored)
        self.bos, self.eos, self.pad = (self._id(token) for token in (BOS, EOS, PAD))

    def _id(self, token: str) -> int:
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None
        return token_id

    def encode(self, pieces: list[Piece]) -> tuple[list[int], list[int]]:
        """Return the ids and loss weights of a rendered conversation."""
        encodings = self.tokenizer.encode_batch(
            [piece.text for piece in pieces], add_special_tokens=False
        )
        ids: list[int] = []
        weights: list[int] = []
        for encoding, piece in zip(encodings, pieces, strict=True):
            ids += encoding.ids
            weights += [FULL_WEIGHT if piece.is_assistant else PROMPT_WEIGHT] * len(encoding.ids)
        return ids, weights


class RowMaker:
    """Fills single rows of `num_tokens` + 1 ids."""

    def __init__(self, corpus: Corpus, num_tokens: int, seed: int) -> None:
        self._corpus, self._size = corpus, num_tokens + 1
        self._rng = random.Random(seed)

    def make(self, mixture: Mixture, longest_lookup: int) -> TokenRows:
        """Return one row, as arrays without the batch axis."""
        size = self._size
        row = TokenRows(
            np.full(size, self._corpus.pad, np.uint16),
            np.zeros(size, np.uint8),
            np.zeros(size, np.uint16),
        )
        kind = self._rng.random()
        if kind < mixture.text:
            return self._text(row)
        kind -= mixture.text
        if kind < mixture.random_repeats:
            return self._pack(row, self._repeats)
        kind -= mixture.random_repeats
        if kind < mixture.recalls:
            return self._pack(row, lambda room: self._recall(min(room, longest_lookup)))
        kind -= mixture.recalls
        opens_long = kind < mixture.long_lookups
        first = True

        def conversation(room: int) -> tuple[list[int], list[int]]:
            nonlocal first
            drawn = self._conversation(min(room, longest_lookup), is_long=opens_long and first)
            first = False
            return self._corpus.encode(drawn.pieces())

        return self._pack(row, conversation)

    def _conversation(self, room: int, is_long: bool) -> Conversation:
        rng, material = self._rng, self._corpus.material
        if is_long:
            longest = max(60, room - 80)
            return lookup.lookup(rng, material, rng.randint(longest // 3, longest))
        return tasks.draw(rng, material, room - 80)

    def _text(self, row: TokenRows) -> TokenRows:
        start = self._rng.randrange(len(self._corpus.train) - self._size)
        row.ids[:] = self._corpus.train[start : start + self._size]
        row.weights[:] = FULL_WEIGHT
        for place in np.flatnonzero(row.ids == self._corpus.bos):
            row.starts[place:] = place
            row.weights[place] = 0
        return row

    def _pack(
        self, row: TokenRows, draw: Callable[[int], tuple[list[int], list[int]]]
    ) -> TokenRows:
        """Fill a row with documents, each at an even position: no pair of tokens straddles two."""
        place, num_misfits = 0, 0
        while self._size - place > 24 and num_misfits < 4:
            room = self._size - place
            ids, weights = draw(room)
            if len(ids) > room:
                num_misfits += 1
                if room < self._size // 4 and num_misfits < 4:
                    continue
                ids, weights = ids[:room], weights[:room]
            end = place + len(ids)
            row.ids[place:end], row.weights[place:end] = ids, weights
            row.starts[place:] = place
            place = end + end % 2
        if place < self._size:
            row.starts[place:] = place
        return row

    def _repeats(self, room: int) -> tuple[list[int], list[int]]:
        """Return random ids and the same again, with only the second time to be learned."""
        rng = self._rng
        longest = max(4, min(room // 2 - 1, rng.choice((40, 150, 500))))
        length = rng.randint(min(4, longest), longest)
        ids = np.random.randint(
            len(SPECIAL_TOKENS), self._corpus.tokenizer.get_vocab_size(), length
        ).tolist()
        return [self._corpus.bos, *ids, *ids], [0] * (length + 2) + [FULL_WEIGHT] * (length - 1)

    def _recall(self, room: int) -> tuple[list[int], list[int]]:
        """Return a list and the same in another order, with only its values to be learned."""
        rng = self._rng
        line = rng.choice(lookup.ENTRY_FORMATS)
        num_tokens = rng.randint(20, max(40, room // 2 - 20))
        table = lookup.entries(rng, int(num_tokens * lookup.CHARACTERS_PER_TOKEN), line)
        told = "\n".join(line.format(k=k, v=v) for k, v in table.items()) + "\n"
        pieces = [Piece(BOS + told, False)]
        for key in rng.sample(list(table), len(table)):
            head = line.split("{v}")[0].format(k=key)
            pieces.append(Piece(head.rstrip(" "), False))
            tail = line.format(k=key, v=table[key])[len(head.rstrip(" ")) :]
            pieces.append(Piece(tail + "\n", True))
        ids, weights = self._corpus.encode(pieces)
        return ids, [weight if weight == FULL_WEIGHT else 0 for weight in weights]


def stacked(rows: list[TokenRows]) -> TokenRows:
    """Return single rows as one batch."""
    columns = zip(*((row.ids, row.weights, row.starts) for row in rows), strict=True)
    return TokenRows(*(np.stack(column) for column in columns))


def _work(
    queue: "mp.Queue[TokenRows]",
    data: Path,
    num_tokens: int,
    mixture: Mixture,
    longest: "Synchronized[int]",
    seed: int,
) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the workers are the parallelism
    maker = RowMaker(Corpus(data), num_tokens, seed)
    np.random.seed(seed)
    while True:
        queue.put(stacked([maker.make(mixture, longest.value) for _ in range(CHUNK_ROWS)]))


class Loader:
    """Worker processes that keep a queue of rows full. Make it before CUDA starts: it forks."""

    def __init__(
        self, data: Path, num_tokens: int, mixture: Mixture, num_workers: int, seed: int
    ) -> None:
        context = mp.get_context("fork")
        self._queue: mp.Queue[TokenRows] = context.Queue(maxsize=300)
        self.longest_lookup = context.Value("i", num_tokens)
        fixed = (data, num_tokens, mixture, self.longest_lookup)
        self._workers = [
            context.Process(
                target=_work, args=(self._queue, *fixed, seed * 1000 + index), daemon=True
            )
            for index in range(num_workers)
        ]
        for worker in self._workers:
            worker.start()

    def batches(self, num_rows: int) -> Iterator[TokenRows]:
        """Yield batches for ever."""
        assert num_rows % CHUNK_ROWS == 0
        while True:
            chunks = [self._queue.get() for _ in range(num_rows // CHUNK_ROWS)]
            columns = zip(
                *((chunk.ids, chunk.weights, chunk.starts) for chunk in chunks), strict=True
            )
            yield TokenRows(*(np.concatenate(column) for column in columns))

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.terminate()
