"""What runs with deepmesh has a licence that lets everyone use it, and is listed."""

import pytest

from tools.licences import PAGE, Package, is_permissive, packages


def test_every_runtime_dependency_is_permissive_and_listed() -> None:
    found = packages()
    assert {"msgspec", "pyzmq", "torch", "uvicorn"} <= {each.name for each in found}
    assert [each.problem for each in found if each.problem] == []
    told = PAGE.read_text()
    assert [each.name for each in found if f"| {each.name} |" not in told] == []


@pytest.mark.parametrize(
    ("licence", "holds"),
    [
        ("MIT", True),
        ("Apache-2.0 AND BSD-3-Clause", True),
        ("Apache-2.0 WITH LLVM-exception", True),
        ("GPL-3.0-only OR MIT", True),
        ("MIT AND LGPL-2.1-only", False),
        ("GPL-3.0-only", False),
        ("AGPL-3.0-or-later", False),
        ("Proprietary", False),
        ("", False),
    ],
)
def test_a_licence_that_binds_others_is_a_problem(licence: str, holds: bool) -> None:
    assert is_permissive(licence) is holds
    assert bool(Package("some", licence).problem) is not holds
