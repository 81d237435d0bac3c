"""How core is wired: no cycle, no other package of ours, nothing heavy before it is needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import attnplug

ROOT = Path(attnplug.__file__).parent
MODULES = {
    ".".join(("attnplug", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
KERNEL_LIBRARIES = ("triton", "flashinfer", "flash_attn", "flash_mla", "fla", "cutlass", "transformers")


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


def test_there_is_no_import_cycle():
    """Not even inside functions or for type checking. The package itself is the table of contents, and left out."""
    graph = {
        name: {imported for imported in imports_of(path) if imported in MODULES and imported not in (name, "attnplug")}
        for name, path in MODULES.items()
        if name not in ("attnplug", "attnplug.__main__")
    }
    TopologicalSorter(graph).prepare()  # raises CycleError, with the cycle


def test_nothing_in_core_imports_the_package_itself_by_its_public_face():
    """It would be a cycle through the table of contents."""
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "attnplug":
                assert all(f"attnplug.{alias.name}" in MODULES for alias in node.names), f"{name} imports a public name"


def test_core_imports_no_other_package_of_ours():
    for path in MODULES.values():
        assert not {name for name in imports_of(path) if name.startswith("attnplug_")}, path


def test_core_names_no_kernel_library_in_an_import():
    """But for Triton, in the one module that is imported only where it is there."""
    for module, path in MODULES.items():
        named = {name.split(".")[0] for name in imports_of(path)} & set(KERNEL_LIBRARIES)
        assert named == ({"triton"} if module == "attnplug.kv.triton_rows" else set()), path


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_attnplug_imports_no_torch():
    """What a plugin's entry point imports must not cost a second."""
    assert run("import sys, attnplug; print('torch' in sys.modules)") == "False"


def test_using_everything_public_initialises_no_cuda_and_imports_no_kernel_library():
    code = f"""
import sys, attnplug
for name in attnplug.__all__:
    getattr(attnplug, name)
import torch
loaded = [name for name in {KERNEL_LIBRARIES!r} if name in sys.modules]
print(torch.cuda.is_initialized(), loaded)
"""
    assert run(code) == "False []"


def test_every_public_name_is_there_and_the_list_is_whole():
    for name in attnplug.__all__:
        assert getattr(attnplug, name) is not None
    lazy = set(attnplug._MODULE_OF)
    assert lazy <= set(attnplug.__all__)
    public = {name for name, value in vars(attnplug).items() if not name.startswith("_") and name not in MODULES_SHORT}
    assert public - {"annotations", "importlib", "TYPE_CHECKING", "Any"} <= set(attnplug.__all__)


MODULES_SHORT = {name.split(".")[1] for name in MODULES if "." in name}


def test_unknown_public_name_is_an_attribute_error():
    try:
        attnplug.NoSuchThing  # noqa: B018 (the access is the test)
    except AttributeError as error:
        assert "NoSuchThing" in str(error)
    else:
        raise AssertionError("no error")
