"""A calling process may set torch's default dtype; nothing here depends on it."""

from __future__ import annotations

import pytest
import torch

from attnplug_engine import Engine


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next", "nemotron_h"])
@pytest.mark.sample(1)
def test_the_default_dtype_changes_no_token(name):
    def tokens():
        engine = Engine(f"tiny:{name}", device="cpu", num_pages=32, max_batch=4)
        greedy = engine.generate([list(range(5, 40)), [1, 2, 3]], max_tokens=8)
        sampled = engine.generate([[7, 8, 9]], max_tokens=8, temperature=1.0, top_p=0.9, seed=5)
        return [completion.token_ids for completion in (*greedy, *sampled)]

    wanted = tokens()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert tokens() == wanted
    finally:
        torch.set_default_dtype(torch.float32)
