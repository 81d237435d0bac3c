"""Core's tiny models: Hugging Face configs of real architectures, small enough to run on any CPU within seconds.

Each is the ``config.json`` of a model of that type, so transformers builds the same model and serves as its oracle. The
exception is ``ring_linear``, which transformers does not have. Values that are not obvious:

- ``initializer_range`` is large: with the usual 0.02 random logits are nearly flat, and a wrong attention output would
  barely change them.
- ``index_topk`` selects few of a short prompt's rows. With fewer index heads, scores of exactly zero would be common.
- ``deepseek_v4``: real models have windows of 128 tokens and entries of 4 and 128 tokens.
- ``kimi_linear``: the defaults of its special tokens are outside a vocabulary of 128.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

TINY = "tiny:"
"""Prefix of a reference to a tiny model."""
TINY_CONFIGS: Mapping[str, Mapping[str, object]] = json.loads(Path(__file__).with_name("tiny.json").read_text("utf-8"))
"""Configs by model type, such as ``TINY_CONFIGS["llama"]``. Core's plugin registers them, as other plugins do."""
