"""A simulated mask worker: matchers beside the executor that fill masks while the forward runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepmesh.wire.messages import SlotInit
from deepmesh.wire.packed import unpack_ids

from .grammar import SimGrammar
from .hashing import mix


class Tag(NamedTuple):
    """Whose masks these are. A row takes masks whose tag equals its own, and no others."""

    rid: int
    epoch: int
    position: int  # of the first token that they allow
    n: int  # positions asked for: 1 and the drafts


@dataclass(slots=True)
class Masks:
    """Masks of consecutive positions; fewer than asked for where a draft is illegal."""

    legal: list[NDArray[np.bool_]]
    ready_ns: int


@dataclass(slots=True)
class _Matcher:
    grammar: SimGrammar
    prompt_len: int
    ids: list[int]  # prompt and output that it has accepted
    state: int
    is_dead: bool = False


class MaskWorker:
    """Works on (rid, epoch). What it is asked for is there some time later, or too late."""

    def __init__(
        self,
        vocab_size: int,
        *,
        now: Callable[[], int] = lambda: 0,
        fill_ns: Callable[[], int] = lambda: 0,
        compile_ns: int = 0,
    ) -> None:
        """`compile_ns`: until the first mask of a grammar that was not compiled ahead."""
        self.compiled: set[str] = set()
        self._vocab_size = vocab_size
        self._now, self._fill_ns, self._compile_ns = now, fill_ns, compile_ns
        self._matchers: dict[tuple[int, int], _Matcher] = {}
        self._masks: dict[Tag, Masks] = {}

    def open(self, init: SlotInit) -> None:
        """A request enters a slot: a matcher for its output so far, and its first mask."""
        key = (init.rid, init.epoch)
        if init.grammar is None or key in self._matchers:
            return
        grammar = SimGrammar.read(init.grammar)
        ids = unpack_ids(init.ids).tolist()
        matcher = _Matcher(grammar, init.prompt_len, ids[: init.prompt_len], grammar.root)
        self._matchers[key] = matcher
        late_ns = 0 if init.grammar.text in self.compiled else self._compile_ns
        self.compiled.add(init.grammar.text)
        if self._accept(matcher, ids[init.prompt_len :]):
            self._fill(key, matcher, [], late_ns)

    def close(self, rid: int, epoch: int) -> None:
        """The request has left."""
        self._matchers.pop((rid, epoch), None)
        self._forget(rid, epoch)

    def advance(self, rid: int, epoch: int, tokens: list[int], drafts: list[int]) -> None:
        """Tokens were sampled and the next ones drafted: masks for the positions behind them."""
        matcher = self._matchers[rid, epoch]
        self._forget(rid, epoch)
        if self._accept(matcher, tokens):
            self._fill((rid, epoch), matcher, drafts)

    def find(self, tag: Tag) -> list[NDArray[np.bool_]] | None:
        """The masks of a row, if they are there by now."""
        masks = self._masks.get(tag)
        return masks.legal if masks is not None and masks.ready_ns <= self._now() else None

    def is_dead(self, rid: int, epoch: int) -> bool:
        """The matcher refused a token, or died: nothing more comes from it."""
        return self._matchers[rid, epoch].is_dead

    def is_complete(self, rid: int, epoch: int, num_tokens: int) -> bool:
        """Whether nothing may follow behind so many output tokens."""
        return self._matchers[rid, epoch].grammar.is_complete(num_tokens)

    def kill_matcher(self, at: int) -> None:
        """A fault: one matcher dies."""
        if self._matchers:
            keys = sorted(self._matchers)
            self._matchers[keys[at % len(keys)]].is_dead = True

    def restart(self, back_after_ns: int) -> None:
        """A fault: the worker dies; the next one has every matcher again, and fills anew."""
        self._masks = {
            tag: Masks(masks.legal, max(masks.ready_ns, self._now() + back_after_ns))
            for tag, masks in self._masks.items()
        }

    def reset(self) -> None:
        """Forget all requests."""
        self._matchers.clear()
        self._masks.clear()

    def _accept(self, matcher: _Matcher, tokens: list[int]) -> bool:
        for token in tokens:
            count = len(matcher.ids) - matcher.prompt_len
            complete = matcher.grammar.is_complete(count)
            if complete or not matcher.grammar.legal(matcher.state, self._vocab_size)[token]:
                matcher.is_dead = True
                return False
            matcher.ids.append(token)
            matcher.state = mix(matcher.state, token)
        return True

    def _fill(
        self, key: tuple[int, int], matcher: _Matcher, drafts: list[int], late_ns: int = 0
    ) -> None:
        """Walk the drafts and roll back; an illegal one cuts the rest."""
        state, legal = matcher.state, [matcher.grammar.legal(matcher.state, self._vocab_size)]
        for draft in drafts:
            if not legal[-1][draft]:
                break
            state = mix(state, draft)
            legal.append(matcher.grammar.legal(state, self._vocab_size))
        tag = Tag(*key, len(matcher.ids), 1 + len(drafts))
        self._masks[tag] = Masks(legal, self._now() + late_ns + self._fill_ns())

    def _forget(self, rid: int, epoch: int) -> None:
        for tag in [tag for tag in self._masks if tag[:2] == (rid, epoch)]:
            del self._masks[tag]
