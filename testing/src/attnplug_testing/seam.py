"""Conformance subjects on a CPU: installed backends built over reference kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from attnplug import DType
from attnplug.host import load_registry
from attnplug_conformance import Subject


def over_stand_ins(
    name: str,
    factory: str,
    *,
    seam: str,
    dtypes: Iterable[DType] = (DType.FLOAT32,),
    kv_dtypes: Iterable[DType] | None = None,
    longest: int = 300,
    **claims: Any,
) -> Subject:
    """Return an installed backend as a subject on a CPU, built by ``factory`` over reference kernels.

    It claims what its spec does, but in ``dtypes`` and for any GPU generation; ``claims`` replace capabilities. It
    lists no kernels to build: those of the library need a GPU.
    """
    registered = load_registry().backends[name]
    own = {
        "devices": frozenset({"cpu", "cuda"}),
        "dtypes": frozenset(dtypes),
        "kv_dtypes": frozenset(dtypes if kv_dtypes is None else kv_dtypes),
        "min_sm": None,
        "max_sm": None,
        **claims,
    }
    spec = registered.spec
    claimed = replace(spec.capabilities, **own)
    stand_in = replace(spec, capabilities=claimed, factory=factory, requires=(), kernel_builds=None)
    return Subject(replace(registered, spec=stand_in), torch.device("cpu"), longest=longest, seam=seam)
