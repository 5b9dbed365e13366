"""The trainer's forward, storage formats and rendering, against what they must reproduce."""

import json
import random
from pathlib import Path

import numpy as np
import torch
from deepseek_recipe import ChatCompletionRequest, ConversionOptions, DeepseekV41Encoding
from safetensors.torch import load_file

from models.tiny.training import export, tasks
from models.tiny.training.config import CompressedVocabulary
from models.tiny.training.draft import Anchors, DraftForward
from models.tiny.training.material import Material
from models.tiny.training.model import Forward, Mode, Rows, effective_weights
from models.tiny.training.parameters import routing_biases
from models.tiny.training.quantise import unpack

FIXTURE = Path(__file__).parent / "tiny-v41"
SHIPPED = Path(__file__).parents[2] / "models" / "tiny"
EXACT = Mode()
CPU = torch.device("cpu")


def fixture_forward() -> tuple[Forward, dict[str, torch.Tensor]]:
    config, values = export.read(FIXTURE)
    # At position 48 the scores of experts 1 and 8 differ by 6e-7, the noise of fp32 sums. The bias
    # enters the choice alone: this decides the tie as the oracle did and changes nothing else.
    values["layers.3.ffn.gate.bias"][1] += 1e-5
    # The fixture's token 2k and 2k + 1 differ only by case.
    vocabulary = CompressedVocabulary(np.arange(config["vocab_size"]) // 2, 256)
    weights = effective_weights(values, export.all_parameters(config), EXACT)
    weights |= {name: values[name] for name in routing_biases(config)}
    return Forward(config, vocabulary, CPU), weights


def one_document(ids: torch.Tensor, window: int) -> Rows:
    return Rows(ids, torch.zeros_like(ids), torch.full((len(ids),), window))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@torch.no_grad()
def test_training_forward_reproduces_the_oracle() -> None:
    forward, weights = fixture_forward()
    expected = load_file(FIXTURE / "expected.safetensors")
    rows = one_document(expected["input_ids"], forward.config["sliding_window"])
    logits = forward(weights, rows, EXACT).hidden @ weights["head.weight"].T
    assert relative_error(logits, expected["exact.logits"]) <= 1e-4
    assert torch.equal(logits.argmax(-1), expected["exact.logits"].argmax(-1))


@torch.no_grad()
def test_draft_block_equals_the_oracle_id_for_id() -> None:
    forward, weights = fixture_forward()
    expected = load_file(FIXTURE / "expected.safetensors")
    ids, drafted = expected["input_ids"], expected["exact.dspark.ids"]
    prompt = one_document(ids, forward.config["sliding_window"])
    features = forward(weights, prompt, EXACT).features
    draft = DraftForward(forward)
    # The anchor is the first token after the prompt; it has no features yet.
    extended = one_document(
        torch.cat((ids, drafted[None, :1]), 1), forward.config["sliding_window"]
    )
    features = torch.cat((features, torch.zeros_like(features[:, :1])), 1)
    anchors = Anchors(torch.tensor([[ids.shape[1]]]))
    states, _ = draft(weights, extended, features, anchors, EXACT)
    base = draft.base_logits(weights, states, EXACT)
    assert draft.greedy(weights, base, drafted[:1]).tolist() == [drafted[1:].tolist()]
    added, memory = draft.markov(weights, drafted[None, :-1])
    assert relative_error(base + added, expected["exact.dspark.logits"][None]) <= 1e-4
    confidence = draft.confidence(weights, states, memory)[0]
    released = expected["exact.dspark.confidence_logit_prenorm_RELEASED"]
    assert torch.allclose(confidence, released, atol=1e-3, rtol=1e-4)


def test_reading_and_writing_a_checkpoint_changes_no_value() -> None:
    config, values = export.read(FIXTURE)
    stored = load_file(FIXTURE / "model.safetensors")
    written = export.released_tensors(config, values)
    assert written.keys() == stored.keys()
    for name, tensor in stored.items():
        if name.endswith("bias_vl"):  # the trainer sees no images and copies the text bias
            continue
        assert written[name].dtype == tensor.dtype, name
    for name, tensor in stored.items():
        if name.endswith(".weight"):
            scale = name.removesuffix("weight") + "scale"
            again = unpack(written[name], written.get(scale))
            assert torch.equal(again, unpack(tensor, stored.get(scale))), name


def test_shipped_checkpoint_has_exactly_the_released_names_and_types() -> None:
    config, values = export.read(SHIPPED)
    expected = {n: (t.dtype, t.shape) for n, t in export.released_tensors(config, values).items()}
    stored = {n: (t.dtype, t.shape) for n, t in load_file(SHIPPED / export.SHARD).items()}
    assert stored == expected
    index = json.loads((SHIPPED / f"{export.SHARD}.index.json").read_text())
    assert index["weight_map"] == dict.fromkeys(stored, export.SHARD)


def test_shipped_checkpoint_and_fixture_use_the_same_types() -> None:
    fixture, shipped = (load_file(folder / export.SHARD) for folder in (FIXTURE, SHIPPED))
    both = fixture.keys() & shipped.keys()
    assert len(both) > 1000
    assert {name: fixture[name].dtype for name in both} == {n: shipped[n].dtype for n in both}


def test_shipped_folder_stays_within_its_25_megabytes() -> None:
    files = [
        path for path in SHIPPED.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    assert sum(path.stat().st_size for path in files) <= 25e6


def test_generated_conversations_render_as_the_recipe_renders_them() -> None:
    rng = random.Random(1)
    material = Material(chat=[("Is it late?", "Yes.")], glosses=[("acorn", "fruit of the oak")])
    for _ in range(200):
        conversation = tasks.draw(rng, material, max_lookup_tokens=200)
        body = conversation.chat_request() | {"model": "DeepSeek-V4.1-Flash"}
        request = ChatCompletionRequest(json.dumps(body).encode()).convert(ConversionOptions())
        rendered = DeepseekV41Encoding().render_conversation(request.conversation)
        prompt = "".join(piece.text for piece in conversation.pieces()[:-1])
        assert rendered.prompt == prompt


def test_held_out_sums_are_never_drawn_for_training() -> None:
    rng = random.Random(2)
    assert not any(tasks.is_held_out(*tasks._addends(rng, held_out=False)) for _ in range(500))
