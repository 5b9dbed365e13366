"""Train the tiny model: `python -m models.tiny.training.train --data FOLDER --out FOLDER`.

Three phases: dense attention without rounding; sparse attention with every rounding of the released
model; the DSpark stages with the main model frozen. Each ends at its own time since the start.
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from models.tiny.training import evaluate, export, schedule
from models.tiny.training.config import compress_vocabulary, text_config
from models.tiny.training.draft_trainer import DraftTrainer, start_from_last_layer
from models.tiny.training.model import Forward
from models.tiny.training.optim import Optimiser
from models.tiny.training.parameters import (
    draft_parameters,
    initial_values,
    main_parameters,
    routing_biases,
)
from models.tiny.training.rows import Corpus, Loader
from models.tiny.training.schedule import Phase
from models.tiny.training.trainer import MainTrainer

MUON_LR, ADAM_LR = 0.02, 3e-3
DRAFT_MUON_LR, DRAFT_ADAM_LR = 0.01, 3e-3
NUM_MASTER_PARTS = 4
PHASE_NAMES = ("dense", "sparse", "draft")


class Run:
    """The state that all phases share."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        first = PHASE_NAMES.index(options.start_with)
        self.phases = [schedule.DENSE, schedule.SPARSE, schedule.DRAFT][first:]
        if options.small:
            self.phases = [schedule.small(phase) for phase in self.phases]
        self.loaders = [self._loader(phase) for phase in self.phases]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.use_graph = self.device.type == "cuda" and not options.no_graph
        self.corpus = Corpus(options.data)
        self.config = text_config()
        vocabulary = compress_vocabulary(self.corpus.tokenizer, self.config["vocab_size"])
        self.config["engram_compressed_vocab_size"] = vocabulary.size
        self.main, self.draft = main_parameters(self.config), draft_parameters(self.config)
        self.values = initial_values(self.config, self.main | self.draft, seed=options.seed)
        self.values |= routing_biases(self.config)
        if options.resume:
            self.values |= {n: v.float() for n, v in read_masters(options.resume).items()}
        self.values = {name: value.to(self.device) for name, value in self.values.items()}
        for name in self.main | self.draft:
            self.values[name].requires_grad_()
        self.forward = Forward(self.config, vocabulary, self.device)
        self.rng = np.random.default_rng(options.seed)
        options.out.mkdir(parents=True, exist_ok=True)
        self._log = (options.out / "log.jsonl").open("a")
        self.optimiser = Optimiser(self.values, self.main, MUON_LR, ADAM_LR)

    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started

    def log(self, **entry: object) -> None:
        """Print an entry and append it to the log."""
        line = json.dumps({"elapsed_s": round(self.elapsed(), 1), **entry})
        print(line, flush=True)
        self._log.write(line + "\n")
        self._log.flush()

    def _loader(self, phase: Phase) -> Loader:
        seed = self.options.seed + 1 + PHASE_NAMES.index(phase.name)
        return Loader(
            self.options.data, phase.num_tokens, phase.mixture, self.options.workers, seed
        )


def read_masters(folder: Path) -> dict[str, Tensor]:
    """Return the values that `write_masters` wrote."""
    values: dict[str, Tensor] = {}
    for path in sorted(folder.glob("masters-*.pt")):
        values |= torch.load(path, map_location="cpu", weights_only=True)
    return values


def write_masters(folder: Path, values: dict[str, Tensor]) -> None:
    """Write the values in parts of about equal size, large ones in bf16."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(NUM_MASTER_PARTS)]
    sizes = [0] * NUM_MASTER_PARTS
    for name, value in sorted(values.items(), key=lambda item: -item[1].numel()):
        index = sizes.index(min(sizes))
        kept = value.detach().cpu()
        parts[index][name] = kept.bfloat16() if kept.numel() > 4096 else kept.clone()
        sizes[index] += parts[index][name].nbytes
    for index, part in enumerate(parts):
        temporary = folder / f"part-{index}.tmp"
        torch.save(part, temporary)
        temporary.rename(folder / f"masters-{index}.pt")


def train_phase(
    run: Run,
    phase: Phase,
    trainer: MainTrainer | DraftTrainer,
    ends_at: float,
    loader: Loader,
    evaluator: evaluate.Evaluator | None = None,
) -> None:
    """Step until the phase's time is over (or its step limit is reached)."""
    options, batches = run.options, loader.batches(phase.num_rows)
    started: float | None = None
    evaluations = iter(options.evaluate_at if phase.name == "dense" else ())
    next_evaluation = next(evaluations, 2.0)
    step, last_step, last_time, last_saved = 0, 0, time.monotonic(), run.elapsed()
    while not options.max_steps or step < options.max_steps:
        if step == 5 or started is None:  # compilation and recording are over by the fifth step
            started = run.elapsed()
        progress = (run.elapsed() - started) / max(1e-3, ends_at - started)
        if progress >= 1 and not options.max_steps:
            break
        loader.longest_lookup.value = schedule.reach(phase, progress)
        trainer.step(next(batches), schedule.lr_share(phase, progress, step), run.rng)
        step += 1
        if step in (1, 2, 4, 10) or step % 200 == 0:
            means = trainer.read_sums()
            now = time.monotonic()
            speed = (step - last_step) * phase.num_tokens * phase.num_rows / (now - last_time)
            numbers = {name: np.round(value, 4).tolist() for name, value in means.items()}
            run.log(
                phase=phase.name,
                step=step,
                progress=round(progress, 3),
                tokens_per_s=int(speed),
                **numbers,
            )
            last_step, last_time = step, now
        if run.elapsed() - last_saved > options.save_every:
            write_masters(options.out, run.values)
            last_saved = run.elapsed()
        if isinstance(trainer, MainTrainer) and evaluator and progress >= next_evaluation:
            report(run, trainer, evaluator, options.documents // 2)
            next_evaluation = next(evaluations, 2.0)
            last_step, last_time = step, time.monotonic()
    run.log(
        phase=phase.name, done=True, steps=step, tokens=step * phase.num_tokens * phase.num_rows
    )


def report(
    run: Run, trainer: MainTrainer, evaluator: evaluate.Evaluator, num_documents: int
) -> None:
    """Log the held-out figures in the phase's own mode."""
    phase = trainer.phase
    figures = evaluator.all_tasks(trainer.weights(), phase.mode, num_documents)
    run.log(phase=phase.name, held_out=figures)


def train_main(run: Run, phase: Phase, ends_at: float, loader: Loader) -> None:
    """Train the main model for one phase and report it."""
    trainer = MainTrainer(phase, run.forward, run.main, run.values, run.optimiser, run.use_graph)
    evaluator = evaluate.Evaluator(run.corpus, run.forward, phase.num_tokens, phase.num_rows)
    train_phase(run, phase, trainer, ends_at, loader, evaluator)
    write_masters(run.options.out, run.values)
    if run.options.documents:
        report(run, trainer, evaluator, run.options.documents)


def train_draft(run: Run, phase: Phase, ends_at: float, loader: Loader) -> None:
    """Train the DSpark stages and report how much they save."""
    features = len(run.config["dspark_target_layer_ids"])
    if not run.options.keep_draft:
        start_from_last_layer(run.values, run.config["num_hidden_layers"] - 1, features)
    optimiser = Optimiser(run.values, run.draft, DRAFT_MUON_LR, DRAFT_ADAM_LR)
    trainer = DraftTrainer(
        phase, run.forward, run.main, run.draft, run.values, optimiser, run.use_graph
    )
    trainer.step(next(loader.batches(phase.num_rows)), 0.0, run.rng)
    trainer.measure_states()
    train_phase(run, phase, trainer, ends_at, loader)
    if run.options.documents:
        run.log(
            phase=phase.name, tokens_per_verify_step=evaluate.draft_lengths(run.corpus, trainer)
        )
    trainer.finish()


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, help="folder that the tokenizer module filled"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for log, masters and checkpoint"
    )
    parser.add_argument(
        "--ends-at",
        type=float,
        nargs=3,
        default=(740, 1110, 1235),
        metavar="SECONDS",
        help="when the dense, sparse and draft phases end, in seconds since the start",
    )
    parser.add_argument("--start-with", choices=PHASE_NAMES, default="dense")
    parser.add_argument("--resume", type=Path, help="folder with masters to start from")
    parser.add_argument(
        "--keep-draft", action="store_true", help="go on with the draft stages in the masters"
    )
    parser.add_argument("--workers", type=int, default=10, help="processes that make rows")
    parser.add_argument(
        "--documents", type=int, default=128, help="held-out documents of each task"
    )
    parser.add_argument("--evaluate-at", type=float, nargs="*", default=(0.25, 0.5, 0.75))
    parser.add_argument("--save-every", type=float, default=120.0, help="seconds between masters")
    parser.add_argument(
        "--max-steps", type=int, default=0, help="steps of each phase, in place of its time"
    )
    parser.add_argument(
        "--no-graph", action="store_true", help="do not record steps as CUDA graphs"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny batches, to check the code on a CPU"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Run the phases and write the checkpoint."""
    options = parse_options()
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(options.seed)
    run = Run(options)
    run.log(
        config=run.config, parameters=sum(run.values[name].numel() for name in run.main | run.draft)
    )
    ends = options.ends_at[-len(run.phases) :]
    for phase, loader, ends_at in zip(run.phases, run.loaders, ends, strict=True):
        train = train_draft if phase.name == "draft" else train_main
        train(run, phase, ends_at, loader)
        loader.close()
    write_masters(options.out, run.values)
    total = export.write(options.out / "checkpoint", run.config, run.values)
    run.log(exported_bytes=total)


if __name__ == "__main__":
    main()
