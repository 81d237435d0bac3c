"""Tiny models, prompts, and vLLM engines over them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from attnplug import ForwardBatch, Geometry
from attnplug_vllm.planner import GroupPlanner, PlannedBatch

VOCABULARY, NEW = 512, 24
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": None,  # transformers avoids it where it must go on, and vLLM does not
    "initializer_range": 0.2,  # at the usual 0.02 logits are nearly flat, and a wrong result would hardly show
}
_MAKE = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **_SHAPE, tie_word_embeddings=False, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2
        )
    ),
    "llama_mqa": lambda: LlamaForCausalLM(
        LlamaConfig(
            **_SHAPE, tie_word_embeddings=False, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=1
        )
    ),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(
            **_SHAPE,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            query_pre_attn_scalar=32,
            sliding_window=48,
            attn_logit_softcapping=5.0,
            final_logit_softcapping=30.0,
        )
    ),
}


def prompts_of(*lengths: int, prefix: Sequence[int] = (), seed: int = 1) -> list[list[int]]:
    random = torch.Generator().manual_seed(seed)
    return [[*prefix, *torch.randint(0, VOCABULARY, (n,), generator=random).tolist()] for n in lengths]


PROMPTS = prompts_of(5, 9, 33, 64, 100, 131, 200, 300)
SHARED = prompts_of(270, seed=2)[0]
AGAIN = prompts_of(1, 2, 3, 5, 8, 13, 21, 34, prefix=SHARED, seed=3)


@dataclass
class Models:
    """Checkpoints by name, and what transformers makes of prompts."""

    folder: Path
    _expected: dict[tuple[str, str, str], list[list[int]]] = field(default_factory=dict)

    def path(self, name: str) -> str:
        path = self.folder / name
        if not path.exists():
            torch.manual_seed(0)
            model = _MAKE[name]()
            if model.config.tie_word_embeddings:
                with torch.no_grad():  # without this, a token is followed by itself for any output of the layers
                    model.get_input_embeddings().weight.mul_(0.05)
            model.save_pretrained(path)
        return str(path)

    def expected(
        self, name: str, prompts: list[list[int]], rounded: Callable[[Tensor], Tensor] | None = None
    ) -> list[list[int]]:
        """Tokens that transformers generates greedily, one request at a time. ``rounded`` maps keys and values to
        those read back from a cache."""
        key = name, str(prompts), str(rounded)
        if key not in self._expected:
            kind = Gemma2ForCausalLM if name == "gemma2" else LlamaForCausalLM
            model: PreTrainedModel = kind.from_pretrained(
                self.path(name), dtype=torch.float32, attn_implementation="eager"
            )
            if rounded is not None:
                use_rounded_rows(model, rounded)
            self._expected[key] = [_greedy(model, prompt) for prompt in prompts]
        return self._expected[key]


def use_rounded_rows(model: PreTrainedModel, rounded: Callable[[Tensor], Tensor]) -> None:
    """Make a Llama of transformers attend to ``rounded`` keys and values."""
    from transformers import AttentionInterface
    from transformers.models.llama.modeling_llama import eager_attention_forward

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **settings: Any) -> Any:
        return eager_attention_forward(module, query, rounded(key), rounded(value), *args, **settings)

    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register("rounded", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("rounded", ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    model.set_attn_implementation("rounded")


def rounded_per_token_head(rows: Tensor) -> Tensor:
    """Rows ``[..., head_dim]`` in e4m3 with a scale each, read back."""
    scales = rows.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (rows / scales).to(torch.float8_e4m3fn).float() * scales


def _greedy(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    given = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=NEW, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def asking(backend: str = "torch_native", **section: Any) -> dict[str, Any]:
    """The options by which vLLM uses attnplug."""
    return {"attention_backend": "CUSTOM", "additional_config": {"attnplug": {"backend": backend, **section}}}


def use_context_ranks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of two ranks that share the rows of each request, in processes of their own, with the kernels that vLLM
    lacks on a CPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "stand_ins"))  # new processes get this one's path
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "block_size": 16}


@contextmanager
def engine(path: str, options: Mapping[str, Any]) -> Iterator[LLM]:
    """An engine of vLLM's, alone in this process."""
    common = {
        "model": path,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 8,
        "enforce_eager": True,
        "seed": 0,
    }
    llm = LLM(**{**common, **options})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()  # now: a failed test keeps its engine
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def generate(llm: LLM, prompts: list[list[int]]) -> list[Any]:
    """The finished requests, in order."""
    parameters = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(request.outputs[0].token_ids) for request in generate(llm, prompts)]


def runner(llm: LLM) -> Any:
    """The model runner inside."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def impls(llm: LLM) -> set[str]:
    """The classes that run the layers."""
    layers = runner(llm).compilation_config.static_forward_context.values()
    return {type(layer.impl).__name__ for layer in layers}


def planned(
    monkeypatch: pytest.MonkeyPatch, record: Callable[[ForwardBatch], str] = lambda batch: str(batch.forward_mode)
) -> list[str]:
    """Record every eager step that is planned from now on: its mode, unless ``record`` returns something else."""
    seen: list[str] = []
    plan = GroupPlanner.plan

    def recording(self: GroupPlanner, geometry: Geometry) -> PlannedBatch:
        made = plan(self, geometry)
        seen.append(record(made.batch))
        return made

    monkeypatch.setattr(GroupPlanner, "plan", recording)
    return seen
