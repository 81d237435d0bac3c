"""Interpreter of Gluon kernels on a CPU. Triton's interpreter does not run Gluon.

``interpreted(kernel, seed)`` replaces a kernel where it is launched. ``interpreted(kernel, seed)[grid](*arguments,
**constants)`` calls the kernel's Python function with NumPy arrays, and with the functions of this module instead of
Gluon's. Arguments are torch's tensors, Gluon's descriptors of them, and numbers.

Partitions of ``warp_specialize`` are threads of which one runs at a time. Asynchronous copies and products execute
later than they are started. At every operation on barriers or shared memory, random priorities decide what proceeds: a
partition, a copy or a product. They follow from ``seed``, so a failure can be repeated. ``GluonError`` reports

- a deadlock, with the barriers that partitions wait for,
- a copy to shared memory, or a store of other values, while a product reads it,
- a read or a store during a copy to the same memory,
- use of a product's result before it is complete; products and copies that are not waited for,
- more arrivals or bytes than a barrier expects,
- loads and stores outside a tensor.

Shared memory is NaN until it is written, and during copies to it.

What is not modelled:

- Rounding: floats have 64 bits, except in tensors of fewer bits. Integers have 64 bits.
- Layouts, swizzling, bank conflicts and registers.
- The warps of a partition: they execute its program in order and together. Barriers among them have no effect.
- The memory model: fences have no effect, and a store is visible to all at once.
- Concurrent programs: those of a grid run one after another, in random order. Programmatic dependent launch has no
  effect.
"""

from __future__ import annotations

import builtins
import linecache
import random
import sys
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import cuda
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from attnplug_testing.gluon_scheduler import Barrier, Block, GluonError, Pending, Scheduler, Shared, block


def interpreted(kernel: Any, seed: int) -> Any:
    """Return a replacement of a kernel under ``gluon.jit``."""
    return _Interpreter(kernel, seed)


def mutant(module: ModuleType, correct: str, wrong: str, folder: Path) -> Any:
    """Return a copy of a module with an error in its source: ``wrong`` instead of ``correct``, which occurs once."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    assert source.count(correct) == 1, correct
    path = folder / f"mutant_of_{Path(str(module.__file__)).name}"
    path.write_text(source.replace(correct, wrong), encoding="utf-8")
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


class _Interpreter:
    def __init__(self, kernel: Any, seed: int) -> None:
        self._params, self._random = kernel.params, random.Random(seed)
        self._scheduler = Scheduler(self._random)
        self._replaced: dict[int, Any] = {}
        """Replacements of modules and functions, by the ids of these: a kernel's hash takes milliseconds."""
        # Kernels import some of Gluon's functions by name, others with their module.
        for module, functions in _language(self._scheduler):
            self._replaced[id(module)] = functions
            for name in dir(functions):
                if hasattr(module, name) and not name.startswith("_"):
                    self._replaced[id(getattr(module, name))] = getattr(functions, name)
        self._function = self._python(kernel)

    def _python(self, kernel: Any) -> Any:
        """Return the Python function of a kernel or of a function that it calls, with its globals replaced."""
        found, values = kernel.fn, {"__builtins__": builtins}
        function = FunctionType(found.__code__, values, found.__name__, found.__defaults__)
        self._replaced[id(kernel)] = function
        for name in found.__code__.co_names:
            if name in found.__globals__:
                values[name] = self._replace(found.__globals__[name])
        return function

    def _replace(self, value: Any) -> Any:
        if isinstance(value, tl.constexpr):
            return value.value
        if id(value) in self._replaced:
            return self._replaced[id(value)]
        return self._python(value) if isinstance(value, (JITFunction, InterpretedFunction)) else value

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            names = [param.name for param in self._params]
            given = dict(zip(names, arguments, strict=False)) | constants
            values = [_argument(given[param.name], param.is_constexpr) for param in self._params]
            programs = list(product(*map(range, grid)))
            self._random.shuffle(programs)
            with np.errstate(all="ignore"):
                for program in programs:
                    self._scheduler.run(program, grid, lambda: self._function(*values))

        return launch


def _argument(value: Any, constant: bool) -> Any:
    if isinstance(value, Tensor):
        extent = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)) + 1
        return _Pointer(value.as_strided((extent if value.numel() else 0,), (1,)), 0)
    return value if constant or isinstance(value, TensorDescriptor) else block(value)


