"""Refusals of a spec beyond its claims: missing libraries, and the plugin's own check, however it fails."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

import importlib_metadata as metadata
import pytest

from attnplug import BackendError, DType, Problem, Refusal, RefusalCode, Role, Setting
from attnplug.declare.errors import PluginError
from attnplug.declare.installed import factory_refusal
from attnplug.kernels import import_library, requirement_refusal
from attnplug_testing.errors import raises_naming
from attnplug_testing.libraries import install_library
from attnplug_testing.specs import EVERYTHING, spec

# ---- requirements ----


def test_a_distribution_that_is_missing_is_a_refusal() -> None:
    """D3"""
    (refusal,) = spec(requires=["no-such-distribution>=1.2"]).refusals(Problem())
    assert refusal.code == RefusalCode.REQUIREMENT
    assert (refusal.value, refusal.allowed) == (None, ">=1.2")
    assert (refusal.setting, refusal.advice) == (None, "pip install 'no-such-distribution>=1.2'")
    json.dumps(refusal.as_json())


def test_a_distribution_that_is_too_old_is_a_refusal_with_its_version() -> None:
    """D3"""
    (refusal,) = spec(requires=["pluggy>=999"]).refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.REQUIREMENT, metadata.version("pluggy"))


def test_a_refusal_ends_with_the_setting_to_change_or_the_command_to_run() -> None:
    """D3"""
    assert str(Refusal("dtype", "no", setting="dtype")) == "no (change dtype)"
    assert str(Refusal("requirement", "no", advice="pip install 'x>=1'")) == "no (pip install 'x>=1')"
    both = Refusal("kernel", "no", setting="fast.kernel", advice="pip install 'x>=1'")
    assert str(both) == "no (change fast.kernel or pip install 'x>=1')"
    assert str(Refusal("layers", "no")) == "no"


def test_a_host_spells_the_setting_of_a_refusal_and_leaves_out_what_it_does_not_have() -> None:
    """D3"""
    refusal = Refusal("page_size", "no", setting=Setting.PAGE_SIZE)
    assert refusal.format({"page_size": "block_size"}.get) == "no (change block_size)"
    assert refusal.format({"dtype": "dtype"}.get) == "no"


def test_every_missing_distribution_is_a_refusal() -> None:
    """D3"""
    assert len(spec(requires=["no-such-one", "pluggy", "no-such-two"]).refusals(Problem())) == 2


@pytest.mark.parametrize("requirement", ["pluggy", "Pluggy>=1", "no-such-one; sys_platform == 'mars'", "pluggy[x]"])
def test_a_requirement_that_is_met_or_not_meant_is_none(requirement: str) -> None:
    assert requirement_refusal(requirement) is None


def test_a_prerelease_that_is_installed_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnplug.declare.installed.installed_version", lambda name: "0.7.0rc1")
    assert requirement_refusal("flashinfer-python>=0.6") is None


@pytest.mark.parametrize("version", ["not-a-version", "1.0-custom_build_x!", ""])
def test_an_installed_version_that_is_none_is_a_refusal(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """D2: local builds of kernel libraries carry such versions; one must not take all candidates with it."""
    monkeypatch.setattr("attnplug.declare.installed.installed_version", lambda name: version)
    (refusal,) = spec(requires=["flash-attn>=2.8"]).refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.REQUIREMENT, version)


def test_the_advice_keeps_the_extras() -> None:
    """The command installs the requirement as declared."""
    refusal = requirement_refusal("no-such-one[cu13]>=2")
    assert refusal is not None
    assert refusal.advice == "pip install 'no-such-one[cu13]>=2'"


# ---- factories ----


@pytest.mark.parametrize(
    ("factory", "missing"),
    [
        ("no_such_module:build", "no_such_module"),
        ("no_such_package.backend:build", "no_such_package"),
        ("attnplug.no_such_module:build", "attnplug.no_such_module"),
        ("attnplug.declare.spec.inner:build", "attnplug.declare.spec.inner"),
        ("package_of_a_test.no_such_module:build", "package_of_a_test.no_such_module"),
    ],
)
def test_a_factory_whose_module_is_not_there_is_a_refusal(package_of_a_test: str, factory: str, missing: str) -> None:
    """D3"""
    (refusal,) = spec(factory=factory).refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.FACTORY, missing)
    assert factory in refusal.message


@pytest.mark.parametrize(
    "factory",
    [
        "package_of_a_test.backend:build",
        "package_of_a_test:build",
        "attnplug.torch_native.plugin:BackendSpec",
        "sys:exit",
    ],
)
def test_a_factory_whose_module_is_there_is_none(package_of_a_test: str, factory: str) -> None:
    assert spec(factory=factory).refusals(Problem()) == []


def test_a_factory_that_its_imported_module_lacks_is_a_refusal() -> None:
    """D3: a plugin of one module with a misspelled factory."""
    (refusal,) = spec(factory="attnplug.declare.spec:BackendSepc").refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.FACTORY, "BackendSepc")


def test_looking_for_a_factory_imports_nothing(package_of_a_test: str) -> None:
    """Neither its module nor the package around it: either may import torch."""
    spec(factory=f"{package_of_a_test}.backend:build").refusals(Problem())
    assert not [name for name in sys.modules if name.startswith(package_of_a_test)]


def test_a_factory_that_another_thread_imports_right_now_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """During its import, a module is in ``sys.modules`` without its factory."""
    (tmp_path / "slow_module_of_a_test.py").write_text(
        "from attnplug.declare.installed import factory_refusal\n"
        "seen = factory_refusal(__name__ + ':build')\n"
        "def build(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("slow_module_of_a_test").seen is None
    assert factory_refusal("slow_module_of_a_test:built") is not None
    del sys.modules["slow_module_of_a_test"]


def test_a_finder_that_fails_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that only an import can find is not refused."""

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            raise RuntimeError(name)

    monkeypatch.setattr(sys, "meta_path", [Finder()])
    assert factory_refusal("no_such_module:build") is None


