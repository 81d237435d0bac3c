"""Check of generation in bfloat16 on a GPU against transformers in float32 and in bfloat16.

Rounding alone may decide between two tokens. So logits must be about as close to float32's as transformers' bfloat16
logits are, and tokens must be equal wherever the margin exceeds that error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug.host import TINY_CONFIGS
from attnplug_engine.engine import Engine
from attnplug_engine.execution import runner
from attnplug_engine.execution.in_flight import StepInFlight
from attnplug_engine.request import SamplingParams
from attnplug_engine.scheduling.step import Step

NEW_TOKENS = 48
DEEPSEEK_V3 = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A small model with the attention dimensions that kernels are made for."""
KIMI_LINEAR = {
    **{key: value for key, value in TINY_CONFIGS["kimi_linear"].items() if key not in ("architectures", "model_type")},
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_head_dim": 64,
    "linear_num_heads": 8,
    "num_experts_per_tok": 4,
    "initializer_range": 0.06,
    "dtype": "bfloat16",
}
"""The same for a hybrid model. Every expert is chosen, since rounding would decide between two otherwise."""


LIBRARIES = {
    "flashinfer": "flashinfer",
    "flashinfer_mla": "flashinfer",
    "flashmla": "flash_mla",
    "flashattention": "flash_attn.cute",
}
"""Library module that each backend requires."""


def need_libraries(settings: dict[str, Any]) -> None:
    """Skip the test if a backend named in an engine's ``settings`` lacks its library."""
    names = {settings.get("attention_backend"), *settings.get("role_backends", {}).values()}
    for name, module in LIBRARIES.items():
        if name in names and "backend_options" not in settings:
            pytest.importorskip(module, exc_type=ImportError)


@contextmanager
def without_fla() -> Iterator[None]:
    """Hide flash-linear-attention and causal_conv1d, which transformers would silently use."""
    kept = {name: sys.modules.get(name) for name in ("fla", "causal_conv1d")}
    sys.modules.update(dict.fromkeys(kept))  # type: ignore[arg-type] # None makes an import fail
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


class RoundedOracle:
    """A random checkpoint in ``folder``, with transformers models of it in float32 and bfloat16."""

    def __init__(self, folder: str, name: str, config: dict[str, Any]) -> None:
        with without_fla():
            from transformers.models.auto import AutoConfig, AutoModelForCausalLM

            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(name, **config), attn_implementation="eager", dtype=torch.bfloat16
            )
            model.save_pretrained(folder, safe_serialization=True)
            self._exact, self._rounded = (
                AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval().cuda()
                for dtype in (torch.float32, torch.bfloat16)
            )
        self.folder, self._vocabulary = folder, config["vocab_size"]

    def prompts(self) -> list[list[int]]:
        random = torch.Generator().manual_seed(5)
        drawn = [
            torch.randint(0, self._vocabulary, (length,), generator=random).tolist() for length in (1, 40, 333, 130)
        ]
        drawn[3][:100] = drawn[2][:100]
        return drawn

    @torch.inference_mode()
    def _logits(self, model: torch.nn.Module, tokens: list[int]) -> Tensor:
        with without_fla():
            logits: Tensor = model(torch.tensor([tokens], device="cuda")).logits[0].float()
        return logits

    def check(self, *, slack: float = 1.5, **settings: Any) -> None:
        """Check an engine with these settings: errors must stay within ``slack`` times transformers' rounding error."""
        self.check_tokens(self.prompts(), *generate(self.folder, self.prompts(), **settings), slack=slack)

    def errors(self, **settings: Any) -> list[float]:
        """Return the relative error of an engine's logits against float32, per prompt."""
        found, prompts = [], self.prompts()
        for prompt, chosen, logits in zip(prompts, *generate(self.folder, prompts, **settings), strict=True):
            wanted = self._logits(self._exact, (prompt + chosen)[:-1])[len(prompt) - 1 :]
            found.append(float((logits - wanted).norm() / wanted.norm()))
        return found

    def check_tokens(
        self, prompts: Sequence[list[int]], tokens: Sequence[list[int]], seen: Sequence[Tensor], slack: float = 1.5
    ) -> None:
        """Check tokens and the logits that they were chosen from."""
        equal = decided = 0
        for prompt, chosen, found in zip(prompts, tokens, seen, strict=True):
            sequence, first = prompt + chosen, len(prompt) - 1
            wanted = self._logits(self._exact, sequence[:-1])[first:]
            rounding = self._logits(self._rounded, sequence[:-1])[first:] - wanted
            error, rounding_error = (float(off.norm() / wanted.norm()) for off in (found - wanted, rounding))
            assert error <= slack * rounding_error, (
                f"prompt of {len(prompt)}: {error:.4f}, transformers {rounding_error:.4f}"
            )
            top = wanted.topk(2, -1)
            clear = (top.values[:, 0] - top.values[:, 1] > slack * rounding.abs().amax(-1)).cpu()
            same = top.indices[:, 0].cpu() == torch.tensor(chosen)
            assert bool(same[clear].all()), f"prompt of {len(prompt)}: tokens differ where the margin is clear"
            equal, decided = equal + int(same.sum()), decided + int(clear.sum())
        total = sum(map(len, tokens))
        assert decided >= total / 4, f"only {decided} of {total} choices are clear: the test says little"
        assert equal >= 0.9 * total, f"only {equal} of {total} tokens are equal"


def generate(folder: str, prompts: Sequence[list[int]], **settings: Any) -> tuple[list[list[int]], list[Tensor]]:
    """Return the tokens of every prompt, and the logits ``[tokens, vocabulary]`` that they were chosen from."""
    engine = Engine(folder, **{"device": "cuda", "num_pages": 64, "max_batch": 4, "ignore_eos": True, **settings})
    with watched_logits() as seen:
        done = engine.generate(list(prompts), SamplingParams(max_tokens=NEW_TOKENS))
    return [completion.token_ids for completion in done], [torch.stack(seen[number]) for number in sorted(seen)]


@contextmanager
def watched_logits() -> Iterator[dict[int, list[Tensor]]]:
    """Record the logits that each token is chosen from, by request id, captured steps included."""
    seen: dict[int, list[Tensor]] = {}

    class Watched(StepInFlight):
        def __init__(self, step: Step, logits: Tensor, *given: Any, **named: Any) -> None:
            for row, request in zip(logits, step.sampled_requests, strict=False):  # a captured step's padding follows
                seen.setdefault(request.id, []).append(row.float().clone())
            super().__init__(step, logits, *given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "StepInFlight", Watched)
        yield seen