class _Pointer:
    """Addresses of elements of a flat tensor."""

    def __init__(self, memory: Tensor, offset: Any) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=float if memory.is_floating_point() else int)

    def __add__(self, other: Any) -> _Pointer:
        return _Pointer(self.memory, self.offset + other)

    def __getitem__(self, key: Any) -> _Pointer:
        return _Pointer(self.memory, block(self.offset)[key])

    def find(self, mask: Any, values: Any) -> tuple[Tensor, Any, Any]:
        """Return the offsets that ``mask`` selects; and ``mask`` and ``values``, broadcast to all offsets."""
        offset, live, values = np.broadcast_arrays(self.offset, True if mask is None else mask, values)
        used = np.asarray(offset)[live]
        if used.size and not (used.min() >= 0 and used.max() < len(self.memory)):
            raise GluonError(f"access of {used.min()} to {used.max()} in a tensor of {len(self.memory)}")
        return torch.from_numpy(used), live, values


def _language(scheduler: Scheduler) -> list[tuple[Any, Any]]:
    """Return Gluon's modules and what replaces their functions."""
    barriers, copies, products = _Barriers(scheduler), _Copies(scheduler), _Products(scheduler)
    # Names in newer versions, and in Triton 3.6.
    loads = "async_load", "async_copy_global_to_shared"
    no_effect = dict.fromkeys(("barrier", "thread_barrier", "fence_async_shared"), _nothing)
    layouts = dict.fromkeys((name for name in dir(gl) if name.endswith("Layout")), _nothing)

    def allocate(dtype: type, shape: Sequence[int], layout: Any) -> Any:
        if layout is Barrier:
            return SimpleNamespace(index=[Barrier(number) for number in range(shape[0])].__getitem__)
        return Shared.allocate(scheduler, shape)

    language = SimpleNamespace(
        **layouts,
        **no_effect,
        static_range=range,
        float32=float,
        int32=int,
        int64=int,
        program_id=lambda dim: block(scheduler.program[dim]),
        num_programs=lambda dim: block(scheduler.grid[dim]),
        allocate_shared_memory=allocate,
        warp_specialize=scheduler.specialize,
        load=_load,
        store=_store,
        atomic_add=_atomic_add,
        arange=lambda start, end, layout=None: block(np.arange(start, end)),
        full=lambda shape, value, dtype, layout=None: block(np.full(shape, value, np.int64 if dtype is int else float)),
        where=lambda condition, x, y: block(np.where(condition, x, y)),
        maximum=lambda x, y: block(np.fmax(x, y)),
        minimum=lambda x, y: block(np.fmin(x, y)),
        max=lambda x, axis: block(np.fmax.reduce(x, axis)),
        sum=lambda x, axis: block(np.sum(x, axis)),
        exp=lambda x: block(np.exp(x)),
        exp2=lambda x: block(np.exp2(x)),
        rsqrt=lambda x: block(1 / np.sqrt(x)),
        ceil=lambda x: block(np.ceil(x)),
        log2=lambda x: block(np.log2(x)),
        expand_dims=lambda x, axis: block(np.expand_dims(x, axis)),
        broadcast=lambda x, y: tuple(map(block, np.broadcast_arrays(x, y))),
        convert_layout=lambda x, layout, assert_trivial=False: x,
    )
    return [
        (gl, language),
        (tl, language),
        (cuda, SimpleNamespace(gdc_wait=_nothing, gdc_launch_dependents=_nothing)),
        (ampere, SimpleNamespace(mma_v2=lambda a, b, acc: acc + a @ b)),
        (
            ampere.async_copy,
            SimpleNamespace(
                **dict.fromkeys(loads, copies.elements), commit_group=copies.commit, wait_group=copies.wait
            ),
        ),
        (hopper, SimpleNamespace(**no_effect, warpgroup_mma=products.start, warpgroup_mma_wait=products.wait)),
        (hopper.mbarrier, barriers),
        (hopper.tma, SimpleNamespace(**dict.fromkeys(loads, copies.rows))),
    ]


def _nothing(*arguments: Any, **options: Any) -> None: ...


