"""Log-probabilities of a prompt: collected chunk by chunk, sent with the first output token."""

from dataclasses import dataclass, field

from deepmesh.wire.messages import PromptLogprobs


@dataclass(slots=True, eq=False)
class PromptProbs:
    """What is known so far of one request that asked."""

    prompt_len: int
    num_top: int
    logprobs: bytearray = field(default_factory=bytearray)
    top_ids: bytearray = field(default_factory=bytearray)
    top_logprobs: bytearray = field(default_factory=bytearray)
    ranks: bytearray = field(default_factory=bytearray)

    @property
    def is_complete(self) -> bool:
        """All ids but the first have theirs."""
        return len(self.logprobs) == 4 * (self.prompt_len - 1)

    def add(self, part: PromptLogprobs) -> bool:
        """Take a part, or what of it is new; False if it does not fit."""
        num, wide = len(part.logprobs) // 4, 4 * self.num_top
        known = len(self.logprobs) // 4 - (part.first - 1)  # computed before, in another epoch
        sizes = (len(part.logprobs), len(part.top_ids), len(part.top_logprobs))
        if sizes != (4 * num, num * wide, num * wide) or part.first < 1 or known < 0:
            return False
        if len(part.ranks) not in (0, 4 * num):
            return False
        if part.first + num > self.prompt_len:
            return False
        self.logprobs += part.logprobs[4 * known :]
        self.top_ids += part.top_ids[wide * known :]
        self.top_logprobs += part.top_logprobs[wide * known :]
        self.ranks += part.ranks[4 * known :]
        return True

    def whole(self) -> PromptLogprobs:
        """All of it, for the tokenizer."""
        return PromptLogprobs(
            1,
            bytes(self.logprobs),
            bytes(self.top_ids),
            bytes(self.top_logprobs),
            ranks=bytes(self.ranks) if len(self.ranks) == len(self.logprobs) else b"",
        )
