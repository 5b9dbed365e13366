"""What the tokenizer has made of a request: all that a scheduler needs, and its text state."""

from dataclasses import dataclass

from deepmesh.wire.messages import Grammar, Ids, SamplingParams
from services.tokenizer.events import Stored
from services.tokenizer.text_stream import TextStream


@dataclass(frozen=True)
class Generation:
    """All that a scheduler needs, and the text state that its tokens go through."""

    prompt_ids: Ids
    prompt_len: int
    sampling: SamplingParams
    seed: int
    stop_ids: Ids
    max_tokens: int
    min_tokens: int
    n_logprobs: int
    n_prompt_logprobs: int
    salt: bytes
    stream: bool
    text: TextStream
    field_names: dict[str, str]  # of what a scheduler may find at fault, in the caller's protocol
    sub_index: int = 0  # of the choice; it draws its own random numbers
    stand_back: int = 0  # levels below the priority of its key
    choices: "tuple[Generation, ...]" = ()  # each is generated on its own, `text` merges them
    thinking: "Thinking | None" = None  # what is generated first, when thinking has a budget
    record: "Stored | None" = None  # the response is kept
    model: str = ""  # of a response that is kept
    grammar: Grammar | None = None  # that the output keeps to
    marks: Ids = b""  # as Generate.marks


@dataclass(frozen=True)
class Thinking:
    """The first stage of a choice: it ends with its thinking, or is cut where the budget ends."""

    budget: int  # tokens
    end_id: int  # `</think>`
    stop_ids: Ids
