"""TokenSpeed's functions in plain torch, as strict as the real ones. They test planning, not a kernel."""

from __future__ import annotations

from inspect import Signature
from typing import Any

import torch
from torch import Tensor

from attnplug import BackendContext
from attnplug_testing.batches import declaring
from attnplug_testing.references.trtllm_mla import (
    check_cute_dsl_scratch,
    check_ragged,
    check_tables,
    on_blackwell,
    run_decode,
    run_ragged,
)
from attnplug_testing.signatures import read_signature, unpacked
from attnplug_testing.trtllm_checks import Build, skip_unless_served
from attnplug_tokenspeed_mla.build import tokenspeed_mla
from attnplug_tokenspeed_mla.kernels import TokenSpeedLibrary
from attnplug_tokenspeed_mla.plugin import attnplug_backends
from attnplug_trtllm_mla.backend import TRTLLMMLABackend

OLDEST, NEWEST = "2.0.0", "2.0.4"
FLOAT8 = torch.float8_e4m3fn


class ReferenceTokenSpeed:
    """The functions of one version, with its signatures; records the calls."""

    def __init__(self, version: str = NEWEST) -> None:
        folder = unpacked("tokenspeed_mla", version)
        assert folder is not None, f"tokenspeed-mla {version} is not unpacked; make test does it"
        package = folder / "tokenspeed_mla"
        self._decode = read_signature(package / "mla_decode.py", "tokenspeed_mla_decode")
        self._prefill = read_signature(package / "mla_prefill.py", "tokenspeed_mla_prefill")
        self._warm_up = read_signature(package / "mla_prefill.py", "warmup_compile_prefill")
        self.calls: list[tuple[str, dict[str, Any]]] = []

    @property
    def library(self) -> TokenSpeedLibrary:
        return TokenSpeedLibrary(self.decode, self.prefill, self.warm_up)

    def named(self, kind: str) -> list[dict[str, Any]]:
        return [given for name, given in self.calls if name == kind]

    def _bind(self, kind: str, signature: Signature, given: dict[str, Any]) -> dict[str, Any]:
        bound = signature.bind(**given).arguments
        self.calls.append((kind, bound))
        return bound

    def decode(self, **given: Any) -> Tensor | tuple[Tensor, Tensor]:
        call = self._bind("decode", self._decode, given)
        query, pages, out = call["query"], call["kv_cache"], call["out"]
        requests, queries, heads, width = query.shape
        assert (call["kv_lora_rank"], call["qk_rope_head_dim"], width) == (512, 64, 576)  # can_implement
        assert query.dtype is pages.dtype is FLOAT8  # its own assertion, and A5
        assert pages.dim() == 3 and 128 % pages.shape[1] == 0 and pages.shape[1] != 1  # can_implement
        assert 0 < heads <= 128  # can_implement
        assert out.shape == (requests, queries, heads, 512) and out.dtype is torch.bfloat16 and out.is_contiguous()
        assert call["max_seq_len"] > 0 and call["causal_mask"] is True
        assert all(isinstance(call[name], float) for name in ("softmax_scale", "output_scale"))
        check_tables(call["block_tables"], call["seq_lens"], call["max_seq_len"], queries, pages)
        rows = 64 if heads * queries <= 64 else 128
        check_cute_dsl_scratch(call["workspace_buffer"], (torch.int8,), requests * -(-heads * queries // rows), rows)
        lse = torch.empty(requests * queries, heads)
        scales = call["softmax_scale"], call["output_scale"]
        run_decode(query, pages, call["block_tables"], call["seq_lens"], *scales, out, lse, base_2=True)
        return (out, lse.unflatten(0, (requests, queries))) if call["return_lse"] else out

    def prefill(self, **given: Any) -> Tensor | tuple[Tensor, Tensor]:
        call = self._bind("prefill", self._prefill, given)
        query, key, value, out = (call[name] for name in ("query", "key", "value", "out"))
        assert (query.shape[2], key.shape[2], value.shape[2]) == (192, 192, 128)
        assert query.dtype is key.dtype is value.dtype is FLOAT8  # "unimplemented dtypes for headdim 192"
        assert out.shape == (*query.shape[:2], 128) and out.dtype is torch.bfloat16 and out.is_contiguous()
        queries, keys = check_ragged(
            call["cum_seq_lens_q"], call["cum_seq_lens"], call["max_seq_len_q"], call["max_seq_len"], query, key, value
        )
        assert call["batch_size"] == len(queries) and call["seq_lens"].tolist() == keys
        lse = torch.empty(query.shape[:2])
        run_ragged(query, key, value, queries, keys, call["softmax_scale"], call["is_causal"], out, lse, base_2=False)
        return (out, lse) if call["return_lse"] else out

    def warm_up(self, **given: Any) -> None:
        self._bind("warm_up", self._warm_up, given)


def reference_tokenspeed(context: BackendContext, tokenspeed: ReferenceTokenSpeed | None = None) -> TRTLLMMLABackend:
    """Build tokenspeed_mla by its own factory, over the reference library."""
    return on_blackwell(tokenspeed_mla, (tokenspeed or ReferenceTokenSpeed()).library, context)


def build_on(device: str) -> Build:
    skip_unless_served(attnplug_backends()[0], device)
    return (
        reference_tokenspeed
        if device == "cpu"
        else lambda context: tokenspeed_mla(declaring(context, "tokenspeed_mla"))
    )
