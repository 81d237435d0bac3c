"""No Triton kernel assigns a ``tl.constexpr`` within a loop: Triton 3.6 refuses the second pass, newer ones do not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for pattern in ("*/src", "*/*/src") for path in ROOT.glob(f"{pattern}/**/*.py"))

IN_A_LOOP = """
@triton.jit
def kernel(x, COUNT: tl.constexpr):
    {loop}:
        if COUNT > 1:
            HALF: {annotation} = COUNT // 2
"""


def is_kernel(function: ast.FunctionDef) -> bool:
    """True for functions under ``triton.jit`` or ``gluon.jit``, with or without arguments."""
    return any(ast.unparse(decorator).partition("(")[0].endswith(".jit") for decorator in function.decorator_list)


def kernels(source: str) -> list[ast.FunctionDef]:
    """Return a module's kernels. Modules without Triton are not parsed, which saves most of the time."""
    nodes = ast.walk(ast.parse(source)) if ".jit" in source else ()
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and is_kernel(node)]


def constants_in_loops(source: str) -> Iterator[ast.AnnAssign]:
    """Return the annotated ``tl.constexpr`` assignments within loops of a module's kernels."""
    for kernel in kernels(source):
        for loop in ast.walk(kernel):
            if isinstance(loop, ast.For | ast.While):
                for node in ast.walk(loop):
                    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).split(".")[-1] == "constexpr":
                        yield node


def test_no_kernel_assigns_a_constant_within_a_loop() -> None:
    found = {path: list(constants_in_loops(path.read_text())) for path in SOURCES}
    wrong = [f"{path.relative_to(ROOT)}:{node.lineno}" for path, nodes in found.items() for node in nodes]
    assert not wrong


def test_kernels_of_several_packages_are_read() -> None:
    found = {path.relative_to(ROOT).as_posix().split("/src/")[0] for path in SOURCES if kernels(path.read_text())}
    assert {"engine", "plugins/triton_mha", "plugins/triton_mla", "plugins/sparse"} <= found


@pytest.mark.parametrize("loop", ["for i in range(4)", "for i in tl.static_range(4)", "while COUNT"])
@pytest.mark.parametrize("annotation", ["tl.constexpr", "constexpr", "gl.constexpr"])
@pytest.mark.parametrize("decorator", ["@triton.jit", '@gluon.jit(do_not_specialize=["x"])'])
def test_a_constant_within_a_loop_is_found(loop: str, annotation: str, decorator: str) -> None:
    sample = IN_A_LOOP.format(loop=loop, annotation=annotation).replace("@triton.jit", decorator)
    assert [node.lineno for node in constants_in_loops(sample)] == [6]


@pytest.mark.parametrize(
    "sample",
    [
        IN_A_LOOP.format(loop="if COUNT", annotation="tl.constexpr"),
        IN_A_LOOP.format(loop="for i in range(4)", annotation="int"),
        IN_A_LOOP.format(loop="for i in range(4)", annotation="tl.constexpr").replace("@triton.jit", ""),
    ],
    ids=["outside of a loop", "another annotation", "no kernel"],
)
def test_other_assignments_are_allowed(sample: str) -> None:
    assert not list(constants_in_loops(sample))
