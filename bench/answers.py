"""Whether the trained tiny model answers its held-out tasks on a GPU as it does on the CPU.

`deepmesh bench answers --device cuda --json`. Documents of models/tiny/training, drawn with the
seeds of its evaluation (entries to look up stand amid prose of our own). Every answer is generated
greedily behind its right prompt by the scheduler's core and an executor's engine, many at once; it
counts if it is right token for token. The CPU's engine answers the same questions in the same run,
or has before (--cpu-answers: its bits are the same on every machine).
Beside it: errors of logits, of the fixture in fp32 and of the tiny model in bf16.
"""

import argparse
import hashlib
import json
import random
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tokenizers import Tokenizer

from bench.determinism.engines import kept_engine
from bench.determinism.jobs import Job
from bench.determinism.rig import Rig
from bench.logit_errors import bf16_errors, fixture_error
from bench.tables import show
from deepmesh.config import Config, ExecutorConfig, MeshConfig, SchedulerConfig
from deepmesh.report import Json, publish, report
from deepmesh.wire.messages import Generate, SamplingParams
from deepmesh.wire.packed import pack_ids
from models.tiny.training import structured, tasks
from models.tiny.training.lookup import lookup
from models.tiny.training.material import Material
from models.tiny.training.render import Conversation

TINY = Path(__file__).parents[1] / "models" / "tiny"
IN_FLIGHT = 64
MAX_LEN, STEP_TOKENS = 2048, 1024
NUMERICS = "bf16"
GLOSSES = [("river", "a road that moves"), ("lamp", "a small sun"), ("map", "a folded land")]
MATERIAL = Material(chat=[("Is it late?", "Yes."), ("Who is there?", "A friend.")], glosses=GLOSSES)
PROMPTS = 12  # of which logits are compared
FIXTURE_ERROR = 1e-3
SLACK = 1.05  # noise of the one rounding beside that of the other
POINT = 0.01  # by which the share of right answers may differ
Draw = Callable[[random.Random], Conversation]

DRAWS: dict[str, Draw] = {
    "copy": tasks.copy_short,
    "long_copy": tasks.copy_long,
    "add": lambda rng: tasks.add(rng, held_out=True),
    "tool": structured.call_tool,
    "json": structured.write_json,
    "think": tasks.think,
    **{
        f"lookup_{length}": lambda rng, length=length: lookup(
            rng, MATERIAL, length, num_questions=1
        )
        for length in (200, 500, 1000)
    },
}


@dataclass(frozen=True)
class Question:
    """A prompt, and what has to come behind it."""

    task: str
    prompt: list[int]
    answer: list[int]

    def job(self) -> Job:
        """To be asked greedily."""
        return Job(
            self.task,
            Generate(
                rid=b"",
                attempt=0,
                reply_to="tokenizer-0",
                prompt_ids=pack_ids(self.prompt),
                prompt_len=len(self.prompt),
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                max_tokens=len(self.answer),
            ),
        )


