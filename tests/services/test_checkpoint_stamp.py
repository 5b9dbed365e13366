"""Which checkpoint an executor has loaded, and which weights a fingerprint names."""

import shutil
from pathlib import Path

from deepmesh.fingerprint import weights_of
from services.executor.capacity import fingerprint
from services.executor.checkpoint_stamp import stamp


def folder_of(path: Path, weights: bytes = b"w" * 100) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(weights)
    (path / "README.md").write_text("not looked at")
    return path


def test_files_that_change_and_another_folder_are_another_checkpoint(tmp_path: Path) -> None:
    first = folder_of(tmp_path / "a")
    known = stamp(first)
    assert stamp(first) == known
    (first / "README.md").write_text("changed")
    assert stamp(first) == known
    (first / "model.safetensors").write_bytes(b"v" * 101)
    assert stamp(first) != known
    link = tmp_path / "current"
    link.symlink_to(first)
    assert stamp(link) == stamp(first)
    link.unlink()
    link.symlink_to(folder_of(tmp_path / "b", b"v" * 101))
    assert stamp(link) != stamp(first)


def test_a_folder_that_lacks_something_has_a_stamp_too(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert len(stamp(tmp_path)) == 1


def test_a_fingerprint_names_the_weights_apart_from_the_engine(tmp_path: Path) -> None:
    first, other = folder_of(tmp_path / "a"), folder_of(tmp_path / "b", b"v" * 100)
    same = Path(shutil.copytree(first, tmp_path / "c"))
    base = fingerprint(first, "bf16", "cpu 1")
    assert fingerprint(same, "bf16", "cpu 1") == base
    for numerics, engine in (("exact", "cpu 1"), ("bf16", "cpu 2")):
        found = fingerprint(first, numerics, engine)
        assert found != base
        assert weights_of(found) == weights_of(base)
    assert weights_of(fingerprint(other, "bf16", "cpu 1")) != weights_of(base)
    assert weights_of("opaque") == "opaque"