def _load(pointer: _Pointer, mask: Any = None, other: Any = 0, cache_modifier: str = "") -> Block:
    used, live, values = pointer.find(mask, other)
    integers = not pointer.memory.is_floating_point()
    result = np.array(values, np.int64 if integers else np.float64)
    found = pointer.memory[used]
    result[live] = (found.long() if integers else found.double()).numpy()
    return block(result)


def _store(pointer: _Pointer, values: Any, mask: Any = None) -> None:
    used, live, values = pointer.find(mask, values)
    pointer.memory[used] = torch.from_numpy(np.asarray(values)[live]).to(pointer.memory.dtype)


def _atomic_add(pointer: _Pointer, value: Any, sem: str, scope: str) -> Block:
    before = _load(pointer)
    _store(pointer, before + value)
    return before


class _Barriers:
    """Functions of ``mbarrier``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def MBarrierLayout(self) -> Any:
        return Barrier

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.missing = count

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        self._scheduler.pause()
        barrier.bytes += nbytes
        barrier.add(1, 0)

    def arrive(self, barrier: Barrier, count: int = 1) -> None:
        self._scheduler.pause()
        barrier.add(count, 0)

    def wait(self, barrier: Barrier, phase: Any) -> None:
        frame = sys._getframe(1)
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        where = f"in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {line}, barrier {barrier.index}"
        self._scheduler.pause(
            lambda: barrier.phases % 2 != phase,
            f"{where}: {barrier.phases} phases have completed, and phase parity is {phase}",
        )


class _Products:
    """Functions of ``wgmma``."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def start(self, a: Any, b: Shared, acc: Any, use_acc: Any = True, is_async: bool = False) -> Any:
        self._scheduler.pause()
        leave = [each.read() for each in (a, b) if isinstance(each, Shared)]

        def execute() -> None:
            before = acc.result if isinstance(acc, Pending) else acc
            found = (a.values if isinstance(a, Shared) else a) @ b.values
            pending.result = block(found + before if use_acc else found)
            queue.remove(pending)
            for each in leave:
                each()

        queue = self._scheduler.current.products
        pending = self._scheduler.start(execute, queue)
        return pending if is_async else self.wait(0, (pending,))

    def wait(self, count: int, deps: Sequence[Pending]) -> Any:
        queue = self._scheduler.current.products
        self._scheduler.pause(lambda: len(queue) <= count, "for products")
        if not all(dep.finished for dep in deps):
            raise GluonError(f"the result of a product that may be among the last {count}")
        return deps[0].result if len(deps) == 1 else tuple(dep.result for dep in deps)


class _Copies:
    """Asynchronous copies: TMA, which completes at a barrier, and ``cp.async``, which has groups."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def rows(self, descriptor: Any, at: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        """Copy ``block_shape`` rows and columns from ``at``; zeros outside the tensor."""
        self._scheduler.pause()
        (row, column), (rows, columns) = map(int, at), descriptor.block_shape
        if (rows, columns) != to.shape:
            raise GluonError(f"a copy of {rows} rows of {columns} to shared memory of {to.shape}")
        end = to.write()

        def execute() -> None:
            top, left = max(row, 0), max(column, 0)
            found = descriptor.base[top : max(row + rows, 0), left : max(column + columns, 0)].double().numpy()
            to.values[...] = 0.0
            to.values[top - row :, left - column :][: found.shape[0], : found.shape[1]] = found
            end()
            barrier.add(0, to.values.size * descriptor.layout.element_bitwidth // 8)

        self._scheduler.start(execute)

    def elements(self, to: Shared, pointer: _Pointer, mask: Any = None, eviction_policy: str = "") -> None:
        """Copy to shared memory; zeros for masked elements."""
        self._scheduler.pause()
        end = to.write()

        def execute() -> None:
            to.values[...] = _load(pointer, mask, 0.0)
            end()
            for group in me.copies:
                group[:] = [each for each in group if each is not pending]

        me = self._scheduler.current
        me.copies = me.copies or [[]]
        pending = self._scheduler.start(execute)
        me.copies[-1].append(pending)

    def commit(self) -> None:
        self._scheduler.current.copies.append([])

    def wait(self, count: int) -> None:
        """Wait until ``count`` groups at most are under way."""
        me = self._scheduler.current
        groups = me.copies[: len(me.copies) - 1 - count]
        self._scheduler.pause(lambda: not any(groups), "for copies")
        me.copies = me.copies[len(groups) :]
