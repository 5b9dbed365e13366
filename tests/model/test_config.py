"""config.json in both spellings, its roles, its checks, and the sizes that follow from it."""

import json
import subprocess
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kernels.engram.constants import hash_multipliers, table_primes
from services.executor.inspect import describe
from services.executor.kv_cache import KvCache
from services.executor.kv_sizes import exact_halo, kv_sizes
from services.executor.model_config import ModelConfigError, load_config, parse_config
from services.executor.tensor_specs import rank_experts, tensor_specs
from tests.model.driving import FIXTURE
from tests.model.released_config import FLAT, NESTED


def test_both_spellings_are_the_same_model() -> None:
    assert parse_config(NESTED) == parse_config(FLAT)


def test_roles_of_the_released_layers() -> None:
    config = parse_config(NESTED)
    kv = {layer: config.kv_source(layer) for layer in range(43)}
    assert [layer for layer in kv if kv[layer] is None] == [0, 1, 40, 41, 42]
    assert [kv[layer] for layer in (2, 7, 8, 13, 14, 19, 20, 39)] == [2, 2, 8, 8, 14, 14, 20, 20]
    index = [config.index_source(layer) for layer in (2, 7, 19, 20, 23, 24, 27, 31, 35, 36, 39)]
    assert index == [2, 2, 14, 20, 20, 24, 24, 28, 32, 36, 36]
    assert [i for i in range(40) if config.uses_candidates(i)] == [24, 28, 32, 36]
    assert config.pair_source_layer_ids == (2, 8, 14)


def test_sizes_of_the_released_cache() -> None:
    config = parse_config(NESTED)
    sizes = kv_sizes(config)
    assert sizes.per_token == 890
    assert sizes.global_block == 64 * 890
    assert sizes.window_block == 64 * 43 * 528
    assert sizes.state_block == 3 * 2 * 512 * 4 + 3 * 4
    assert 2.8e6 < sizes.resumable_point < 3.0e6
    assert exact_halo(config) == 5081
    held = KvCache.block_bytes(config)
    assert held[:2] == sizes.per_block[:2]
    assert held[2] + 4 * config.context_ids == sizes.per_block[2]  # ids lie in the slots


def test_tensors_of_the_released_checkpoint() -> None:
    """The published totals, less the 266 vision tensors."""
    specs = tensor_specs(parse_config(NESTED))
    assert len(specs) == len({spec.name for spec in specs}) == 95_819
    assert sum(spec.num_bytes for spec in specs) == 509_315_486_040
    expert = [s.num_bytes for s in specs if s.name.startswith("layers.0.ffn.experts.0.")]
    assert sum(expert) == 18_800_640


def test_numbers_of_the_released_engram() -> None:
    assert hash_multipliers(1, 99092, 4) == (
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    )
    assert hash_multipliers(14, 99092, 4) == (
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    )
    first, second = table_primes(2, 4, 8, 16_000_000)
    assert first[:3] == (16000057, 16000079, 16000081)
    assert (first[-1], second[0], second[-1]) == (16000463, 16000477, 16000889)
    assert (sum(first), sum(second)) == (384006168, 384016682)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 384, 400])
def test_every_expert_has_one_rank(ranks: int) -> None:
    owned = [expert for rank in range(ranks) for expert in rank_experts(384, rank, ranks)]
    assert owned == list(range(384))


