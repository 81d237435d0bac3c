"""Stand-ins for the few SGLang names that ``backend.py`` and ``build.py`` import, so that both run without SGLang.

test_signatures.py checks the names against SGLang's own sources.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import attnplug_sglang
from sglang_fakes import module

OURS = ("backend", "build")


class Base:
    """SGLang's ``AttentionBackend``."""


class Radix(torch.nn.Module):
    """SGLang's ``RadixAttention``: attributes alone."""

    def __init__(self, layer_id: int = 0, **changes: Any) -> None:
        super().__init__()
        vars(self).update({"k_scale_float": None, "v_scale_float": None, **vars(module(layer_id, **changes))})


class Method(Enum):
    """SGLang's ``AttnForwardMethod``."""

    MLA = auto()
    MHA_ONE_SHOT = auto()
    MHA_CHUNKED_KV = auto()


IN_PARTS = ["flashinfer"]
"""Backends to which SGLang's MLA models pass queries and new rows in two parts."""
HANDLERS: dict[str, Any] = {}
"""How MLA models of SGLang's run a batch, by the name of a backend."""
REGISTERED: dict[str, Any] = {}
CHOICES: list[str] = []
CHUNKED: list[str] = []
DETERMINISTIC: list[str] = []
DETERMINISTIC_WITH_RADIX: list[str] = []
HOOKS: list[Any] = []
IN_GRAPH = {"breakable": False, "piecewise": False}

_RUN = "sglang.srt.model_executor.runner_backend_utils"
_DEEPSEEK = "sglang.srt.models.deepseek_common"
MODULES: dict[str, dict[str, Any]] = {
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": Base},
    "sglang.srt.layers.radix_attention": {"RadixAttention": Radix},
    "sglang.srt.layers.attention.attention_registry": {
        "register_attention_backend": lambda name: partial(REGISTERED.__setitem__, name)
    },
    "sglang.srt.server_args": {
        "add_attention_backend_choices": CHOICES.extend,
        "add_deterministic_attention_backend_choices": DETERMINISTIC.extend,
        "add_radix_supported_deterministic_attention_backend_choices": DETERMINISTIC_WITH_RADIX.extend,
        "add_chunked_prefix_cache_attention_backend": CHUNKED.append,
    },
    "sglang.srt.plugins.hook_registry": {
        "HookRegistry": SimpleNamespace(register=lambda target, hook, kind: HOOKS.append((target, hook, kind))),
        "HookType": SimpleNamespace(BEFORE="before"),
    },
    f"{_RUN}.breakable_cuda_graph": {"is_in_breakable_cuda_graph": lambda: IN_GRAPH["breakable"]},
    f"{_RUN}.tc_piecewise_cuda_graph": {"is_in_tc_piecewise_cuda_graph": lambda: IN_GRAPH["piecewise"]},
    f"{_DEEPSEEK}.attention_forward_methods.forward_methods": {"AttnForwardMethod": Method},
    f"{_DEEPSEEK}.utils": {"FORWARD_ABSORB_CORE_ATTENTION_BACKENDS": IN_PARTS},
    _DEEPSEEK: {
        "attention_backend_handler": SimpleNamespace(
            AttentionBackendRegistry=SimpleNamespace(register=HANDLERS.__setitem__)
        )
    },
}


@contextmanager
def sglang() -> Iterator[SimpleNamespace]:
    """Import our modules that need SGLang over the stand-ins, and restore everything afterwards."""
    from importlib import import_module

    with pytest.MonkeyPatch.context() as patch:
        for name, members in MODULES.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                path = ".".join(parts[:end])
                if path not in sys.modules or end == len(parts):
                    patch.setitem(sys.modules, path, sys.modules.get(path, ModuleType(path)))
            vars(sys.modules[name]).update(members)
        try:
            yield SimpleNamespace(**{name: import_module(f"attnplug_sglang.{name}") for name in OURS})
        finally:
            for name in OURS:
                sys.modules.pop(f"attnplug_sglang.{name}", None)
                vars(attnplug_sglang).pop(name, None)
