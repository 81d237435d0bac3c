"""How core is wired: no cycle, no other package of ours, nothing heavy before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import attnplug
import attnplug.host
import attnplug.tables

ROOT = Path(attnplug.__file__).parent
MODULES = {
    ".".join(("attnplug", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
KERNEL_LIBRARIES = ("triton", "flashinfer", "flash_attn", "flash_mla", "fla", "cutlass", "transformers")


@cache
def imports_of(path: Path) -> set[str]:
    """Everything a module imports, wherever in it: at the top, in functions, for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


ROOMS = (
    "cli",
    "torch_native",
    "choose",
    "auto",
    "wrappers",
    "layers",
    "mla",
    "author",
    "index",
    "hisparse",
    "contract",
)
ROOMS = (*ROOMS, "kv", "hf", "machine", "declare")
"""From top to bottom: a room imports from those below it."""
FACES = {"attnplug", "attnplug.__main__", "attnplug.host", "attnplug.tables", "attnplug.faces"}


def test_a_room_imports_only_from_those_below_it():
    """The layout says what depends on what. The faces, tables of contents over all rooms, are left out."""
    for name, path in MODULES.items():
        if name in FACES:
            continue
        room = name.split(".")[1]
        for imported in imports_of(path) & set(MODULES) - FACES:
            there = imported.split(".")[1]
            assert ROOMS.index(room) <= ROOMS.index(there), f"{name} imports {imported}"


def test_nothing_in_core_imports_a_face():
    """It would be a cycle through a table of contents."""
    for name, path in MODULES.items():
        if name not in FACES:
            assert not imports_of(path) & FACES - {"attnplug"}, name


def test_core_imports_no_other_package_of_ours():
    for path in MODULES.values():
        assert not {name for name in imports_of(path) if name.startswith("attnplug_")}, path


def test_core_names_no_kernel_library_in_an_import():
    """But for Triton, in the modules that are imported only where it is there."""
    kernels = {"attnplug.kv.triton_rows", "attnplug.mla.triton_heads"}
    kernels |= {"attnplug.hisparse.triton_rows", "attnplug.hisparse.triton_swap"}
    kernels |= {f"attnplug.index.triton_{name}" for name in ("schedule", "score", "topk")}
    for module, path in MODULES.items():
        named = {name.split(".")[0] for name in imports_of(path)} & set(KERNEL_LIBRARIES)
        assert named == ({"triton"} if module in kernels else set()), path


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_attnplug_imports_no_torch():
    """What a plugin's entry point imports must not cost a second."""
    assert run("import sys, attnplug; print('torch' in sys.modules)") == "False"


def test_using_everything_public_initialises_no_cuda_and_imports_no_kernel_library():
    code = f"""
import sys, attnplug, attnplug.host, attnplug.tables
for face in (attnplug, attnplug.host, attnplug.tables):
    for name in face.__all__:
        getattr(face, name)
import torch
loaded = [name for name in {KERNEL_LIBRARIES!r} if name in sys.modules]
print(torch.cuda.is_initialized(), loaded)
"""
    assert run(code) == "False []"


@pytest.mark.parametrize("face", [attnplug, attnplug.host, attnplug.tables], ids=lambda face: face.__name__)
def test_every_name_of_a_face_is_there_for_readers_and_for_type_checkers(face):
    for name in face.__all__:
        assert getattr(face, name) is not None
    (block,) = (node for node in ast.parse(Path(face.__file__).read_text()).body if isinstance(node, ast.If))
    shown = {alias.asname for node in block.body for alias in node.names}
    assert shown == set(face.__all__)


def test_no_name_is_on_both_faces():
    assert not set(attnplug.__all__) & set(attnplug.host.__all__)


def test_unknown_public_name_is_an_attribute_error():
    try:
        attnplug.NoSuchThing  # noqa: B018 (the access is the test)
    except AttributeError as error:
        assert "NoSuchThing" in str(error)
    else:
        raise AssertionError("no error")
