"""Requests of a simulated workload, and what the tokenizer's side saw of them."""

from dataclasses import dataclass, field

from deepmesh.wire.messages import Failed, Finished, Generate, TokenRow
from deepmesh.wire.packed import pack_ids, unpack_ids

from .grammar import SimGrammar
from .oracle import expected_output


@dataclass(slots=True)
class SimRequest:
    """A request of the workload and what became of it."""

    rid: bytes
    prompt: list[int]
    max_tokens: int
    arrival_ns: int = 0
    seed: int = 0
    min_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    priority: int = 0
    salt: bytes = b""
    sub_index: int = 0
    tenant: bytes = b""
    prefill_at: str = ""
    grammar: bool = False
    grammar_len: int = 0  # output tokens at which its grammar is complete; 0: never
    abort_ns: int = 0  # after its arrival; 0: never
    stop_at: int = 0  # a stop string after so many tokens; 0: none
    attempt: int = 1
    is_aborted: bool = False
    output: list[int] = field(default_factory=list[int])
    terminals: list[Finished | Failed] = field(default_factory=list[Finished | Failed])
    cached_tokens: int = 0
    first_token_ns: int = 0
    ended_ns: int = 0
    token_ns: list[int] = field(default_factory=list[int])  # when each output token arrived

    def generate(self, reply_to: str) -> Generate:
        """The message that starts it, or continues it from the tokens known."""
        return Generate(
            rid=self.rid,
            attempt=self.attempt,
            reply_to=reply_to,
            prompt_ids=pack_ids(self.prompt),
            prompt_len=len(self.prompt),
            confirmed_ids=pack_ids(self.output),
            seed=self.seed,
            stop_ids=pack_ids(sorted(self.stop_ids)),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            priority=self.priority,
            salt=self.salt,
            sub_index=self.sub_index,
            tenant=self.tenant,
            prefill_at=self.prefill_at,
            grammar=rules.message() if (rules := self.rules) else None,
        )

    @property
    def rules(self) -> SimGrammar | None:
        """Its grammar."""
        return SimGrammar(self.seed, self.grammar_len) if self.grammar else None

    def take(self, row: TokenRow, now: int) -> None:
        """Tokens by absolute position: repeats must agree, gaps must not happen."""
        ids = unpack_ids(row.ids).tolist()
        assert row.pos <= len(self.output), f"{self.rid!r} has a gap at {row.pos}"
        known = self.output[row.pos : row.pos + len(ids)]
        assert not self.terminals or len(known) == len(ids), f"{self.rid!r} goes on after its end"
        assert ids[: len(known)] == known, f"{self.rid!r} got other tokens again"
        if row.pos == 0 and not self.output:
            self.first_token_ns = now
            self.cached_tokens = row.cached_tokens
        self.output[row.pos : row.pos + len(ids)] = ids
        self.token_ns += [now] * (len(self.output) - len(self.token_ns))

    def end(self, terminal: Finished | Failed) -> None:
        """The terminal message; the same one again is a repeat after a lost link."""
        if terminal not in self.terminals:
            self.terminals.append(terminal)

    def expected(self, vocab_size: int) -> tuple[list[int], str]:
        """What the oracle says it must bring, and why it ends."""
        return expected_output(
            self.prompt,
            seed=self.seed,
            sub_index=self.sub_index,
            vocab_size=vocab_size,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_ids=self.stop_ids,
            grammar=self.rules,
        )

    def is_right(self, vocab_size: int) -> bool:
        """Whether `verify` has nothing to say."""
        try:
            self.verify(vocab_size)
        except AssertionError:
            return False
        return True

    def verify(self, vocab_size: int) -> None:
        """It ended once, with the oracle's tokens as far as it came."""
        assert len(self.terminals) == 1, f"{self.rid!r} ended {self.terminals}"
        terminal = self.terminals[0]
        expected, reason = self.expected(vocab_size)
        got = self.output[: terminal.final_pos]
        assert got == expected[: len(got)], f"{self.rid!r} has wrong tokens"
        assert len(got) == terminal.final_pos, f"{self.rid!r} lacks tokens"
        if isinstance(terminal, Finished) and terminal.reason.name != "ABORT":
            complete = len(got) == len(expected) and terminal.reason.name.lower() == reason
            cut = self.stop_at and len(got) == min(self.stop_at, len(expected))
            assert complete or cut, f"{self.rid!r} ended early: {terminal}"
