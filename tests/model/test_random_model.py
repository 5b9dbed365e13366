"""`deepmesh model random`: released layout, exact shapes, the same bytes for the same seed."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from kernels.quant.unpack import unpack_fp4, unpack_fp8
from services.executor.inspect import describe
from services.executor.model_config import ModelConfig, parse_config
from services.executor.presets import PRESETS, PresetError, preset_config
from services.executor.random_model import (
    SHIPPED_TOKENIZER,
    RandomModelError,
    check_disk,
    write_random_model,
)
from services.executor.shard_writer import gather, write_shards
from services.executor.sized_tokenizer import TokenizerSizeError, sized_tokenizer
from services.executor.tensor_specs import TensorSpec, tensor_specs
from services.executor.weights import load_model
from services.tokenizer.model import load_model as load_tokenizer
from tests.model.driving import alone


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("random") / "nano"
    write_random_model(folder, "v41-nano")
    return folder


def config_of(name: str, **slice_: int) -> ModelConfig:
    raw = preset_config(name, **slice_)
    raw["text_config"]["engram_compressed_vocab_size"] = 1000
    return parse_config(raw)


# ---------------------------------------------------------------- shapes


def test_the_medium_model_has_the_shapes_it_was_ordered_with() -> None:
    config = config_of("v41-medium")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (1024, 12, 8192)
    assert (config.num_attention_heads, config.head_dim, config.qk_rope_head_dim) == (16, 128, 32)
    assert (config.q_lora_rank, config.o_groups, config.o_lora_rank) == (256, 4, 256)
    assert config.sliding_window == 128
    assert config.compress_ratios == (0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0, 0)
    assert config.kv_source_layer_ids == (2, 4, 6)
    assert config.index_source_layer_ids == (2, 4, 6, 9)
    assert (config.index_n_heads, config.index_head_dim, config.index_topk) == (16, 64, 128)
    assert config.candidate_source_layer_id == 6
    assert (config.candidate_topk_blocks, config.candidate_block_size) == (64, 8)
    assert (config.n_routed_experts, config.moe_intermediate_size) == (64, 512)
    assert config.num_experts_per_tok == 6
    assert config.engram_layer_ids == (1, 4)
    assert config.num_stages == 3
    num_bytes = sum(spec.num_bytes for spec in tensor_specs(config))
    assert 0.75e9 < num_bytes < 0.85e9


def test_the_real_model_has_the_published_layout() -> None:
    """Counts of the release's own index (without its vision tensors)."""
    config = config_of("v41-flash")
    specs = tensor_specs(config)
    assert (len(specs), sum(spec.num_bytes for spec in specs)) == (95_819, 509_315_486_040)
    assert config.kv_source_layer_ids == (2, 8, 14, 20)
    assert config.index_source_layer_ids == (2, 8, 14, 20, 24, 28, 32, 36)
    assert config.engram_num_embeddings == (384006168, 384016682)


@pytest.mark.parametrize("name", PRESETS)
def test_every_slice_is_a_model_that_can_be_served(name: str) -> None:
    for layers in range(2, PRESETS[name].num_layers + 1):
        stages = layers % (1 + PRESETS[name].num_stages)
        config = config_of(name, layers=layers, stages=stages)
        assert (config.num_hidden_layers, config.num_stages) == (layers, stages)
        assert set(config.compress_ratios) >= {1, 2}


def test_a_slice_has_layers_of_full_size_and_no_draft_stages() -> None:
    config = config_of("v41-flash", layers=2)
    assert (config.hidden_size, config.n_routed_experts, config.num_stages) == (5120, 384, 0)
    layer = [spec for spec in tensor_specs(config) if spec.name.startswith("layers.1.")]
    assert 7.3e9 < sum(spec.num_bytes for spec in layer) < 7.5e9


def test_a_slice_of_eight_layers_has_every_kind() -> None:
    """Two of the window alone, three of the encoder, and three kinds of the decoder."""
    config = config_of("v41-flash", layers=8)
    assert config.compress_ratios == (0, 0, 2, 2, 2, 1, 1, 1)
    assert config.kv_source_layer_ids == (2, 5)
    assert config.index_source_layer_ids == (2, 5, 7)
    assert [config.uses_candidates(layer) for layer in (5, 6, 7)] == [False, False, True]
    assert config.engram_layer_ids == (1,)


def test_what_is_no_slice_is_refused() -> None:
    with pytest.raises(PresetError, match="v41-large"):
        preset_config("v41-large")
    with pytest.raises(PresetError, match=r"layers: 13 is not within 2\.\.12"):
        preset_config("v41-medium", layers=13)
    with pytest.raises(PresetError, match="stages: 4"):
        preset_config("v41-medium", stages=4)


# ---------------------------------------------------------------- bytes