def changed(**values: object) -> dict[str, Any]:
    """The released config with some keys of text_config set, or removed by None."""
    raw = deepcopy(NESTED)
    for key, value in values.items():
        if value is None:
            del raw["text_config"][key]
        else:
            raw["text_config"][key] = value
    return raw


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"hidden_size": "big"}, "hidden_size: must be of type int, not 'big'"),
        ({"hidden_size": 5121}, "hidden_size: 5121 is not a multiple of 32"),
        ({"num_hidden_layers": True}, "num_hidden_layers: must be a number"),
        ({"sliding_window": 0}, "sliding_window: must be positive"),
        ({"qk_rope_head_dim": 130}, "qk_rope_head_dim: must be even and at most"),
        ({"o_groups": 7}, "o_groups: must divide num_attention_heads"),
        ({"compress_ratios": [0, 0] + [2] * 18 + [1] * 19}, "compress_ratios: 39 entries"),
        ({"compress_ratios": [0, 0] + [4] * 18 + [1] * 20}, "compress_ratios: [4] not supported"),
        ({"compress_ratios": "all"}, "compress_ratios: must be a list of integers"),
        ({"kv_source_layer_ids": [2, 8, 14, 21]}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [3, 8, 14, 20]}, "kv_source_layer_ids: no source at or below"),
        ({"index_source_layer_ids": [2, 8, 20]}, "kv_source_layer_ids: each must be in"),
        ({"index_source_layer_ids": [20, 2]}, "index_source_layer_ids: must be ascending"),
        ({"candidate_source_layer_id": 24}, "candidate_source_layer_id: must be in"),
        ({"candidate_topk_blocks": 60}, "candidate_topk_blocks: the candidate blocks hold fewer"),
        ({"engram_num_embeddings": [384006168, 1]}, "engram_num_embeddings"),
        ({"engram_num_embeddings": [1]}, "engram_num_embeddings: 1 tables for 2"),
        ({"engram_layer_ids": [1, 30]}, "engram_layer_ids: must lie below candidate"),
        ({"scoring_func": "softmax"}, "scoring_func: 'softmax' is not supported"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok: more than n_routed_experts"),
        ({"dspark_noise_token_id": 129280}, "dspark_noise_token_id: outside the vocabulary"),
        ({"dspark_target_layer_ids": [37, 40]}, "dspark_target_layer_ids: must be ascending"),
    ],
)
def test_bad_values_name_their_key(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelConfigError) as error:
        parse_config(changed(**change))
    assert words in str(error.value)


def test_all_faults_come_at_once() -> None:
    with pytest.raises(ModelConfigError) as error:
        parse_config(changed(hidden_size=None, vocab_size="many", hidden_act="relu"))
    for key in ("hidden_size", "vocab_size", "hidden_act"):
        assert key in str(error.value)


def test_other_models_are_refused() -> None:
    with pytest.raises(ModelConfigError, match="model_type: 'llama'"):
        parse_config({"model_type": "llama"})


def test_ratios_may_leave_the_draft_stages_out() -> None:
    short = changed(compress_ratios=[0, 0] + [2] * 18 + [1] * 20)
    assert parse_config(short) == parse_config(NESTED)


@pytest.mark.parametrize(("text", "words"), [("{", "not JSON"), ("[]", "must be a JSON object")])
def test_unreadable_files(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=words):
        load_config(tmp_path)
    with pytest.raises(ModelConfigError, match="No such file"):
        load_config(tmp_path / "nowhere")


def test_describe_needs_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NESTED))
    summary = describe(tmp_path, ranks=3)
    assert not summary.has_weights
    assert summary.num_bytes == 509_315_486_040
    assert round(summary.num_parameters / 1e9) in (762, 763)  # 551.6 + 196.9 + 14.2
    assert [rank.num_experts for rank in summary.ranks] == [128, 128, 128]
    tables = next(part for part in summary.parts if part.name == "engram tables")
    assert summary.ranks[0].host_bytes == tables.num_bytes
    once = summary.num_bytes - tables.num_bytes
    experts = next(part for part in summary.parts if part.name == "routed experts")
    assert once / 3 < summary.ranks[0].device_bytes < once - experts.num_bytes / 2
    assert summary.kv.per_token == 890
    assert summary.halo_tokens == 5081


def test_describe_checks_weights_that_are_there() -> None:
    summary = describe(FIXTURE)
    assert summary.has_weights
    assert summary.problems == ""
    assert summary.num_tensors == 1290


def test_inspection_starts_without_torch() -> None:
    code = "import sys, services.executor.inspect; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
