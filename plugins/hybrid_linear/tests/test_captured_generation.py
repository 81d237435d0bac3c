"""A model of linear layers alone whose prefills an engine replays over fla's plans: tokens as transformers'.

On a CPU a replay makes the same calls again, in Triton's interpreter. Other models are in
``tests/test_engine_graphs.py``, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from attnplug import Role
from attnplug.host import TINY_CONFIGS, load_registry
from attnplug.wrappers.forwarding import HybridLinearBackend
from attnplug_engine import Engine, SamplingParams
from attnplug_engine.graphs.step_graphs import capture_steps
from attnplug_testing.devices import INTERPRETED
from linear_settings import interpreted

PROMPTS = [[1, 7, 90, 3], [5] * 3 + list(range(30, 60)), [11]]


def capture(run: Callable[[], None]) -> Callable[[], None]:
    run()
    return run


@pytest.mark.long
@INTERPRETED
def test_replayed_prefills_of_mamba2_give_transformers_tokens(tmp_path, monkeypatch) -> None:
    """A7: chunks of a prompt in steps with decoding requests, by recurrent kernels (12 tokens) and by chunk kernels
    (40)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in TINY_CONFIGS["mamba2"].items() if key != "model_type"}
    torch.manual_seed(11)
    oracle = AutoModelForCausalLM.from_config(AutoConfig.for_model("mamba2", **settings), dtype=torch.float32).eval()
    oracle.save_pretrained(tmp_path, safe_serialization=True)
    can = load_registry().backends["fla"].spec.capabilities

    def build(selection, context):
        linear = interpreted(context.for_backend("fla", can, roles=frozenset({Role.LINEAR}), options=None))
        return HybridLinearBackend(None, linear, context.model)

    monkeypatch.setattr("attnplug_engine.execution.runner.build_selection", build)
    engine = Engine(str(tmp_path), device="cpu", max_batch=3, page_size=4, context_length=96, ignore_eos=True,
                    chunked_prefill_size=20, prefix_cache=False, dtype="float32")  # fmt: skip
    capture_steps(engine.runner, (1, 3), capture, prefills=(12, 40))
    done = engine.generate(PROMPTS, SamplingParams(max_tokens=3))
    assert engine.statistics.replayed_prefills > 1 and not engine.statistics.eager_prefills
    for prompt, one in zip(PROMPTS, done, strict=True):
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + one.token_ids[:-1]]), use_cache=False).logits[0]
        assert one.token_ids == logits[len(prompt) - 1 :].argmax(-1).tolist()
