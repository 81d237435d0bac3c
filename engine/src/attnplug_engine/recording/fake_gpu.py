"""Fake GPU: tensors have shapes but no memory. Values that the host reads are 1, or 0.5 for floats.

Steps never wait for the device (E1), so which kernels they launch depends on shapes alone. A start-up on this GPU
launches the kernels of a real one. It needs no CUDA device and no CUDA build of torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode

from attnplug_engine.execution.compile_ahead import GPU

_READS: dict[Any, Callable[[Any], Any]] = {
    Tensor.item: lambda values: values.reshape(-1)[0].item(),
    Tensor.tolist: lambda values: values.tolist(),
    Tensor.numpy: lambda values: values,
    Tensor.__bool__: lambda values: False,
    Tensor.__int__: lambda values: 0,
    Tensor.__float__: lambda values: 0.0,
    torch.equal: lambda values: True,
}
"""Functions that read a tensor on the host, and their results for a NumPy array of ones (or 0.5). Values are not zero,
because durations are divisors."""
_NUMPY = {torch.int64: np.int64, torch.int32: np.int32, torch.uint8: np.uint8, torch.bool: np.bool_}


@contextmanager
def fake_gpu(gpu: GPU) -> Iterator[None]:
    """Run torch code for ``cuda`` on a fake ``gpu``. Patches ``torch.cuda`` permanently: use it in a subprocess."""
    _patch_cuda(gpu)
    with ExitStack() as modes:
        modes.enter_context(warnings.catch_warnings(action="ignore"))  # data_ptr() of a fake tensor warns
        modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        modes.enter_context(FakeOperations())
        yield


def _patch_cuda(gpu: GPU) -> None:
    FakeTensor.data_ptr = _address
    FakeTensor.tolist = Tensor.tolist  # its own takes a millisecond per value, and reaches no mode
    # A library that takes tensors by DLPack would read the null pointer of a fake one.
    FakeTensor.__dlpack__ = _refuse_dlpack
    FakeTensor.__dlpack_c_exchange_api__ = None
    properties = SimpleNamespace(**gpu.properties)
    results: Mapping[str, Any] = {
        "is_available": False,  # otherwise torch would open the device
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_device_capability": (properties.major, properties.minor),
        "mem_get_info": (gpu.memory, gpu.memory),
        "memory_allocated": 0,
        "empty_cache": None,
        "synchronize": None,
        "current_stream": _NoOp(),
        "graph_pool_handle": (0, 0),
        "is_current_stream_capturing": False,
        "stream": nullcontext(),
        "graph": nullcontext(),
        "cudart": SimpleNamespace(cudaHostRegister=_returning(0), cudaHostUnregister=_returning(0)),
        "check_error": None,
    }
    for name, value in results.items():
        setattr(torch.cuda, name, _returning(value))
    torch.cuda.Event = torch.cuda.Stream = torch.cuda.CUDAGraph = torch.Generator = _NoOp  # type: ignore


def _address(tensor: Tensor) -> int:
    """Return a tensor's offset in its memory. Triton has a variant of a kernel for addresses at multiples of 16."""
    return int(tensor.storage_offset()) * tensor.element_size()


def _refuse_dlpack(*_args: object, **_named: object) -> Any:
    raise BufferError("a fake tensor has no memory")


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_named: value


class _NoOp:
    """Stream, event, graph or generator whose methods do nothing."""

    cuda_stream = 0

    def __init__(self, *_args: object, **_named: object) -> None:
        pass

    def elapsed_time(self, _end: object) -> float:
        return 1.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_args, **_named: self


class FakeOperations(TorchFunctionMode):
    """Implements what fake tensors do not support: reading values, copies between devices, and operations that torch's
    bindings refuse for ``cuda`` in a CPU build (indexing, ``contiguous``, ``~``)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: value for name, value in (kwargs or {}).items() if name not in ("generator", "pin_memory")}
        subject = args[0] if args and isinstance(args[0], Tensor) else None
        if subject is None:
            if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == "cuda":
                made = func(*args, **{**kwargs, "device": "cpu"})
                return torch.empty(made.shape, dtype=made.dtype, device=kwargs["device"])
            return func(*args, **kwargs)
        if func in _READS and (isinstance(subject, FakeTensor) or func is torch.equal):
            shape, dtype = tuple(subject.shape), _NUMPY.get(subject.dtype, np.int64)
            return _READS[func](np.full(shape, 0.5) if subject.is_floating_point() else np.ones(shape, dtype))
        if func is Tensor.pin_memory:
            return subject
        if func is Tensor.copy_:
            return subject
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            return _moved(func, subject, *args[1:], **kwargs)
        if subject.device.type == "cuda":
            if func is Tensor.contiguous:
                return subject if subject.is_contiguous() else subject.clone(memory_format=torch.contiguous_format)
            if func is Tensor.__invert__:
                return torch.bitwise_not(subject)
            if func is Tensor.__setitem__:
                return None
            if func is Tensor.__getitem__:
                return _indexed(subject, args[1])
        return func(*args, **kwargs)


def _moved(func: Any, tensor: Tensor, *args: Any, **named: Any) -> Tensor:
    """Return the result of ``to``, ``cpu`` or ``cuda``: a new tensor on another device, a cast on the same one."""
    device, dtype = named.get("device"), named.get("dtype")
    if func is not Tensor.to:
        device = "cpu" if func is Tensor.cpu else "cuda"
    for each in args:
        if isinstance(each, str | torch.device):
            device = each
        elif isinstance(each, torch.dtype):
            dtype = each
        elif isinstance(each, Tensor):
            device, dtype = each.device, each.dtype
    if device is not None and torch.device(device).type != tensor.device.type:
        return torch.empty(tuple(tensor.shape), dtype=dtype or tensor.dtype, device=device)
    if dtype is None or dtype is tensor.dtype:
        return tensor
    return torch.empty_like(tensor, dtype=dtype)


def _indexed(tensor: Tensor, index: Any) -> Tensor:
    """Return ``tensor[index]`` with the shape, strides and offset that a real tensor would have."""
    each = index if isinstance(index, tuple) else (index,)
    if any(isinstance(part, Tensor | list) for part in each):
        shape = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        on_meta = (torch.empty_like(part, device="meta") if isinstance(part, Tensor) else part for part in each)
        return torch.empty(shape[tuple(on_meta)].shape, dtype=tensor.dtype, device=tensor.device)
    with unset_fake_temporarily():  # ten times as fast
        view = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")[index]
    return tensor.as_strided(view.shape, view.stride(), tensor.storage_offset() + view.storage_offset())
