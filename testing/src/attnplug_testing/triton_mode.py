"""Execution mode of Triton kernels in tests: interpreted, compiled on a GPU, or cross-compiled by a server process."""

from __future__ import annotations

import atexit
import inspect
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch


def settle_triton() -> None:
    """Interpret kernels if there is no GPU; otherwise disable autotuning. Call it before any kernel is defined.

    flash-linear-attention tries all configurations of a kernel at its first use, which takes a minute. Any will do.
    """
    if find_spec("triton") is None:  # core's tests run without it
        return
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
        _speed_up_interpreter()
        return
    from triton.runtime.autotuner import Autotuner

    def first_configuration(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.configs[0]
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())

    Autotuner.run = first_configuration


@cache  # settle_triton may be called again
def _speed_up_interpreter() -> None:
    """Remove repeated work from Triton's interpreter.

    At every launch it searches triton.language for the functions to patch, and it patches them again whenever one
    function of a kernel calls another. The list of names does not change, and patches last until the launch is over.
    It also computes every integer sum and product a second time in 64 bits to detect overflows, which a GPU does not.
    """
    from triton.language.core import is_builtin
    from triton.runtime import interpreter

    patch_lang, language = interpreter._patch_lang, interpreter.tl
    only_checks = language.core.builtin(lambda: None).__code__  # that it is called from a kernel

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name in _builtins(package):
            if is_builtin(member := getattr(package, name)):  # not replaced yet
                interpreter._patch_attr(package, name, member, builder, scope)

    @cache
    def seen_by(function: Any) -> list[Any]:
        names = function.__globals__.values()
        return [language, *(module for module in (language.core,) if any(value is module for value in names))]

    def patch_once(function: Any) -> Any:
        if any(is_builtin(module.load) for module in seen_by(function)):
            return patch_lang(function)
        return interpreter._LangPatchScope()

    def patch_attr(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        if getattr(member, "__code__", None) is only_checks:
            member = member.__wrapped__

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        if owner is language.tensor and name in _OPERATORS:
            call = remembered(name, call)
        elif name == "where" and owner in (language, language.core):
            call = remembered_where(call)
        scope.set_attr(owner, name, call)

    remembered, remembered_where = _remembered_operators(), _remembered_where()
    interpreter._patch_attr = patch_attr
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_once
    object.__setattr__(interpreter.interpreter_builder.options, "sanitize_overflow", False)
    _cache_result_types()
    _cache_operand_casts()


def _cache_result_types() -> None:
    """Cache the result type of interpreted operations per shape and dtype: it takes half of the interpreter's time.

    Triton's own code still validates each combination the first time.
    """
    from triton.language import core
    from triton.runtime import interpreter

    constexpr, shapes, dtype = core.constexpr, core.tuple, core.dtype
    same_type = dtype.__eq__
    make_block, same, np_type = core.block_type.__init__, shapes.__eq__, cache(interpreter._get_np_dtype)
    pointer = np_type(core.uint64)

    def tensor_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        return shapes([constexpr(size) for size in shape]), constexpr(math.prod(shape))

    @cache
    def block_of(shape: tuple[int, ...]) -> tuple[Any, str, Any]:
        block = core.block_type.__new__(core.block_type)
        make_block(block, core.int1, list(shape))
        return block, str(block.shape), tensor_of(shape)

    def new_block(self: Any, element_ty: Any, shape: Any) -> None:
        block, text, self.of_tensor = block_of(tuple([x.value if isinstance(x, constexpr) else x for x in shape]))
        self.element_ty, self.shape, self.numel = element_ty, block.shape, block.numel
        self.name = f"<{text}, {element_ty}>"

    def new_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_tensor

    def equal(self: Any, other: Any) -> Any:
        if type(other) is list or type(other) is shapes:
            return constexpr(self.values == list(other))
        return same(self, other)

    def equal_type(self: Any, other: Any) -> bool:
        return self is other or same_type(self, other)

    dtype.of_tensor = tensor_of(())  # of a scalar
    dtype.__eq__ = equal_type
    core.block_type.__init__ = new_block
    core.tensor.__init__ = new_tensor
    shapes.__eq__ = equal
    # It would check that numbers are as wide as their type; numpy gave them that type.
    interpreter.TensorHandle.__post_init__ = lambda self: None
    interpreter._get_np_dtype = lambda type: pointer if type.scalar.is_ptr() else np_type(type.scalar)


def _cache_operand_casts() -> None:
    """Cache type promotion and broadcasting of binary operations per pair of types.

    Triton's own code handles a pair the first time; later calls repeat its casts and broadcast shapes. A number becomes
    the same read-only tensor each time. A broadcast copies, which for small blocks takes a fifth of a view's time.
    """
    import numpy
    from triton.language import core, semantic
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    rules, tensor, constexpr = semantic.TritonSemantic, core.tensor, core.constexpr
    check, broadcast, unwrap = rules.binary_op_type_checking_impl, rules.broadcast_impl_value, core._unwrap_if_constexpr
    cast, plain, opened = rules.cast, {tensor}, (constexpr, core.tuple, list, tuple)
    cast_to: dict[Any, tuple[Any, Any]] = {}
    spread_to: dict[Any, tuple[Any, Any]] = {}
    numbers: dict[Any, tuple[Any, Any]] = {}
    cast_handle, casts = InterpreterBuilder.cast_impl, list[tuple[Any, Any, Any]]()
    cast_by: dict[Any, tuple[Any, Any]] = {}

    def other_dtype(before: Any, after: Any) -> Any:
        return None if before.dtype == after.dtype else after.dtype

    def operands(self: Any, lhs: Any, rhs: Any, *how: bool, **more: bool) -> Any:
        if more or type(lhs) is not tensor:
            return check(self, lhs, rhs, *how, **more)
        if type(rhs) is tensor:
            key = lhs.type.name, rhs.type.name, how
            if key not in cast_to:
                found = check(self, lhs, rhs, *how)
                cast_to[key] = other_dtype(lhs, found[0]), other_dtype(rhs, found[1])
                return found
            left, right = cast_to[key]
            lhs = lhs if left is None else self.cast(lhs, left)
            return broadcast_once(self, lhs, rhs if right is None else self.cast(rhs, right))
        if type(rhs) is not int and (type(rhs) is not float or rhs == 0):  # which may be -0.0
            return check(self, lhs, rhs, *how)
        number_key = lhs.type.name, type(rhs), rhs, how
        if number_key in numbers:
            left, number = numbers[number_key]
            return lhs if left is None else self.cast(lhs, left), number
        found = check(self, lhs, rhs, *how)
        handle = found[1].handle
        handle.data = numpy.broadcast_to(handle.data.reshape(-1)[:1], handle.data.shape)
        numbers[number_key] = other_dtype(lhs, found[0]), found[1]
        return found

    def spread(value: Any, wider: Any) -> Any:
        narrow = value.handle
        data = numpy.empty(wider.shape.values, narrow.data.dtype)
        data[...] = narrow.data
        return tensor(TensorHandle(data, narrow.dtype.scalar), wider)

    def broadcast_once(self: Any, lhs: Any, rhs: Any) -> Any:
        key = lhs.type.name, rhs.type.name
        if key not in spread_to:
            found = broadcast(self, lhs, rhs)
            wider = (None if after is before else after.type for before, after in zip((lhs, rhs), found, strict=True))
            spread_to[key] = next(wider), next(wider)
            return found
        left, right = spread_to[key]
        return lhs if left is None else spread(lhs, left), rhs if right is None else spread(rhs, right)

    def unwrap_once(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        if issubclass(kind, opened):
            return value.value if kind is constexpr else unwrap(value)
        plain.add(kind)
        return value

    def noted_cast(self: Any, handle: Any, target: Any) -> Any:
        result = cast_handle(self, handle, target)
        if len(casts) < 2:
            casts.append((handle, target, result))
        return result

    def cast_once(self: Any, value: Any, dtype: Any, rounding: Any = None) -> Any:
        if value.dtype is dtype:
            return value
        if rounding is not None or type(value) is not tensor:
            return cast(self, value, dtype, rounding)
        key = value.type.name, dtype.name
        found = cast_by.get(key)
        if found is None:
            casts.clear()
            result = cast(self, value, dtype, None)
            if len(casts) == 1 and casts[0][0] is value.handle and casts[0][2] is result.handle:
                cast_by[key] = casts[0][1], result.type
            return result
        target, made = found
        return tensor(cast_handle(self.builder, value.handle, target), made)

    def expand(self: Any, handle: Any, axis: int) -> Any:
        data = handle.data
        return TensorHandle(data.reshape(*data.shape[:axis], 1, *data.shape[axis:]), handle.dtype.scalar)

    rules.binary_op_type_checking_impl = operands
    rules.broadcast_impl_value = broadcast_once
    rules.cast = cast_once
    InterpreterBuilder.create_expand_dims = expand
    InterpreterBuilder.cast_impl = noted_cast
    core._unwrap_if_constexpr = unwrap_once


_NAMES = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "gt", "ge", "lt", "le", "eq", "ne")
_OPERATORS = frozenset(f"__{name}__" for name in _NAMES)


def _remembered_operators() -> Callable[[str, Callable[..., Any]], Callable[[Any, Any], Any]]:
    """Return a function that makes an operator of tensors remember, per pair of types, what Triton's own code did.

    That code is a chain of ten calls which ends in one call of numpy. Where it does no more than that, later operations
    on the same types make numpy's call at once, which broadcasts as Triton does. All other pairs take Triton's way.
    """
    import numpy
    from triton.language.core import constexpr, tensor
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    binary, divide, add_pointer = (
        getattr(InterpreterBuilder, name) for name in ("binary_op", "create_idiv", "create_addptr")
    )
    bitwise = (numpy.bitwise_and, numpy.bitwise_or, numpy.bitwise_xor)
    calls: list[tuple[Any, Any, Any, Any]] = []  # function of numpy, both operands and result of the builder's calls
    unknown = object()

    def note(function: Any, lhs: Any, rhs: Any, result: Any) -> Any:
        if len(calls) < 2:
            calls.append((function, lhs, rhs, result))
        return result

    def noted_binary(self: Any, lhs: Any, rhs: Any, function: Any) -> Any:
        return note(function, lhs, rhs, binary(self, lhs, rhs, function))

    def noted_divide(self: Any, lhs: Any, rhs: Any) -> Any:
        return note(lambda x, y: (x - numpy.fmod(x, y)) // y, lhs, rhs, divide(self, lhs, rhs))

    def noted_pointer(self: Any, pointer: Any, offset: Any) -> Any:
        width = max(1, pointer.get_element_ty().primitive_bitwidth // 8)
        result = add_pointer(self, pointer, offset)
        return note(lambda x, y: x + width * y.astype(numpy.uint64), pointer, offset, result)

    def cast_of(before: Any, after: Any) -> Any:
        """Return the type that numpy casts an operand to, None for no cast, and False for a cast of Triton's own."""
        if before.data.dtype == after.data.dtype:
            return None
        return after.data.dtype if before.dtype.scalar.is_int() and after.dtype.scalar.is_int() else False

    def recipe_of(lhs: Any, rhs: Any, result: Any) -> Any:
        """Return what to repeat, or None. ``rhs`` is None for a number, which has become a tensor of one value."""
        if len(calls) != 1 or type(result) is not tensor or calls[0][3] is not result.handle:
            return None
        function, left, right, made = calls[0]
        casts = cast_of(lhs.handle, left), None if rhs is None else cast_of(rhs.handle, right)
        wraps = left.data.dtype == right.data.dtype == bool and function not in bitwise  # one bit, unlike numpy's bool
        if wraps or False in casts:
            return None
        number = right.data if rhs is None else None
        of_tensor = result.type, result.dtype, result.shape, result.numel
        return function, *casts, number, made.data.dtype, made.dtype, *of_tensor

    recipes: dict[Any, Any] = {}
    new = tensor.__new__

    def remembered(name: str, call: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        def operator(lhs: Any, rhs: Any) -> Any:
            kind = type(rhs)
            if kind is constexpr:
                rhs = rhs.value
                kind = type(rhs)
            key: Any
            if kind is tensor:
                key = name, lhs.type.name, rhs.type.name
            elif kind is int or (kind is float and rhs != 0):  # 0.0 and -0.0 are one key
                key = name, lhs.type.name, kind, rhs
            else:
                return call(lhs, rhs)
            recipe = recipes.get(key, unknown)
            if recipe is None:
                return call(lhs, rhs)
            if recipe is unknown:
                calls.clear()
                result = call(lhs, rhs)
                recipes[key] = recipe_of(lhs, rhs if kind is tensor else None, result)
                return result
            function, left, right, number, dtype, handle, block, scalar, shape, numel = recipe
            x, y = lhs.handle.data, rhs.handle.data if number is None else number
            data = function(x if left is None else x.astype(left), y if right is None else y.astype(right))
            if data.dtype is not dtype:
                data = data.astype(dtype)
            made = new(tensor)
            made.handle, made.type, made.dtype = TensorHandle(data, handle), block, scalar
            made.shape, made.numel = shape, numel
            return made

        return operator

    InterpreterBuilder.binary_op = noted_binary
    InterpreterBuilder.create_idiv = noted_divide
    InterpreterBuilder.create_addptr = noted_pointer
    return remembered


def _remembered_where() -> Callable[[Callable[..., Any]], Callable[[Any, Any, Any], Any]]:
    """Return a function that makes ``where`` remember what Triton's own code did, as operators do."""
    import numpy
    from triton.language.core import constexpr, int1, tensor
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    ternary, selected, recipes = InterpreterBuilder.ternary_op, list[Any](), dict[Any, Any]()

    def noted(self: Any, condition: Any, x: Any, y: Any, function: Any) -> Any:
        result = ternary(self, condition, x, y, function)
        if len(selected) < 2:
            selected.append((function, x, y, result))
        return result

    def key_of(value: Any) -> Any:
        kind = type(value)
        if kind is tensor:
            return value.type.name
        return (kind, str(value)) if kind is int or kind is float else None

    def remembered(call: Callable[..., Any]) -> Callable[[Any, Any, Any], Any]:
        def where(condition: Any, x: Any, y: Any) -> Any:
            x, y = (each.value if type(each) is constexpr else each for each in (x, y))
            of_x, of_y = key_of(x), key_of(y)
            if type(condition) is not tensor or condition.dtype is not int1 or of_x is None or of_y is None:
                return call(condition, x, y)
            key = condition.type.name, of_x, of_y
            recipe = recipes.get(key)
            if recipe is None:
                selected.clear()
                result = call(condition, x, y)
                if len(selected) == 1 and selected[0][0] is numpy.where and selected[0][3] is result.handle:
                    pairs = tuple(zip((x, y), selected[0][1:3], strict=True))
                    numbers = [None if type(given) is tensor else handle.data for given, handle in pairs]
                    if all(type(given) is not tensor or given.dtype is handle.dtype for given, handle in pairs):
                        recipes[key] = *numbers, result.handle.dtype, result.type
                return result
            number_x, number_y, dtype, block = recipe
            left = x.handle.data if number_x is None else number_x
            right = y.handle.data if number_y is None else number_y
            return tensor(TensorHandle(numpy.where(condition.handle.data, left, right), dtype), block)

        return where

    InterpreterBuilder.ternary_op = noted
    return remembered


@cache
def _builtins(package: object) -> list[str]:
    """Names of the builtins to patch. The first call must precede any patching."""
    from triton.language.core import is_builtin

    return [name for name, member in inspect.getmembers(package) if is_builtin(member)]


def compiled_by(script: Path, *arguments: str) -> Any:
    """Run a script that cross-compiles kernels (see ``attnplug_testing.ahead``) and return the JSON that it prints."""
    server = _compile_server()
    assert server.stdin is not None and server.stdout is not None
    with TemporaryDirectory() as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        server.stdin.write(json.dumps(list(map(str, (output, errors, script, *arguments)))) + "\n")
        server.stdin.flush()
        code = server.stdout.readline().strip()
        assert code == "0", f"exit code {code}: {errors.read_text()[-2000:]}"
        return json.loads(output.read_text())


@cache
def _compile_server() -> subprocess.Popen[str]:
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, (str(here.parent), os.environ.get("PYTHONPATH"))))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    server = subprocess.Popen(
        [sys.executable, str(here / "compile_server.py")],
        env={**environment, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)  # at the end of its input it ends
    return server
