"""NeMo AutoModel's deepseek_v41 on the released layout. Runs in the environment of peer nemo."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast
from worker_loop import Rows, serve


class Nemo:
    """The whole model but for the draft stages; it has no cache, so a row is its ids so far."""

    def __init__(self, folder: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        # Compiled, each new length costs 10 to 20 s and the call itself is no faster on a CPU.
        torch.compiler.set_stance("force_eager")
        raw = json.loads((folder / "config.json").read_text())
        config = DeepseekV41Config(
            text_config=raw["text_config"] | {"dtype": "bfloat16"},
            vision_config={"num_hidden_layers": 0},
            image_token_id=raw["image_token_id"],
            dtype="bfloat16",
        )
        backend = BackendConfig(
            attn="eager",
            linear="torch",
            rms_norm="torch_fp32",
            experts="torch",
            dispatcher="torch",
            rope_fusion=False,
        )
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        model = DeepseekV41ForCausalLM(config, backend=backend, tokenizer=tokenizer).eval()
        stored: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            stored |= {k: v for k, v in load_file(file).items() if not k.startswith("mtp.")}
        missing, unexpected = model.load_state_dict(
            model.state_dict_adapter.from_hf(stored), strict=False
        )
        missing = [name for name in missing if not name.endswith("bias_vl")]
        if missing or unexpected:
            raise ValueError(f"missing {missing[:5]}, unexpected {unexpected[:5]}")
        self._model = model

    @torch.inference_mode()
    def prefill(self, ids: Rows) -> list[list[int]]:
        """The ids themselves, computed once."""
        self._model(torch.tensor(ids)).logits[:, -1].argmax(-1)
        return [list(row) for row in ids]

    def step(self, state: list[list[int]], ids: Sequence[int]) -> list[list[int]]:
        """Everything once more, with one more token."""
        return self.prefill([[*row, token] for row, token in zip(state, ids, strict=True)])


if __name__ == "__main__":
    serve(Nemo)
