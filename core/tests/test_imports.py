"""Layers of core, its public modules, and the cost of importing them."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import attnplug

ROOT = Path(attnplug.__file__).parent
MODULES = {
    ".".join(("attnplug", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
KERNEL_LIBRARIES = ("triton", "flashinfer", "flash_attn", "flash_mla", "fla", "cutlass", "transformers")
LIMITS = {"attnplug": 42, "attnplug.host": 60}
PUBLIC = [
    import_module(name)
    for name in (*LIMITS, *(f"attnplug.{name}" for name in ("kernels", "linear", "sparse", "tables")))
]
TOP = {module.__name__ for module in PUBLIC} | {"attnplug.__main__", "attnplug._exports"}
"""Modules outside the folders."""
FOLDERS = (
    *("cli", "torch_native", "registry", "auto", "wrappers", "layers", "mla"),
    *("author", "contract", "kv", "hf", "machine", "declare"),
)
"""From top to bottom: a folder imports only from those below it."""


@cache
def imports_of(path: Path) -> set[str]:
    """Return everything a module imports: at the top, in functions, for type checking."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_a_folder_imports_only_from_those_below_it():
    for name, path in MODULES.items():
        if name in TOP:
            continue
        folder = name.split(".")[1]
        for imported in imports_of(path) & set(MODULES) - TOP:
            assert FOLDERS.index(folder) <= FOLDERS.index(imported.split(".")[1]), f"{name} imports {imported}"


def test_core_has_at_most_13_000_lines():
    """Core contains only what backends and hosts need to work together, and the basic commands."""
    assert sum(path.read_text().count("\n") for path in MODULES.values()) <= 13_000


def test_no_module_of_core_imports_a_public_module():
    """This would be an import cycle through a table of contents."""
    for name, path in MODULES.items():
        if name not in TOP:
            assert not imports_of(path) & TOP - {"attnplug"}, name


def test_core_imports_no_other_package_of_ours():
    for path in MODULES.values():
        assert not {name for name in imports_of(path) if name.startswith("attnplug_")}, path


def test_core_imports_no_kernel_library():
    """Except Triton, in a module that is imported only if it is installed."""
    kernels = {"attnplug.kv.triton_rows"}
    for module, path in MODULES.items():
        named = {name.split(".")[0] for name in imports_of(path)} & set(KERNEL_LIBRARIES)
        assert named == ({"triton"} if module in kernels else set()), path


def test_the_entry_point_imports_nothing_before_it_handles_an_interrupt():
    """Ctrl-C while ``attnplug.__main__`` is imported shows a traceback; it takes 1 ms."""
    code = "import sys; before = set(sys.modules); import attnplug.__main__; print(sorted(set(sys.modules) - before))"
    assert run(code) == str(["__future__", "attnplug", "attnplug.__main__", "attnplug._exports"])


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_attnplug_imports_no_torch_and_leaves_the_process_alone():
    """A plugin's entry point imports it, and so does any program that embeds it."""
    code = "import sys; hook = sys.excepthook; import attnplug; print('torch' in sys.modules, sys.excepthook is hook)"
    assert run(code) == "False True"


def test_using_everything_public_initialises_no_cuda_and_imports_no_kernel_library():
    code = f"""
import importlib, sys
for module in {[module.__name__ for module in PUBLIC]!r}:
    module = importlib.import_module(module)
    for name in module.__all__:
        getattr(module, name)
import torch
loaded = [name for name in {KERNEL_LIBRARIES!r} if name in sys.modules]
print(torch.cuda.is_initialized(), loaded)
"""
    assert run(code) == "False []"


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_every_public_name_is_defined_where_the_stub_says(module):
    assert module.__all__ and len(module.__all__) <= LIMITS.get(module.__name__, len(module.__all__))
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    for node in stub.body:
        assert isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names:
            assert alias.asname == alias.name, "only names written 'X as X' are re-exported to type checkers"
            assert getattr(module, alias.name) is getattr(import_module(node.module), alias.name)


def test_a_name_is_public_in_one_module_only():
    names = [name for module in PUBLIC for name in module.__all__]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_a_missing_name_is_an_attribute_error(module):
    assert not hasattr(module, "NoSuchThing")
    with pytest.raises(AttributeError, match="NoSuchThing"):
        _ = module.NoSuchThing
    with pytest.raises(ImportError):
        exec(f"from {module.__name__} import NoSuchThing")
