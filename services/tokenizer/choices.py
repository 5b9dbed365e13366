"""Several choices of one request: each is generated on its own, their events form one stream.

The order of events must not depend on which tokens arrive first, or a restarted stream could not
go on where the old one ended. So choices take turns: the first token of each, the second of each.
"""

import hashlib
from collections import deque
from typing import Any

import msgspec

from deepmesh.seeds import derived_seed
from deepmesh.wire.messages import FinishReason, PromptLogprobs, Rid
from services.tokenizer.completions import CompletionStream
from services.tokenizer.events import RecipeStream
from services.tokenizer.reading import Json, is_object
from services.tokenizer.text_stream import Token

Choice = RecipeStream | CompletionStream


def part_rid(rid: Rid, index: int, stage: int = 0) -> Rid:
    """What engines call choice `index` of a request; the same after a restart.

    `stage`: 1 when it goes on behind thinking that was cut.
    """
    return hashlib.blake2b(rid, digest_size=16, salt=f"{stage}.{index}".encode()).digest()


class Lane:
    """One choice as a `TextStream`: its events wait here for their turn."""

    def __init__(self, text: Choice) -> None:
        self.stopped = False
        self.text = text
        self.rounds: deque[list[bytes]] = deque()  # events of the start, of each token, of the end
        self.has_begun = False
        self.is_over = False

    @property
    def fingerprint(self) -> str:
        """Of the engine."""
        return self.text.fingerprint

    @fingerprint.setter
    def fingerprint(self, fingerprint: str) -> None:
        self.text.fingerprint = fingerprint

    def take_prompt(self, found: PromptLogprobs) -> None:
        self.text.take_prompt(found)

    def start(self, cached_tokens: int) -> list[bytes]:
        self.has_begun = True
        self.rounds.append(self.text.start(cached_tokens))
        return []

    def push(self, token: Token) -> list[bytes]:
        self.rounds.append(self.text.push(token))
        self.stopped = self.text.stopped
        return []

    def finish(self, reason: FinishReason) -> list[bytes]:
        self.rounds.append(self.text.finish(reason))
        self.is_over = True
        return []

    def body(self) -> bytes:
        return b""


class Merge:
    """The answer made of all choices, as the `TextStream` of the whole request."""

    def __init__(
        self, lanes: list[Lane], num_per_prompt: int, *, stream: bool, usage: bool
    ) -> None:
        """`usage`: the stream ends in a chunk with usage and no choices."""
        self.stopped = False
        self.fingerprint = ""  # the lanes know it
        self.lanes = lanes
        self._num_per_prompt = num_per_prompt
        self._stream = stream
        self._usage = usage
        self._turn = 0

    def take(self) -> list[bytes]:
        """Events whose turn has come. None before every choice has begun: until then the request
        can still be refused with an honest status."""
        events: list[bytes] = []
        if not all(lane.has_begun for lane in self.lanes):
            return events
        waited = 0  # choices in a row that are over
        while waited < len(self.lanes):
            lane = self.lanes[self._turn]
            if lane.rounds:
                events += lane.rounds.popleft()
                waited = 0
            elif lane.is_over:
                waited += 1
            else:
                break
            self._turn = (self._turn + 1) % len(self.lanes)
        return events

    def take_prompt(self, found: PromptLogprobs) -> None:
        raise AssertionError("prompts belong to choices")

    def start(self, cached_tokens: int) -> list[bytes]:
        return []

    def push(self, token: Token) -> list[bytes]:
        raise AssertionError("tokens belong to choices")

    def finish(self, reason: FinishReason) -> list[bytes]:
        events = self.take()
        if not self._stream or len(self.lanes) == 1:
            return events
        if self._usage:
            head = self.lanes[0].text.head
            chunk: Json = {**head, "choices": [], "usage": self.usage()}
            events.append(b"data: %b\n\n" % msgspec.json.encode(chunk))
        return [*events, b"data: [DONE]\n\n"]

    def body(self) -> bytes:
        if len(self.lanes) == 1:
            return self.lanes[0].text.body()
        bodies: list[Json] = [msgspec.json.decode(lane.text.body()) for lane in self.lanes]
        choices: list[Json] = [body["choices"][0] for body in bodies]
        for index, choice in enumerate(choices):  # computed once for each prompt
            first = choices[index - index % self._num_per_prompt]
            if "prompt_logprobs" in first:
                choice["prompt_logprobs"] = first["prompt_logprobs"]
        return msgspec.json.encode({**bodies[0], "choices": choices, "usage": self.usage()})

    def usage(self) -> Json:
        """Each prompt counts once, however many choices it has."""
        total: Json = {}
        for index, lane in enumerate(self.lanes):
            is_first = index % self._num_per_prompt == 0
            for key, value in lane.text.usage.items():
                if key == "seed":  # the request's, and those that its choices draw with
                    total.setdefault(key, value)
                    choice = index % self._num_per_prompt
                    total.setdefault("seeds", []).append(derived_seed(value, choice))
                elif is_first or not key.startswith("prompt_"):
                    total[key] = _sum(total.get(key), value)
        total["total_tokens"] = total["prompt_tokens"] + total["completion_tokens"]
        return total


def _sum(total: Any, value: Any) -> Any:  # noqa: ANN401  numbers, or objects of numbers
    if total is None:
        return value
    if is_object(value):
        return {key: _sum(total.get(key), inner) for key, inner in value.items()}
    return total if value is None else total + value
