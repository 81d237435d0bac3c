"""DeepSeek-V3-shaped checkpoints on a GPU, decoded by FlashMLA and prefilled by another backend: roles of one run."""

from __future__ import annotations

import pytest

from attnplug import DType, ExtendPath, Role
from attnplug.host import ExtendPolicy
from attnplug_testing.devices import DEVICES
from attnplug_testing.rounded_oracle import DEEPSEEK_V3, RoundedOracle

pytestmark = [*DEVICES[1].marks]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory):
    return RoundedOracle(str(tmp_path_factory.mktemp("deepseek")), "deepseek_v3", DEEPSEEK_V3)


@pytest.mark.parametrize("prefill", ["flashinfer_mla", "torch_native"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 128, "num_pages": 40, "chunked_prefill_size": 100},
        {"extend_policy": ExtendPolicy(forced=ExtendPath.ABSORBED)},
        {"dtype": DType.FLOAT16},
    ],
    ids=lambda settings: ",".join(str(key) for key in settings) or "default",
)
def test_same_tokens_as_transformers_where_bfloat16_can_tell(oracle, settings, prefill):
    """Logits are as close to float32's as transformers' in bfloat16; tokens are equal if the margin exceeds that."""
    oracle.check(role_backends={Role.PREFILL: prefill, Role.DECODE: "flashmla"}, **settings)
