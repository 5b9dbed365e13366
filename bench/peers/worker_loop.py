"""The loop of every peer's worker. Runs in the peer's environment: the standard library only."""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

Rows = Sequence[Sequence[int]]
State = TypeVar("State")


class Model(Protocol[State]):
    """What a peer must be able to do; every call returns when the arithmetic is done."""

    def prefill(self, ids: Rows) -> State:
        """State of these rows, with the logits of their last tokens computed."""
        ...

    def step(self, state: State, ids: Sequence[int]) -> State:
        """The state behind one more token of each row, and its greedy choice computed."""
        ...


def serve(load: Callable[[Path, int], Model[State]]) -> None:
    """Answer orders on stdin until it ends; `load` gets the folder and the number of threads."""
    answers = os.fdopen(os.dup(1), "w")  # what libraries print goes to stderr
    os.dup2(2, 1)
    model: Model[State] | None = None
    states: dict[str, State] = {}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            start = time.perf_counter()
            match order["op"]:
                case "load":
                    model = load(Path(order["model"]), order["threads"])
                case "prefill":
                    assert model is not None
                    model.prefill(order["ids"])
                case "begin":
                    assert model is not None
                    states[order["case"]] = model.prefill(order["ids"])
                case "step":
                    assert model is not None
                    states[order["case"]] = model.step(states[order["case"]], order["ids"])
                case "end":
                    states.pop(order["case"], None)
            answer: dict[str, object] = {"seconds": time.perf_counter() - start}
        except Exception as error:  # the one of this loop: the other side reports it
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
