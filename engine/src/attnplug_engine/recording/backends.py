"""Backends on the fake GPU: calls go on where a kernel cannot run on fake tensors, such as another library's."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature
from inspect import signature as signature_of
from typing import Any

import torch

from attnplug import Plan
from attnplug.author.attention import PlannedBackend
from attnplug.author.served_layers import EXPECTED_RESULTS
from attnplug.contract.backend import AttentionBackend, bind_optional_hook, hook_signatures, methods
from attnplug.declare.errors import AttnplugError
from attnplug.sparse import SelectedPositions

_PLANNING = ("init_forward_metadata", "init_forward_metadata_out_graph", "capture")


def skip_kernels(backend: AttentionBackend, skipped: Callable[[str], None]) -> None:
    """Let a backend's calls return empty results where they raise, and call ``skipped(reason)`` the first time.

    Triton's kernels are recorded. Kernels of other libraries raise on fake tensors: an operator of torch without a fake
    implementation, a module that takes tensors by DLPack. Kernels that the same call launches behind one of them are
    not recorded. Refusals (AttnplugError) are raised, except those that a library's error caused, and those that may
    follow from an empty result.
    """
    failed: list[Exception] = []

    def wrapped(name: str, signature: Signature, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:
            try:
                return call(*args, **named)
            except Exception as error:
                if not failed and isinstance(error, AttnplugError) and error.__cause__ is None:
                    raise
                if not failed:
                    where = f"no kernels were recorded behind another library's in {name}"
                    skipped(f"backend {backend.backend_id.name}: {where} ({_cause(error)})")
                failed.append(error)
                return _empty_result(backend, name, *args, **named)

        run.__signature__ = signature  # type: ignore[attr-defined] # hooks are bound by it
        return run

    signatures = {**methods(AttentionBackend), **hook_signatures()}
    if isinstance(backend, PlannedBackend):  # so that the plans which refill updates exist
        signatures["capture"] = signature_of(backend.capture)
    for name, signature in signatures.items():
        call = bind_optional_hook(backend, name) if name in hook_signatures() else getattr(backend, name, None)
        if call is not None:
            setattr(backend, name, wrapped(name, signature, call))


def _cause(error: BaseException) -> str:
    """Return the type of the first error, and its text if that is short."""
    while error.__cause__ is not None:
        error = error.__cause__
    name, text = type(error).__name__, str(error)
    return f"{name}: {text}" if len(text) <= 80 else name


def _empty_result(backend: AttentionBackend, name: str, *args: Any, **named: Any) -> Any:
    """Return a result of the shape that the protocol requires; None where it allows that."""
    if name in _PLANNING:
        geometry = args[0] if name == "capture" else args[0].geometry
        slots = torch.empty(geometry.rows, dtype=torch.int64, device=geometry.device)
        return Plan.of(backend.backend_id, geometry, None, slots)
    if name == "select":
        index, layer, _ = args
        positions = torch.empty(len(index.q), layer.indexer.topk, dtype=torch.int32, device=index.q.device)
        return SelectedPositions(positions)
    if name not in EXPECTED_RESULTS or name == "forward_delta":
        return None
    if (out := getattr(named.get("extras"), "out", None)) is not None:
        return out
    shape, like = EXPECTED_RESULTS[name](*args)
    return like.new_empty(shape)
