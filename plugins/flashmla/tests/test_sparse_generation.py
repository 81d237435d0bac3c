"""DeepSeek-V3.2-shaped checkpoints on a GPU, served by FlashMLA's sparse kernels."""

from __future__ import annotations

import pytest

from attnplug import DType
from attnplug_testing.devices import DEVICES
from attnplug_testing.rounded_oracle import DEEPSEEK_V3, RoundedOracle

pytestmark = [*DEVICES[1].marks]
DEEPSEEK_V32 = {**DEEPSEEK_V3, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 192}
"""A prompt of 333 tokens is longer than the number of rows selected from it."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return RoundedOracle(str(tmp_path_factory.mktemp("deepseek")), "deepseek_v32", DEEPSEEK_V32)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 128, "num_pages": 40, "chunked_prefill_size": 100},
        {"disable_cuda_graph": True, "index_dtype": DType.FLOAT8_E4M3},
    ],
    ids=lambda settings: ",".join(str(key) for key in settings) or "default",
)
def test_same_tokens_as_transformers_where_bfloat16_can_tell(oracle, settings):
    """Logits are about as close to float32's as transformers' own in bfloat16; tokens are equal if the margin exceeds
    that. In both, rounding also decides which borderline rows are selected."""
    oracle.check(attention_backend="flashmla_sparse", slack=2.0, **settings)


def test_rows_of_656_bytes_cost_no_more_than_their_type(oracle):
    """The reference reads the same rows. Short texts lose most by fp8: few rows are averaged."""
    rows = {"kv_dtype": "fp8_ds_mla", "index_dtype": DType.FLOAT8_E4M3}
    allowed = oracle.errors(attention_backend="torch_sparse", **rows)
    found = oracle.errors(attention_backend="flashmla_sparse", **rows)
    assert all(mine <= 1.25 * reference < 0.1 for mine, reference in zip(found, allowed, strict=True)), (found, allowed)
