"""What came of each request, bit for bit, and how two runs differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from deepmesh.wire.messages import Failed, Finished, TokenRow


@dataclass
class Output:
    """Tokens of one request, and the bits of their log-probabilities."""

    ids: bytearray = field(default_factory=bytearray)
    logprobs: bytearray = field(default_factory=bytearray)
    top: bytearray = field(default_factory=bytearray)
    prompt: tuple[bytes, bytes, bytes, bytes] = (b"", b"", b"", b"")
    end: Finished | Failed | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.ids) // 4

    def take(self, row: TokenRow) -> None:
        """New tokens, or a repetition of known ones, which must be equal."""
        start = 4 * row.pos
        assert start <= len(self.ids), "a gap in the tokens"
        known = len(self.ids) - start
        assert row.ids[:known] == bytes(self.ids[start : start + len(row.ids)]), "tokens changed"
        if len(row.ids) <= known:
            return
        if row.prompt is not None:
            told = row.prompt
            self.prompt = (told.logprobs, told.top_ids, told.top_logprobs, told.ranks)
        self.ids += row.ids[known:]
        self.logprobs += row.logprobs[known:]
        wide = len(row.top_ids) // max(1, len(row.ids) // 4)  # bytes of one token's best ids
        skip = known // 4 * wide
        for ids, values in zip(
            _pieces(row.top_ids[skip:], wide), _pieces(row.top_logprobs[skip:], wide), strict=True
        ):
            self.top += ids + values


def _pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)] if size else []


@dataclass
class Tally:
    """Comparisons of one group."""

    group: str
    comparisons: int = 0
    tokens: int = 0
    id_mismatches: int = 0
    logprob_bit_mismatches: int = 0
    first: str = ""  # the first mismatch, in words

    @property
    def is_clean(self) -> bool:
        """Something was compared, and all of it was equal."""
        return self.comparisons > 0 and not self.id_mismatches and not self.logprob_bit_mismatches

    def compare(
        self, kinds: Sequence[str], found: Mapping[int, Output], wanted: Mapping[int, Output]
    ) -> None:
        """Each request against the same one run alone."""
        for index, output in sorted(found.items()):
            number = index % len(wanted)  # of the job
            other = wanted[number]
            self.comparisons += 1
            self.tokens += min(output.num_tokens, other.num_tokens)
            same_ids = output.ids == other.ids and type(output.end) is type(other.end)
            same_bits = (output.logprobs, output.top, output.prompt) == (
                other.logprobs,
                other.top,
                other.prompt,
            )
            self.id_mismatches += not same_ids
            self.logprob_bit_mismatches += not same_bits
            if not self.first and not (same_ids and same_bits):
                what = "logprob bits" if same_ids else "ids"
                if isinstance(output.end, Failed):
                    what = f"{output.end.code.name} ({output.end.detail}),"
                self.first = f"request {index} ({kinds[number]}): {what} {_where(output, other)}"


def _where(found: Output, wanted: Output) -> str:
    if found.prompt != wanted.prompt:
        return "of the prompt"
    pairs = ((found.ids, wanted.ids, 4), (found.logprobs, wanted.logprobs, 4))
    ends = [at // size for a, b, size in pairs if (at := _first_difference(a, b)) >= 0]
    return f"from output token {min(ends)} on" if ends else "of the best ids"


def _first_difference(a: bytearray, b: bytearray) -> int:
    if a == b:
        return -1
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )
