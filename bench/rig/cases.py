"""What `bench overlap` varies, and the mesh.toml of each case."""

from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from deepmesh.config import (
    Config,
    ExecutorConfig,
    GatewayConfig,
    LinksConfig,
    MeshConfig,
    SchedulerConfig,
)

Depth = Literal[1, 2, 3]

ROOT = Path(__file__).parents[2]
TAIL_SHARE = 0.05  # of a step: between its tokens and its end
MASK_SHARE = 0.3  # of a step: until the masks behind its tokens are there
DRAFT_LEN = 3
MAX_MODEL_LEN = 2048


@dataclass(frozen=True)
class Case:
    """One line of the result."""

    rows: int
    step_ms: float
    depth: Depth
    speculation: bool = False
    grammar: bool = False
    work: float = 0.0  # CPU work added to the scheduler's loop, as a share of a step
    whole_mesh: bool = False

    @property
    def tail_ms(self) -> float:
        """How much of the step follows its tokens."""
        return TAIL_SHARE * self.step_ms

    def config(self, run_dir: Path) -> Config:
        """The mesh of this case."""
        return Config(
            mesh=MeshConfig(
                run_dir=str(run_dir),
                model=str(ROOT / "models" / "tiny"),
                served_model="tiny",
            ),
            links=LinksConfig(timeout_s=20.0),
            gateway=GatewayConfig(port=0),
            scheduler=SchedulerConfig(
                depth=self.depth,
                max_rows=self.rows,
                step_tokens=4096,
                max_model_len=MAX_MODEL_LEN,
            ),
            executor=ExecutorConfig(
                kind="fake",
                max_queued=1 << 16,  # a replay queues a whole run in advance
                fake_step_ms=self.step_ms - self.tail_ms,
                fake_tail_ms=self.tail_ms,
                fake_draft_len=DRAFT_LEN if self.speculation else 0,
                fake_mask_ms=MASK_SHARE * self.step_ms if self.grammar else -1.0,
            ),
        )

    def __str__(self) -> str:
        extras = {
            "drafts": self.speculation,
            "masks": self.grammar,
            "mesh": self.whole_mesh,
        }
        words = [f"{self.rows} rows x {self.step_ms:g} ms", f"depth {self.depth}"]
        words += [word for word, is_on in extras.items() if is_on]
        return ", ".join([*words, f"work {self.work:.0%}"] if self.work else words)


def choose(
    *,
    rows: list[int],
    step_ms: list[float],
    depths: list[Depth],
    speculation: list[bool],
    grammar: list[bool],
    works: list[float],
    with_mesh: bool,
) -> list[Case]:
    """The matrix; added work at its hardest plain point, and the whole mesh once."""
    axes = product(step_ms, rows, depths, speculation, grammar)
    cases = [Case(r, ms, depth, drafts, masks) for ms, r, depth, drafts, masks in axes]
    if rows:
        hardest = Case(max(rows), min(step_ms), max(depths))
        cases += [replace(hardest, work=work) for work in works]
    return cases + [Case(32, 20.0, 2, whole_mesh=True)] * with_mesh
