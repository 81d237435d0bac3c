"""Multimodal checkpoints with the text model in a section of the config: same tokens as transformers for text."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnplug.hf.model_config import KNOWN_TYPES, model_from_config
from attnplug.host import TINY_CONFIGS, ModelConfigError
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.checkpoints.safetensors import CheckpointError, MissingTensor
from attnplug_engine.models.architectures import ARCHITECTURES, UnknownArchitecture, load_model, load_spec
from attnplug_testing.errors import having

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "patch_size": 4}
PIXTRAL = {"model_type": "pixtral", "head_dim": 8, "image_size": 16, **SIZES}
QWEN = {"depth": 1, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 16, **SIZES}
CLIP = {"model_type": "clip_vision_model", "image_size": 16, "projection_dim": 16, **SIZES}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 16, **SIZES}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5": ("qwen3_5", "qwen3_5_text", {"vision_config": QWEN}),
    "mistral3, tied": ("mistral3", "mistral", {"vision_config": PIXTRAL}),
    "mistral3": ("mistral3", "mistral", {"vision_config": PIXTRAL, "tie_word_embeddings": False}),
    "kimi_k25": ("kimi_k25", "deepseek_v3", {"vision_config": SIZES, "tie_word_embeddings": False}),
    "llava": ("llava", "llama", {"vision_config": CLIP}),
    "gemma3": ("gemma3", "gemma3_text", {"vision_config": SIGLIP, "mm_tokens_per_image": 4}),
    "idefics3": ("idefics3", "llama", {"vision_config": {"image_size": 16, **SIZES}}),
}
"""Outer type, type of the text model, other keys. Tensors are named model.language_model, language_model.model and
model.text_model."""


class MultimodalOracle:
    """A multimodal transformers model with random weights, and the folder that it was saved to."""

    def __init__(self, folder: Path, outer: str, inner: str, keys: dict[str, Any]) -> None:
        from transformers import AutoConfig, AutoModelForImageTextToText

        llama = {**TINY_CONFIGS["llama"], "sliding_window": None}
        text = {**TINY_CONFIGS.get(inner, llama), "model_type": inner}
        config = AutoConfig.for_model(outer, text_config=text, **keys)
        torch.manual_seed(1)
        self.model: nn.Module = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
        # Some multimodal classes initialise the text model with their own, small range.
        with torch.no_grad():
            for name, tensor in self.model.named_parameters():
                if "vision" not in name and "visual" not in name and tensor.dim() > 1:
                    tensor.normal_(std=0.3)
        self.folder = folder
        self.model.save_pretrained(folder)

    def logits(self, tokens: list[int]) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = self.model(input_ids=torch.tensor([tokens])).logits[0]
        return logits


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], MultimodalOracle]:
    @cache
    def make(case: str) -> MultimodalOracle:
        return MultimodalOracle(tmp_path_factory.mktemp("model"), *MODELS[case])

    return make


def prompts() -> list[list[int]]:
    """The last two begin alike, so that one hits the other's prefix."""
    random = torch.Generator().manual_seed(8)
    drawn = [torch.randint(0, 120, (length,), generator=random).tolist() for length in (5, 1, 33, 37)]
    drawn[3][:24] = drawn[2][:24]
    return drawn


def generated(folder: Path, **options: Any) -> list[list[int]]:
    engine = Engine(str(folder), device="cpu", ignore_eos=True, page_size=4, max_batch=3, context_length=64, **options)
    return [one.token_ids for one in engine.generate(prompts(), SamplingParams(max_tokens=4))]


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.sample(2)
def test_tokens_of_the_text_model_equal_those_of_transformers(case, oracle):
    """Batched, in chunks, with prefix hits."""
    made = oracle(case)
    for prompt, tokens in zip(prompts(), generated(made.folder, chunked_prefill_size=20), strict=True):
        logits = made.logits(prompt + tokens[:-1])[len(prompt) - 1 :]
        assert logits.std() > 0.3  # nearly flat logits would hide a wrong weight
        assert tokens == logits.argmax(-1).tolist()