def questions(model: Path, documents: int) -> list[Question]:
    """Every answer of so many documents of each task."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found: list[Question] = []
    for task, draw in DRAWS.items():
        rng = random.Random(f"held out {task}")
        for _ in range(documents):
            ids: list[int] = []
            pieces = draw(rng).pieces()
            encoded = tokenizer.encode_batch([p.text for p in pieces], add_special_tokens=False)
            for piece, encoding in zip(pieces, encoded, strict=True):
                if piece.is_assistant and ids and len(ids) + len(encoding.ids) < MAX_LEN:
                    found.append(Question(task, list(ids), list(encoding.ids)))
                ids += encoding.ids
    return found


def right_answers(
    model: Path, device: Literal["cpu", "cuda"], asked: list[Question]
) -> tuple[list[bool], float]:
    """Which are right, and how long it took."""
    run_dir = Path(tempfile.mkdtemp(prefix="dm-"))  # paths of sockets are short
    config = Config(
        mesh=MeshConfig(run_dir=str(run_dir), model=str(model), log_level="error"),
        scheduler=SchedulerConfig(
            max_rows=IN_FLIGHT,
            step_tokens=STEP_TOKENS,
            chunk_tokens=STEP_TOKENS,
            max_model_len=MAX_LEN,
            hang_s=600.0,
            deadline_s=3600.0,  # however slow the machine is
        ),
        executor=ExecutorConfig(device=device, masks=False),
    )
    engine = kept_engine(config)
    try:
        rig = Rig([engine], config.scheduler, model=str(model), numerics=NUMERICS)
        began = time.monotonic()
        try:
            outputs = rig.run([(i, one.job()) for i, one in enumerate(asked)], IN_FLIGHT)
        finally:
            rig.close()
        took = time.monotonic() - began
    finally:
        engine.end()
        shutil.rmtree(run_dir, ignore_errors=True)
    return [bytes(outputs[i].ids) == pack_ids(one.answer) for i, one in enumerate(asked)], took


def digest(asked: list[Question]) -> str:
    """Of all questions and answers."""
    parts = [str((one.task, one.prompt, one.answer)) for one in asked]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def read(file: Path, asked: list[Question]) -> list[bool]:
    """Which answers were right on the CPU, of another run of the same questions.

    Raises:
        SystemExit: they were others.
    """
    stored = json.loads(file.read_text())
    if stored["questions"] != digest(asked):
        raise SystemExit(f"{file}: answers to other questions")
    return stored["right"]


def shares(asked: list[Question], right: list[bool]) -> dict[str, float]:
    """Of right answers, by task, and over all of them."""
    by_task: dict[str, list[bool]] = defaultdict(list)
    for one, is_right in zip(asked, right, strict=True):
        by_task[one.task].append(is_right)
    by_task["all"] = right
    return {task: sum(found) / len(found) for task, found in by_task.items()}


def run(arguments: argparse.Namespace) -> dict[str, Json]:
    """The whole comparison."""
    asked = questions(arguments.model, arguments.documents)
    kept: Path | None = arguments.cpu_answers
    is_kept = kept is not None and kept.exists()
    if kept is not None and is_kept:
        theirs = read(kept, asked)
    else:
        theirs, _ = right_answers(arguments.model, "cpu", asked)
        if kept is not None:
            kept.write_text(json.dumps({"questions": digest(asked), "right": theirs}))
    right, took = theirs, 0.0
    if arguments.device == "cuda":
        right, took = right_answers(arguments.model, "cuda", asked)
    on_cpu, ours = shares(asked, theirs), shares(asked, right)
    same = [a == b for a, b in zip(theirs, right, strict=True)]
    cases: list[dict[str, Json]] = [
        {
            "device": arguments.device,
            "task": task,
            "answers": sum(one.task == task for one in asked) if task != "all" else len(asked),
            "right": round(share, 4),
            "right_on_cpu": round(on_cpu[task], 4),
            "difference": round(share - on_cpu[task], 4),
        }
        for task, share in ours.items()
    ]
    prompts = [one.prompt for one in asked][:: max(1, len(asked) // PROMPTS)][:PROMPTS]
    on_device, on_host = bf16_errors(arguments.model, arguments.device, prompts, on_cpu=not is_kept)
    fixture = fixture_error(arguments.device)
    config: dict[str, Json] = {
        "model": arguments.model.name,
        "fixture_fp32_error": fixture,
        "bf16_error": round(on_device, 5),
        "bf16_error_on_cpu": round(on_host, 5),
        "numerics": NUMERICS,
        "documents": arguments.documents,
        "in_flight": IN_FLIGHT,
        "same_verdict": round(sum(same) / len(same), 4),
        "cpu_answers_kept": is_kept,
        "seconds": round(took, 1),
    }
    columns = ("task", "answers", "right", "right_on_cpu", "difference")
    show(f"right answers on {arguments.device}", columns, cases)
    within = abs(ours["all"] - on_cpu["all"]) <= POINT
    within = within and fixture <= FIXTURE_ERROR and on_device <= SLACK * on_host
    gpu = None
    if arguments.device == "cuda":
        import torch

        gpu = torch.cuda.get_device_name()
    return report("bench answers", config=config, cases=cases, ok=within, gpu=gpu)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="deepmesh bench answers", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", type=Path, default=TINY, help="folder of the checkpoint")
    parser.add_argument("--documents", type=int, default=64, help="of each task")
    parser.add_argument(
        "--cpu-answers",
        type=Path,
        help="keep the CPU's verdicts in this file, and take them from there when it exists",
    )
    parser.add_argument("--no-store", action="store_true", help="not into bench/results")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    if arguments.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("no CUDA device is here: use --device cpu", file=sys.stderr)
            return 2
    publish(run(arguments), name="answers", as_json=arguments.json, store=not arguments.no_store)
    return 0


if __name__ == "__main__":
    sys.exit(main())