def test_all_tensors_are_there_and_a_prompt_gives_finite_logits(nano: Path) -> None:
    summary = describe(nano)
    assert (summary.has_weights, summary.problems) == (True, "")
    ids = torch.randint(20, 512, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    out = alone(load_model(nano, "bf16"), ids)
    assert torch.isfinite(out.logits).all()
    assert 0.3 < float(out.logits.std()) < 30
    assert len(out.logits.argmax(1).unique()) > 20  # not one answer to everything
    assert not any(nano.parent.glob("*.partial"))


def digest(folder: Path) -> str:
    whole = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        whole.update(file.name.encode() + file.read_bytes())
    return whole.hexdigest()


def test_the_same_seed_gives_the_same_bytes(nano: Path, tmp_path: Path) -> None:
    write_random_model(tmp_path / "same", "v41-nano")
    write_random_model(tmp_path / "other", "v41-nano", seed=1)
    assert digest(tmp_path / "same") == digest(nano)
    assert digest(tmp_path / "other") != digest(nano)


def test_weights_have_the_spread_that_keeps_activations_near_one(nano: Path) -> None:
    with safe_open(str(next(nano.glob("*.safetensors"))), framework="pt") as file:
        read = file.get_tensor
        expert = "layers.0.ffn.experts.0.w1."
        fp4 = unpack_fp4(read(expert + "weight"), read(expert + "scale"))
        dense = "layers.0.engram.wkv."
        fp8 = unpack_fp8(read(dense + "weight"), read(dense + "scale"))
        table = "layers.0.engram.embed."
        rows = unpack_fp8(read(table + "weight"), read(table + "scale"))
        head = read("head.weight").float()
        norm = read("norm.weight").float()
    wanted = [(1.5 * 64**-0.5, fp4), (192**-0.5, fp8), (1.0, rows), (2.0 * 64**-0.5, head)]
    for std, values in wanted:
        assert abs(float(values.mean())) < 0.1 * std
        assert float(values.std()) == pytest.approx(std, rel=0.12)
    assert float(norm.mean()) == pytest.approx(1.0, abs=0.1)


def test_parts_of_the_model_share_a_shard_up_to_its_size() -> None:
    specs = [TensorSpec(f"layers.{i}.x.weight", (1 << 20,), "F32") for i in range(3)]
    shards = list(gather(specs, limit=9 << 20))
    assert [[spec.name for spec in shard] for shard in shards] == [
        ["layers.0.x.weight", "layers.1.x.weight"],
        ["layers.2.x.weight"],
    ]


def test_what_comes_in_pieces_is_stored_whole(tmp_path: Path) -> None:
    """float32 tensors stay aligned behind bytes of any number."""
    specs = [TensorSpec("a.weight", (3,), "F8_E4M3"), TensorSpec("b.weight", (2, 2), "F32")]
    values = {"a.weight": torch.arange(3, dtype=torch.uint8), "b.weight": torch.eye(2)}

    def pieces(spec: TensorSpec) -> tuple[NDArray[np.uint8], ...]:
        data = values[spec.name].numpy().ravel().view(np.uint8)
        return data[:2], data[2:]

    seen: list[int] = []
    write_shards(tmp_path, specs, pieces, seen.append)
    with safe_open(str(next(tmp_path.glob("*.safetensors"))), framework="pt") as file:
        assert torch.equal(file.get_tensor("b.weight"), torch.eye(2))
        assert file.get_tensor("a.weight").view(torch.uint8).tolist() == [0, 1, 2]
    assert sum(seen) == 19


# ---------------------------------------------------------------- what goes wrong


def test_a_disk_that_is_too_small_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(RandomModelError, match=r"1073741824\.0 GiB are needed, \d+\.\d GiB are"):
        check_disk(tmp_path / "new" / "folder", 1 << 60)
    if shutil.disk_usage(tmp_path).free < 480 << 30:
        with pytest.raises(RandomModelError, match=r"474\.\d GiB are needed"):
            write_random_model(tmp_path / "whole", "v41-flash")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(RandomModelError, match="is there already"):
        write_random_model(tmp_path, "v41-nano")
    assert [file.name for file in tmp_path.iterdir()] == ["precious"]


def test_what_was_interrupted_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_random_model(tmp_path / "out", "v41-nano", on_bytes=interrupt)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- tokenizer

TEXT = "Hello, wörld! 12345 → the quick brown fox\n"


@pytest.mark.parametrize("size", [280, 512, 4096, 8192])
def test_a_cut_or_padded_tokenizer_reads_and_writes_any_text(size: int) -> None:
    tokenizer = Tokenizer.from_str(sized_tokenizer(SHIPPED_TOKENIZER, size))
    assert tokenizer.get_vocab_size() == size
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert max(ids) < size
    assert tokenizer.decode(ids) == TEXT
    texts = {tokenizer.id_to_token(number) for number in range(size)}
    assert len(texts) == size
    assert None not in texts


def test_padding_changes_no_encoding() -> None:
    shipped = Tokenizer.from_file(str(SHIPPED_TOKENIZER))
    padded = Tokenizer.from_str(sized_tokenizer(SHIPPED_TOKENIZER, 8192))
    text = TEXT + " v5000 " + "x".join(map(str, range(100)))
    assert padded.encode(text).ids == shipped.encode(text).ids
    assert padded.decode([5000, 8191]) == " v5000 v8191"


def test_a_vocabulary_without_room_for_single_bytes_is_refused() -> None:
    with pytest.raises(TokenizerSizeError, match="needs 275 ids"):
        sized_tokenizer(SHIPPED_TOKENIZER, 274)


def test_the_tokenizer_service_can_read_it(nano: Path) -> None:
    model = load_tokenizer(nano)
    assert (model.vocab_size, model.bos_id, model.eos_ids) == (512, 0, frozenset({1}))