@pytest.fixture
def package_of_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a package that raises when it is imported."""
    name = "package_of_a_test"
    (tmp_path / name).mkdir()
    for module in ("__init__", "backend"):
        (tmp_path / name / f"{module}.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    return name


# ---- libraries ----


LIBRARY = "kernels-of-a-test>=2"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder on the path, to install libraries in."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_a_library_whose_module_is_there_is_fine_and_not_imported(folder: Path) -> None:
    """Parents of the module included: importing is for building, and may take seconds or the process down."""
    source = "raise SystemExit('imported')"
    install_library(
        folder, "kernels-of-a-test", "2.1", {"kernels_of_a_test.__init__": source, "kernels_of_a_test.cute": source}
    )
    assert requirement_refusal(LIBRARY, "kernels_of_a_test") is None
    assert spec(requires=[(LIBRARY, "kernels_of_a_test.cute")]).refusals(Problem()) == []


@pytest.mark.parametrize(
    "module", ["kernels_of_a_test.cute", "kernels_of_a_test.flash.cute", "other_kernels", "other.cute"]
)
def test_metadata_without_the_module_is_a_refusal_with_what_to_do(folder: Path, module: str) -> None:
    """D3: an interrupted pip leaves that behind."""
    install_library(folder, "kernels-of-a-test", "2.1", {"kernels_of_a_test.__init__": ""})
    (refusal,) = spec(requires=[(LIBRARY, module)]).refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.IMPORT, module)
    assert "kernels-of-a-test 2.1" in refusal.message and module in refusal.message
    assert refusal.advice == "pip install --force-reinstall 'kernels-of-a-test>=2'"


def test_a_library_that_is_not_there_is_one_reason() -> None:
    """D3: its missing module is not reported as well."""
    (refusal,) = spec(requires=[(LIBRARY, "kernels_of_a_test")]).refusals(Problem())
    assert (refusal.code, refusal.value) == (RefusalCode.REQUIREMENT, None)


def raising(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


def test_a_library_that_imports_is_given_back() -> None:
    assert import_library(lambda: "functions", LIBRARY) == "functions"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError("libcudart.so.13"), "OSError: libcudart.so.13"),
        (AssertionError(), "AssertionError"),
        (SystemExit(3), "SystemExit: 3"),
    ],
)
def test_whatever_an_import_raises_names_the_library_its_version_and_what_to_do(
    folder: Path, error: BaseException, text: str
) -> None:
    """D2"""
    install_library(folder, "kernels-of-a-test", "2.1")
    with pytest.raises(BackendError) as caught:
        import_library(raising(error), LIBRARY)
    assert str(caught.value) == (
        f"kernels-of-a-test 2.1 cannot be imported: {text}; "
        "install one that can (pip install 'kernels-of-a-test>=2'), or use another backend"
    )


def test_an_interrupt_stays_one() -> None:
    with pytest.raises(KeyboardInterrupt):
        import_library(raising(KeyboardInterrupt()), LIBRARY)


# ---- the plugin's own check ----


@dataclass(frozen=True)
class Split:
    parts: int = 1


def own(check: Callable[..., Any], problem: Problem = Problem(), role: Role | None = Role.PREFILL) -> list[Refusal]:
    return spec(check=check).refusals(problem, role)


def test_a_check_adds_its_own_refusals() -> None:
    reason = Refusal("odd_heads", "an even number of heads is needed", 7, "even", "tensor_parallel")
    assert own(lambda problem, role, options: [reason]) == [reason]


def test_a_check_may_be_a_generator_that_gives_nothing() -> None:
    def check(problem: Problem, role: Role | None, options: Any) -> Iterable[Refusal]:
        yield from ()

    assert own(check) == []


def test_a_check_sees_the_problem_and_the_role() -> None:
    seen = []

    def check(problem: Problem, role: Role | None, options: Any) -> Iterable[Refusal]:
        seen.append((problem, role))
        return ()

    problem = Problem(device="cpu")
    own(check, problem, Role.DRAFT)
    own(check, problem, None)
    assert seen == [(problem, Role.DRAFT), (problem, None)]


def test_a_check_does_not_hide_what_the_capabilities_refuse() -> None:
    """D3"""
    reason = Refusal("own", "own")
    found = spec(replace(EVERYTHING, devices={"cuda"}), check=lambda problem, role, options: [reason]).refusals(
        Problem(device="cpu")
    )
    assert [refusal.code for refusal in found] == [RefusalCode.DEVICE, "own"]


@pytest.mark.parametrize("error", [ValueError("bad day"), KeyError("k"), AssertionError(), SystemExit(0)])
def test_a_check_that_raises_is_a_refusal(error: BaseException) -> None:
    """D2: it must not take the other candidates with it, nor end the process."""

    def check(problem: Problem, role: Role | None, options: Any) -> Iterable[Refusal]:
        raise error

    (refusal,) = own(check)
    assert (refusal.code, refusal.value) == (RefusalCode.CHECK_FAILED, type(error).__name__)
    assert str(error) in refusal.message


def test_a_check_that_raises_midway_is_a_refusal() -> None:
    """D2"""

    def check(problem: Problem, role: Role | None, options: Any) -> Iterable[Refusal]:
        yield Refusal("own", "own")
        raise ValueError("midway")

    assert RefusalCode.CHECK_FAILED in {refusal.code for refusal in own(check)}


class _NoText:
    def __repr__(self) -> str:
        raise ValueError("no text")


class _OwnRefusal(Refusal):
    def __str__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    "values", [(5, "text"), ("own", None), ("own", "text", None, None, 7)], ids=["code", "message", "option"]
)
def test_a_refusal_of_wrong_types_fails_the_check_that_makes_it(values: tuple[Any, ...]) -> None:
    """D2: otherwise it would fail when it is printed together with the reasons of others."""
    (refusal,) = own(lambda problem, role, options: [Refusal(*values)])
    assert (refusal.code, refusal.value) == (RefusalCode.CHECK_FAILED, "PluginError")


@pytest.mark.parametrize(
    "returned",
    [
        *(None, 7, True, "no", ["no"], [Refusal], [None], {"code": "x"}, [Refusal("own", "own"), "no"]),
        *([_NoText()], [_OwnRefusal("own", "own")]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_check_that_returns_garbage_is_a_refusal(returned: Any) -> None:
    """D2"""
    (refusal,) = own(lambda problem, role, options: returned)
    assert refusal.code == RefusalCode.CHECK_FAILED
    json.dumps(refusal.as_json())


@pytest.mark.parametrize("value", [10**5000, (endless := []), _NoText()], ids=["huge", "endless", "no text"])
def test_a_value_that_json_cannot_hold_is_a_refusal(value: object) -> None:
    """D2: it would take the answer on every other backend with it."""
    if value is endless:
        endless.append(endless)
    (refusal,) = own(lambda problem, role, options: [Refusal("own", "text", value)])
    assert refusal.code == RefusalCode.CHECK_FAILED


def test_a_check_without_end_is_a_refusal() -> None:
    """D2"""
    (refusal,) = own(lambda problem, role, options: repeat(Refusal("own", "own")))
    assert refusal.code == RefusalCode.CHECK_FAILED
    assert "1000" in refusal.message
    assert len(own(lambda problem, role, options: [Refusal("own", "own")] * 1000)) == 1000


def test_an_interrupt_names_the_backend_whose_check_was_running() -> None:
    def check(problem: Problem, role: Role | None, options: Any) -> Iterable[Refusal]:
        raise KeyboardInterrupt

    with raises_naming(KeyboardInterrupt, "fast"):
        own(check)


def test_a_check_that_returns_none_is_refused_with_the_expected_type() -> None:
    """The most likely mistake: a function that returns None if there is no refusal."""
    (refusal,) = own(lambda problem, role, options: None)
    assert "None" in refusal.message
    assert "Refusal" in refusal.message


@pytest.mark.parametrize("check", [lambda problem, role: [], lambda problem, role, options, more: []])
def test_a_check_of_another_signature_is_refused_with_what_to_change(check: Any) -> None:
    """D2: such as one written for contract 1.0, which was not given the options."""
    with raises_naming(PluginError, "problem", "role", "options"):
        spec(check=check)


@pytest.mark.parametrize("options", [None, Split(), Split(2)])
def test_a_check_sees_the_options_or_their_defaults(options: Split | None) -> None:
    seen = []

    def check(problem: Problem, role: Role | None, options: Any) -> Iterable[Refusal]:
        seen.append(options)
        return ()

    spec(check=check, options=Split).refusals(Problem(), None, options)
    spec(check=check).refusals(Problem())
    assert seen == [options or Split(), None]


@pytest.mark.parametrize("value", [{1, 2}, object(), frozenset({64}), {(1, 2): 3}, b"x", math.nan, DType.FLOAT32])
def test_a_check_s_values_survive_json(value: object) -> None:
    """D2: one plugin's set must not take the whole report with it."""
    (refusal,) = own(lambda problem, role, options: [Refusal("own", "own", value=value, allowed=[value])])
    text = json.dumps(refusal.as_json())
    json.loads(text, parse_constant=pytest.fail)


def test_a_check_that_prints_does_not_reach_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output is for --json."""

    def check(problem: Problem, role: Role | None, options: Any) -> Iterable[Refusal]:
        print("looking at the problem")
        return []

    assert own(check) == []
    assert capsys.readouterr().out == ""
