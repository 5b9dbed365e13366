"""Nothing is imported while steps run: an import in mid-step holds up every row for its time."""

import subprocess
import sys

LOCKSTEP = """
import sys
import services.scheduler.service  # all that its process has
from services.executor.row_checks import check_owners  # of the executor's, what runs every step
from tests.core.ranks import ROOMY, Ranks

ranks = Ranks([ROOMY], is_checked=False)
before = set(sys.modules)
for number in range(24):  # more than are moved one by one
    ranks.ask([3 + number] * 20, max_tokens=70)
ranks.run()
assert len(ranks.ended) == 24, len(ranks.ended)
assert len(ranks.core.engine.memories[0].index.points), "no output left a point"
print(*sorted(set(sys.modules) - before))
"""


def test_rows_in_lockstep_pass_block_edges_and_output_points_without_an_import() -> None:
    argv = [sys.executable, "-c", LOCKSTEP]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stdout.split(), done.stdout
