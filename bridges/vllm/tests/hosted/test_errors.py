"""Refusals inside vLLM, when layers are made and before weights are loaded."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import AttentionType

from attnplug import RefusalCode
from attnplug_testing.errors import naming
from attnplug_vllm.mha import AttnplugBackend, AttnplugImpl
from attnplug_vllm.selection import Refused
from engines import asking, engine


def layer(
    path: str, section: dict[str, Any] | None = None, *, engine_args: dict[str, Any] | None = None, **given: Any
) -> AttnplugImpl:
    """A layer as vLLM makes it, under a configuration that vLLM made."""
    asked = asking(**(section or {}))
    args = EngineArgs(
        model=path, dtype="float32", skip_tokenizer_init=True, max_model_len=512, **asked, **(engine_args or {})
    )
    with set_current_vllm_config(args.create_engine_config()):
        return AttnplugImpl(**{"num_heads": 8, "head_size": 32, "scale": 0.2, "num_kv_heads": 2, **given})


def test_a_plain_layer_is_served(models):
    assert layer(models.path("llama")).selection.options == {"torch_native": None}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"alibi_slopes": [0.1] * 8}, "ALiBi slopes"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention type encoder_only"),
        ({"attn_type": AttentionType.ENCODER_DECODER}, "attention type encoder_decoder"),
        ({"chunk_lookback": 2}, "chunk_lookback=2 (the model's)"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2"),
    ],
)
def test_layers_that_the_contract_lacks_are_refused_by_name(models, given, named):
    with pytest.raises(Refused, check=naming(named)):
        layer(models.path("llama"), **given)


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"backend": "torch_nativ"}, "'torch_nativ'"),
        ({"bakend": "torch_native"}, "'bakend'"),
        ({"options": {"torch_native": {"x": 1}}}, "--additional-config.attnplug.options.torch_native.x"),
    ],
)
def test_wrong_settings_are_refused_when_the_first_layer_is_made(models, section, named):
    with pytest.raises(Refused, check=naming(named)):
        layer(models.path("llama"), section)


def test_an_unfit_backend_stops_the_engine_before_weights_are_loaded(models, monkeypatch):
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    monkeypatch.setattr(DefaultModelLoader, "load_weights", lambda *_: pytest.fail("weights are loaded"))
    with (
        pytest.raises(Refused, check=naming("--kv-cache-dtype fp8_e5m2")),
        engine(models.path("llama"), {**asking(), "kv_cache_dtype": "fp8_e5m2"}),
    ):
        pass


def test_blocks_that_are_no_multiple_of_16_are_refused(models):
    with pytest.raises(Refused) as raised:
        layer(models.path("llama"), engine_args={"block_size": 8})
    assert [(reason.code, reason.value) for reason in raised.value.refusals] == [(RefusalCode.PAGE_SIZE, 8)]


def test_what_only_vllms_selector_knows_is_refused_there():
    assert AttnplugBackend.validate_configuration(use_mla=False, use_sparse=False, head_size=64) == []
    (reason,) = AttnplugBackend.validate_configuration(use_sparse=True)
    assert "sparse attention" in reason


PARSE = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
print("parsed")
"""


def test_the_command_line_is_refused_at_once_and_without_a_traceback(models):
    """The first part of ``vllm serve``; the rest needs a web server."""
    asked = ["--attention-backend", "CUSTOM", "--additional-config.attnplug.backend"]
    for given, named in (
        (["torch_nativ"], "'torch_nativ'"),
        (["torch_native", "--kv-cache-dtype", "fp8_e5m2"], "--kv-cache-dtype fp8_e5m2"),
        (["torch_native"], None),
    ):
        command = [sys.executable, "-c", PARSE, "serve", models.path("llama"), *asked, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == (named is not None) and ("parsed" in done.stdout) is (named is None)
        assert named is None or named in done.stderr
        assert "Traceback" not in done.stderr
