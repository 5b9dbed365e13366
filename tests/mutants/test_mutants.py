"""The mutation gate still fits the sources (`python -m tests.mutants` runs it)."""

from pathlib import Path

import pytest

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_exactly_one_place(mutant: Mutant) -> None:
    assert (ROOT / mutant.path).read_text().count(mutant.old) == 1
    assert mutant.new != mutant.old
    for word in mutant.tests.split():
        assert not word.startswith("tests/") or (ROOT / word).exists()
