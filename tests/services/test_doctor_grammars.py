"""`deepmesh doctor` says beforehand whether formats can be kept to."""

from pathlib import Path

from deepmesh.checks import check_grammars
from deepmesh.config import Config, ExecutorConfig, MeshConfig
from tests.tiny import MODEL_FOLDER, VOCAB_SIZE


def config(model: Path, **executor: bool) -> Config:
    return Config(mesh=MeshConfig(model=str(model)), executor=ExecutorConfig(**executor))


def test_the_model_that_ships_is_fine() -> None:
    found = check_grammars(config(MODEL_FOLDER))
    assert found.state == "ok"
    assert f"{VOCAB_SIZE} tokens" in found.found


def test_a_vocabulary_that_cannot_be_read_is_a_warning(tmp_path: Path) -> None:
    assert check_grammars(config(tmp_path)).state == "warn"
    (tmp_path / "tokenizer.json").write_text('{"model": 5}')
    found = check_grammars(config(tmp_path))
    assert (found.state, str(tmp_path) in found.found) == ("warn", True)


def test_without_mask_workers_nothing_is_looked_at(tmp_path: Path) -> None:
    assert check_grammars(config(tmp_path, masks=False)).state == "ok"
