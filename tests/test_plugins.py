"""Properties of every plugin of this repository: found, cheap to list, and refused before it is built."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from attnplug import BackendSpec, Problem, Role
from attnplug.auto.table_store import read_tables, table_files
from attnplug.declare.device import Processor
from attnplug.host import load_registry
from attnplug_testing.command import Explained
from attnplug_testing.configs import KIMI_LINEAR, read

ROOT = Path(__file__).parent.parent
FOLDERS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
NAMES = {"flashmla": {"flashmla", "flashmla_sparse"}, "hybrid_linear": {"torch", "fla"}, "sparse": {"torch_sparse"},
         "kv_formats": set()}  # fmt: skip
"""Backends of plugins without a backend of their own name."""


def specs_of(folder: str) -> list[BackendSpec]:
    return getattr(import_module(f"attnplug_{folder}.plugin"), "attnplug_backends", list)()


SPECS = [spec for folder in FOLDERS for spec in specs_of(folder)]
of_every_backend = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
MODULES = {module for spec in SPECS for _, module in (need for need in spec.requires if not isinstance(need, str))}
HEAVY = sorted(MODULES | {"cutlass", "deep_gemm", "flash_attn", "numpy", "torch", "triton"})
LIBRARY_CODES = {"requirement", "import"}


def answer(code: str) -> Any:
    """JSON printed by a separate process: in this one, the modules in question may be imported already."""
    program = f"import json, sys\nfrom importlib import import_module\nfolders, heavy = {FOLDERS!r}, {HEAVY!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def own_codes(spec: BackendSpec, problem: Problem, role: Role | None) -> set[str]:
    """Codes of refusals other than missing libraries."""
    return {reason.code for reason in spec.refusals(problem, role)} - LIBRARY_CODES


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_is_found_by_its_entry_point(folder: str) -> None:
    """D1"""
    distribution = f"attnplug-{folder.replace('_', '-')}"
    backends = load_registry(environment={}).backends.items()
    found = {name: each.spec for name, each in backends if each.source.distribution == distribution}
    assert found == {spec.name: spec for spec in specs_of(folder)}
    assert set(found) == NAMES.get(folder, {folder})


def test_the_tables_that_a_package_ships_are_of_its_own_backends() -> None:
    """Tables are found by the device's name, and each can be read."""
    registry = load_registry(environment={})
    for folder in registry.table_folders:
        files = {path: read_tables(path) for path in folder.value.iterdir()}
        assert files
        for path, file in files.items():
            assert str(path) in [found.path for found in table_files([folder], Processor(file.device, file.sm))]
            assert {registry.backends[table.backend].source for table in file.tables} == {folder.source}


def test_nothing_heavy_is_imported_to_list_or_to_refuse_it() -> None:
    """``attnplug backends`` and ``explain`` stay quick: they import no heavy library, whichever are installed."""
    code = """
from attnplug import DType, GraphLevel, Problem, Role
asked = {"kv_dtype": DType.FLOAT8_E4M3, "cuda_graph": GraphLevel.DECODE, "page_size": 64}
problems = [Problem(), Problem(device="cpu"), *(Problem(device="cuda", sm=sm, **asked) for sm in (80, 90, 100))]
imported = {}
for folder in folders:
    for spec in getattr(import_module(f"attnplug_{folder}.plugin"), "attnplug_backends", list)():
        for problem in problems:
            for role in (None, *Role):
                spec.refusals(problem, role)
        imported[spec.name] = [name for name in heavy if name in sys.modules]
print(json.dumps(imported))
"""
    assert answer(code) == {spec.name: [] for spec in SPECS}


@pytest.fixture(scope="module")
def raised() -> dict[str, str | None]:
    """Errors of importing each backend's factory where no library but torch can be imported."""
    code = """
sys.modules.update(dict.fromkeys(set(heavy) - {"torch", "numpy"}))
raised = {}
for folder in folders:
    for spec in getattr(import_module(f"attnplug_{folder}.plugin"), "attnplug_backends", list)():
        try:
            import_module(spec.factory.partition(":")[0])
        except BaseException as error:
            raised[spec.name] = f"{type(error).__name__}: {error}"
        else:
            raised[spec.name] = None
print(json.dumps(raised))
"""
    return answer(code)


@of_every_backend
def test_a_library_that_cannot_be_imported_fails_with_the_factorys_module(
    spec: BackendSpec, raised: dict[str, str | None]
) -> None:
    """D2: before anything is built, with what to install. It is one that the spec requires."""
    error, required = raised[spec.name], [need if isinstance(need, str) else need[0] for need in spec.requires]
    if error is None:
        assert not required
    else:
        assert error.startswith("BackendError: ") and "cannot be imported" in error
        assert any(f"pip install '{requirement}'" in error for requirement in required), error


@of_every_backend
def test_its_factory_is_there_where_its_libraries_are(spec: BackendSpec) -> None:
    """D1"""
    if lacking := [reason for reason in spec.refusals(Problem()) if reason.code in LIBRARY_CODES]:
        pytest.skip("; ".join(map(str, lacking)))
    module, _, name = spec.factory.partition(":")
    assert callable(getattr(import_module(module), name))


@of_every_backend
def test_what_is_not_decided_is_no_reason_against_it(spec: BackendSpec) -> None:
    """D3: in any role that it claims, on any of its devices."""
    for device in (None, *(spec.capabilities.devices or ("cpu", "cuda", "acme"))):
        for role in (None, *spec.capabilities.roles):
            assert own_codes(spec, Problem(device=device), role) == set()


@of_every_backend
def test_linear_layers_are_for_linear_backends(spec: BackendSpec) -> None:
    """D3: the others refuse them by role and kind, and the other layers of a hybrid model are no reason."""
    linear = Role.LINEAR in spec.capabilities.roles
    assert own_codes(spec, Problem(read(KIMI_LINEAR)), Role.LINEAR) == (set() if linear else {"role", "kind"})


@pytest.mark.parametrize("model", ["llama", "deepseek_v3"])
def test_auto_leaves_a_cpu_to_the_embedded_default(explained: Explained, model: str) -> None:
    """D1: installing plugins changes nothing where they cannot serve."""
    code, roles = explained("--model", f"tiny:{model}")
    assert code == 0
    assert {choice["chosen"] for choice in roles.values()} == {"torch_native"}
