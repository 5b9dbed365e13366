"""Loading: what is wrong with a checkpoint is said at once and completely."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.executor.checkpoint import CheckpointError
from services.executor.weights import load_model, load_weights
from tests.model.driving import FIXTURE, alone, fixture_model, random_ids, same_bits

Tensors = dict[str, Tensor]


@pytest.fixture
def tensors() -> Tensors:
    return load_file(FIXTURE / "model.safetensors")


def write(folder: Path, tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint folder with its tensors spread over `shards` files."""
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(FIXTURE / name, folder / name)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        own = {name: tensors[name] for name in names[shard::shards]}
        save_file(own, folder / file)
        weight_map.update(dict.fromkeys(own, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_all_faults_are_listed_in_one_error(tmp_path: Path, tensors: Tensors) -> None:
    del tensors["norm.weight"]
    del tensors["layers.2.ffn.experts.7.w2.scale"]
    tensors["layers.9.extra"] = torch.zeros(3)
    tensors["head.weight"] = tensors["head.weight"][:-1].contiguous()
    tensors["layers.0.attn.attn_sink"] = tensors["layers.0.attn.attn_sink"].bfloat16()
    tensors["vision.patch.weight"] = torch.zeros(3)  # of the released files: not a fault
    with pytest.raises(CheckpointError) as error:
        load_model(write(tmp_path, tensors), "fp32")
    text = str(error.value)
    assert "2 missing: layers.2.ffn.experts.7.w2.scale; norm.weight" in text
    assert "1 surplus: layers.9.extra" in text
    assert "1 wrong shape: head.weight [511, 256], need [512, 256]" in text
    assert "1 wrong dtype: layers.0.attn.attn_sink BF16, need F32" in text
    assert "vision" not in text


def test_shards_and_byte_scales_change_nothing(tmp_path: Path, tensors: Tensors) -> None:
    as_bytes = {
        name: value.view(torch.uint8) if value.dtype == torch.float8_e8m0fnu else value
        for name, value in tensors.items()
    }
    model = load_model(write(tmp_path, as_bytes, shards=3), "bf16")
    ids = random_ids(30, seed=1)
    assert same_bits(alone(model, ids).logits, alone(fixture_model("bf16"), ids).logits)


def test_a_missing_shard_is_named(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, tensors, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shards missing: model-00002"):
        load_model(tmp_path, "fp32")


@pytest.mark.parametrize("kept", [4, 1000, 9_000_000])
def test_a_file_cut_short_is_named(tmp_path: Path, tensors: Tensors, kept: int) -> None:
    write(tmp_path, tensors)
    file = tmp_path / "model-00001-of-00001.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(kept)
    with pytest.raises(CheckpointError, match="cut short"):
        load_model(tmp_path, "fp32")


def test_no_weights_and_no_tokenizer(tmp_path: Path, tensors: Tensors) -> None:
    shutil.copy(FIXTURE / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        load_model(tmp_path, "fp32")
    write(tmp_path, tensors)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        load_model(tmp_path, "fp32")


def test_the_tokenizer_of_another_model_is_refused(tmp_path: Path, tensors: Tensors) -> None:
    write(tmp_path, tensors)
    file = tmp_path / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"] = {f"w{i}": i for i in range(512)}
    file.write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="engram_compressed_vocab_size 256"):
        load_model(tmp_path, "fp32")


def test_a_rank_holds_its_own_experts_only() -> None:
    config = fixture_model("fp32").config
    whole = load_weights(FIXTURE, config)
    parts = [load_weights(FIXTURE, config, rank=rank, ranks=3) for rank in range(3)]
    for layer, everything in enumerate(whole.layers):
        moes = [part.layers[layer].moe for part in parts]
        held = [range(0, 5), range(5, 10), range(10, 16)]
        assert [moe.spread.first_slot for moe in moes] == [0, 6, 12]
        for moe, own in zip(moes, held, strict=True):
            assert torch.equal(moe.w13.data[: len(own)], everything.moe.w13.data[own])
    with pytest.raises(ValueError, match="rank 3"):
        load_weights(FIXTURE, config, rank=3, ranks=3)


def test_progress_ends_at_its_total() -> None:
    seen: list[tuple[str, int, int]] = []
    load_model(FIXTURE, "fp32", progress=lambda *step: seen.append(step))
    assert next(step for step in seen if step[0] == "layers") == ("layers", 0, 11)
    assert seen[-1] == ("layers", 11, 11)


def test_engram_tables_stay_quantised() -> None:
    table = fixture_model("fp32").weights.layers[0].engram
    assert table is not None
    assert table.table.dtype == torch.float8_e4m3fn


def test_unknown_numerics_are_refused() -> None:
    with pytest.raises(ValueError, match="numerics: 'fp16'"):
        load_model(FIXTURE, "fp16")