def rewritten(oracle: MultimodalOracle, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The oracle's checkpoint with another config."""
    config = json.loads((oracle.folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(oracle.folder / "model.safetensors")
    return folder


def test_published_kimi_names_its_text_model_kimi_k2(oracle, tmp_path):
    made = oracle("kimi_k25")
    folder = rewritten(made, tmp_path, lambda config: config["text_config"].update(model_type="kimi_k2"))
    assert generated(folder) == generated(made.folder)


def test_a_stored_head_is_not_tied(oracle, tmp_path):
    """mistral3 ties its head unless the config says otherwise, and published configs leave the key out."""
    made = oracle("mistral3")
    folder = rewritten(made, tmp_path, lambda config: config.pop("tie_word_embeddings"))
    assert generated(folder) == generated(made.folder)


def test_a_head_is_tied_if_its_class_says_so_and_the_config_does_not(oracle, tmp_path):
    """Same as in published Gemma 3."""
    made = oracle("gemma3")

    def change(config: dict[str, Any]) -> None:
        for part in (config, config["text_config"]):
            part.pop("tie_word_embeddings", None)

    assert generated(rewritten(made, tmp_path, change)) == generated(made.folder)


def test_random_weights_need_the_config_only(oracle, tmp_path):
    (tmp_path / "config.json").write_text((oracle("qwen3_5").folder / "config.json").read_text())
    assert all(generated(tmp_path, random_weights=True))


@pytest.mark.parametrize(
    ("change", "error", "attributes"),
    [
        (lambda config: config["text_config"].update(model_type="gemma"), UnknownArchitecture,
         {"model_type": "gemma"}),
        (lambda config: config["text_config"].update(model_type="llama4_text"), ModelConfigError,
         {"key": "text_config.model_type"}),
        (lambda config: config["text_config"].pop("num_hidden_layers"), ModelConfigError,
         {"key": "text_config.num_hidden_layers"}),
        (lambda config: config.update(quantization_config={}), ModelConfigError,
         {"key": "quantization_config.quant_method"}),
    ],
    ids=["type", "chunked", "size", "quantised"],
)  # fmt: skip
def test_a_text_model_that_cannot_run_is_refused(change, error, attributes, oracle, tmp_path):
    folder = rewritten(oracle("llava"), tmp_path, change)
    with pytest.raises(error, check=having(**attributes)):
        load_model(str(folder), dtype=torch.float32, device="cpu")


def test_tensors_of_a_text_model_that_are_not_found(oracle, tmp_path):
    """The config is multimodal, and the tensors are those of a plain model, or belong to a model without a head."""
    from safetensors.torch import load_file, save_file

    made = oracle("llava")
    (tmp_path / "config.json").write_text((made.folder / "config.json").read_text())
    tensors = load_file(made.folder / "model.safetensors")
    for prefix, error in (("language_model.", CheckpointError), ("language_model.lm_head", MissingTensor)):
        save_file({n: t for n, t in tensors.items() if not n.startswith(prefix)}, tmp_path / "model.safetensors")
        with pytest.raises(error):
            load_model(str(tmp_path), dtype=torch.float32, device="cpu")


def test_every_type_of_transformers_is_known_or_called_unknown(tmp_path):
    """Both to core, which explains, and to the engine, which runs; before any other key is read."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    nested = {"kimi_k25", "mistral3", "qwen3_5", "qwen3_5_moe"}
    unknown = [name for name in CONFIG_MAPPING_NAMES if name not in KNOWN_TYPES and name not in nested]
    assert len(unknown) > 500 and {"gpt2", "modernbert", "longcat_flash", "bert"} < set(unknown)
    for name in unknown:
        with pytest.raises(ModelConfigError, check=having(key="model_type")):
            model_from_config({"model_type": name}, name)
    for name in ("gpt2", "minimax_m2", "longcat_flash", "modernbert", "gemma"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        with pytest.raises(UnknownArchitecture, check=having(model_type=name, known=tuple(ARCHITECTURES))):
            load_spec(str(tmp_path))
