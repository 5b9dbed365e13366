"""Real processes: the same bits out of memory, disk after a kill, and another replica's Redis."""

import shutil
import tempfile
from pathlib import Path

import pytest

from bench.determinism.caches import REDIS_GROUP, cache_groups
from bench.determinism.check import MODEL
from bench.determinism.groups import Groups, Setting
from bench.determinism.jobs import make_jobs
from bench.determinism.outputs import Tally

NUM_JOBS, NUM_TOKENS = 12, 12


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_tier_gives_the_bits_of_a_cold_run_alone() -> None:
    run_dir = Path(tempfile.mkdtemp(prefix="dm-"))  # paths of sockets are short
    jobs = make_jobs(MODEL, NUM_JOBS, NUM_TOKENS, has_masks=True)
    setting = Setting(MODEL, run_dir, jobs)
    groups, ran = Groups(setting), list[str]()
    try:
        wanted = groups.alone()
        for name, outputs in cache_groups(setting):
            tally = Tally(name)
            tally.compare([job.kind for job in jobs], outputs, wanted)
            assert tally.comparisons == NUM_JOBS
            assert tally.is_clean, f"{name}: {tally.first}"
            ran.append(name)
    finally:
        groups.close()
        shutil.rmtree(run_dir, ignore_errors=True)
    assert ran[-1] == REDIS_GROUP
