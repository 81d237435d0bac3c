"""NaN poisoning, rounding tolerances of dtypes, and relative errors."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from attnplug import DType, KVFormat
from attnplug_conformance.case import Case
from attnplug_conformance.stored_rows import format_of

NAN = float("nan")
ROUNDING = {DType.FLOAT32: 0.0, DType.FLOAT16: 2e-3, DType.BFLOAT16: 1.5e-2}


def tolerance(case: Case, terms: int) -> float:
    """Largest relative error that rounding explains.

    Kernels accumulate in float32, and rounding errors grow with the square root of the number of terms. They may
    multiply queries and rows of different dtypes in the narrower one.
    """
    kv = 0.0 if case.kv_dtype is None else _rounding(format_of(case.kv_dtype))
    own = 8 * torch.finfo(torch.float32).eps * math.sqrt(terms) + max(ROUNDING[case.dtype or DType.FLOAT32], kv)
    return own if case.magnitude == 1.0 else max(2e-2, 3 * own)


def _rounding(format: KVFormat) -> float:
    """Rounding of products with rows of a format. Kernels multiply decoded rows in bfloat16, and those of one dtype
    also in this dtype, to which they round their queries."""
    if format.codec is None:
        return ROUNDING[DType(format.name)]
    return ROUNDING[DType.BFLOAT16] if format.in_bytes else max(ROUNDING[DType.BFLOAT16], 3 * format.error)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Largest ‖found − wanted‖ / ‖wanted‖ over tokens and heads; NaN if ``found`` contains NaN."""
    if not wanted.numel():
        return 0.0
    found, wanted = found.double().cpu(), wanted.cpu()
    if wanted.dim() == 2:  # log-sum-exps: absolute error if they are small
        finite = wanted.isfinite()
        if not torch.equal(found[~finite], wanted[~finite]):
            return math.inf
        found, wanted = found[finite], wanted[finite]
        return float(((found - wanted).abs() / wanted.abs().clamp(min=1.0)).amax()) if len(wanted) else 0.0
    sizes = wanted.norm(dim=-1)
    return float(((found - wanted).norm(dim=-1) / torch.maximum(sizes, sizes.mean() / 4 + 1e-30)).amax())


def pad_rows(tensor: Tensor, rows: int, value: float = NAN) -> Tensor:
    """Copy of a tensor, padded at the end to ``rows`` rows with NaN or ``value``."""
    more = torch.full((rows - len(tensor), *tensor.shape[1:]), value, dtype=tensor.dtype, device=tensor.device)
    return torch.cat([tensor, more])


def poison(memory: Tensor) -> None:
    """Fill memory with NaN. Integers get bytes of 0xFF, which are NaN in every floating-point dtype stored in uint8."""
    if memory.is_floating_point():
        memory.copy_(torch.tensor(NAN))
    else:
        memory.view(torch.uint8).fill_(0xFF)


def as_bytes(memory: Tensor) -> Tensor:
    """View memory as integers: torch cannot index fp8 on a CPU, and NaN never equals itself."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return memory.view(sizes[memory.element_size()])


_changes: dict[tuple[str, int], bool | Tensor] = {}
"""Inputs by name and stream, and True if a call changed them. On a GPU that is a tensor: reading it would wait."""


@contextmanager
def watched(inputs: Mapping[str, object]) -> Iterator[None]:
    """Record the tensors among ``inputs`` that change inside, for :func:`changed_inputs`. Does not wait for a GPU."""
    tensors = {name: as_bytes(value) for name, value in inputs.items() if isinstance(value, Tensor)}
    on_gpu = any(tensor.is_cuda for tensor in tensors.values())
    if on_gpu and torch.cuda.is_current_stream_capturing():
        yield
        return
    copies = [tensor.clone() for tensor in tensors.values()]
    yield
    stream = torch.cuda.current_stream().cuda_stream if on_gpu else 0
    for (name, tensor), copy in zip(tensors.items(), copies, strict=True):
        changed = (tensor != copy).any() if tensor.is_cuda else not torch.equal(tensor, copy)
        _changes[name, stream] = _changes.get((name, stream), False) | changed


@contextmanager
def watching() -> Iterator[None]:
    """Forget the changes recorded so far, and those recorded inside on exit."""
    _changes.clear()
    try:
        yield
    finally:
        _changes.clear()


def changed_inputs() -> list[str]:
    """Return the names of inputs that calls changed since :func:`watching` began."""
    return list(dict.fromkeys(name for (name, _), changed in _changes.items() if changed))


@contextmanager
def uninitialized_as_nan(device: torch.device) -> Iterator[None]:
    """Fill uninitialized CPU memory with NaN (or the largest integer). Otherwise it is often zero.

    This is torch's deterministic mode. It is not used on a GPU, where it concerns too many operations.
    ``torch.use_deterministic_algorithms`` would import all of inductor.
    """
    if device.type != "cpu" or torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.set_deterministic_debug_mode("warn")  # "error" rejects Tensor.put_
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* does not have a deterministic implementation")
            yield
    finally:
        torch.set_deterministic_debug_mode("default")
