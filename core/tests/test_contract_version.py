"""The contract gate: a plugin for another contract version is refused, with what to do (D4)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from importlib_metadata import EntryPoint

from attnplug import BackendSpec, hookimpl
from attnplug.declare.version import CONTRACT_VERSION, contract_problem
from attnplug.host import load_registry
from attnplug.registry.loading import Broken
from attnplug_testing.command import Attnplug, Package
from attnplug_testing.errors import missing_values
from attnplug_testing.plugins import Install, bringing, module, spec

PLUGIN = """
from attnplug import AttentionKind, BackendSpec, Capabilities, DType, hookimpl

@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [BackendSpec(
        name="my_attention", summary="one request at a time", contract="1.99",
        factory="my_attention.backend:MyBackend",
        capabilities=Capabilities(kinds=frozenset({AttentionKind.MHA}), devices=frozenset({"cpu", "cuda"}),
                                  dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16})),
    )]
"""


@pytest.fixture
def newer_plugin(plain_environment: None, package: Package) -> None:
    package("my_attention", PLUGIN)


@pytest.mark.usefixtures("newer_plugin")
def test_a_plugin_of_a_newer_contract_is_listed_as_broken(attnplug: Attnplug) -> None:
    """D2, D4"""
    rows = {row["name"]: row for row in attnplug("backends", "--all", "--json").json}
    assert (rows["my_attention"]["status"], rows["my_attention"]["contract"]) == ("broken", "1.99")
    assert not missing_values(rows["my_attention"]["error"], "contract 1.99", "attnplug>=1.99,<2")
    assert rows["torch_native"]["status"] == "usable"


@pytest.mark.usefixtures("newer_plugin")
def test_asking_for_a_backend_of_a_newer_contract_says_what_to_do(attnplug: Attnplug) -> None:
    """D3, D4"""
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", "my_attention")
    assert outcome.code != 0
    assert not missing_values(outcome.err, "'my_attention'", "contract 1.99", "attnplug>=1.99,<2")


@pytest.mark.parametrize(
    "contract",
    [
        "0.8",
        "0.10",
        "1.0",
        "1",
        "0.9.0",
        "",
        0.9,
        None,
        "one.zero",
        " 0.9",
        "0.9\n",
        "00.9",
        "0.09",
        "٠.٩",
        "0.٩",
        "+0.9",
    ],
)
def test_another_contract_version_is_reported_with_both(
    monkeypatch: pytest.MonkeyPatch, install: Install, only_fault: Callable[[EntryPoint], Broken], contract: object
) -> None:
    """D2, D4: versions are ASCII digits without leading zeros."""
    monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", "0.9")
    monkeypatch.setattr("attnplug_testing.plugins.CONTRACT_VERSION", "0.9")
    fault = only_fault(install(bringing(spec(contract=contract))))
    assert (contract if isinstance(contract, str) and contract.isprintable() else str(contract).strip()) in fault.error
    assert "contract 0.9;" in fault.error or "'0.9'" in fault.error
    assert fault.name == "fast"


def test_an_absurd_contract_version_is_isolated(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    """D2: Python refuses to make a number of thousands of digits."""
    only_fault(install(bringing(spec(contract="1." + "9" * 5000))))


def test_the_contract_of_this_core_is_accepted() -> None:
    """D4"""
    assert contract_problem(CONTRACT_VERSION) is None


@pytest.mark.parametrize(
    ("core", "accepted", "refused"),
    [
        ("0.9", ["0.9"], ["0.0", "0.8", "0.10", "1.0", "1.9"]),
        ("0.10", ["0.10"], ["0.1", "0.9", "0.11"]),
        ("1.0", ["1.0"], ["0.9", "0.10", "1.1", "1.2", "2.0"]),
        ("1.3", ["1.0", "1.1", "1.2", "1.3"], ["0.3", "0.9", "1.4", "1.10", "2.0", "2.3"]),
        ("1.12", ["1.0", "1.2", "1.9", "1.11", "1.12"], ["1.13", "11.2"]),
        ("2.1", ["2.0", "2.1"], ["0.9", "1.0", "1.1", "2.2", "3.0"]),
    ],
)
def test_a_core_runs_older_minors_of_its_major(
    monkeypatch: pytest.MonkeyPatch, install: Install, core: str, accepted: list[str], refused: list[str]
) -> None:
    """D4, E4: a spec declares the lowest contract that it needs. Before 1.0 minors must match."""
    monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", core)
    declared = {f"of_{contract.replace('.', '_')}": contract for contract in (*accepted, *refused)}
    plugin = bringing(*(spec(name, contract=contract) for name, contract in declared.items()))
    registry = load_registry([install(plugin)], {})
    assert {declared[name] for name in registry.backends} == set(accepted)
    assert {fault.contract for fault in registry.broken} == set(refused)


@pytest.mark.parametrize(
    ("core", "needed", "command"),
    [
        ("1.0", "1.2", "pip install 'attnplug>=1.2,<2'"),
        ("0.9", "0.10", "pip install 'attnplug>=0.10,<0.11'"),
        ("1.3", "2.0", "pip install 'attnplug>=2.0,<3'"),
        ("1.0", "0.9", "pip install 'attnplug>=0.9,<0.10'"),
    ],
)
def test_a_refused_contract_comes_with_the_command_that_fixes_it(
    monkeypatch: pytest.MonkeyPatch,
    install: Install,
    only_fault: Callable[[EntryPoint], Broken],
    core: str,
    needed: str,
    command: str,
) -> None:
    """D4: an older plugin may also have a newer release."""
    monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", core)
    monkeypatch.setattr("attnplug_testing.plugins.CONTRACT_VERSION", core)
    error = only_fault(install(bringing(spec(contract=needed)))).error
    assert f"contract {needed};" in error and f"contract {core};" in error and command in error
    older = tuple(map(int, needed.split("."))) < tuple(map(int, core.split(".")))
    assert ("a release of fast-attention for contract" in error) == older


@pytest.mark.parametrize(
    "source", ["from attnplug import HookOf12", "import attnplug\nattnplug.BackendSpec(trees_of_12=True)"]
)
def test_a_plugin_that_fails_on_a_newer_name_comes_with_the_command_that_its_metadata_gives(
    install_source: Install, only_fault: Callable[[EntryPoint], Broken], source: str
) -> None:
    """D4: its contract cannot be read before it fails."""
    requires = ("attnplug-sparse>=70", "torch", "attnplug>=71,<72", 'attnplug>=73; extra == "test"')
    error = only_fault(install_source(source, requires)).error
    assert "12" in error and error.endswith("run: pip install 'attnplug<72,>=71'")
    assert "run:" not in only_fault(install_source(source, ("attnplug>=0.1",))).error


def test_a_taken_name_is_listed_with_the_contract_that_each_plugin_declares(
    monkeypatch: pytest.MonkeyPatch, install: Install
) -> None:
    """D2, D4"""
    monkeypatch.setattr("attnplug.declare.version.CONTRACT_VERSION", "1.3")
    points = [install(bringing(spec(contract=f"1.{n}")), f"entry_{n}", f"dist-{n}") for n in (0, 2)]
    assert sorted(str(fault.contract) for fault in load_registry(points, {}).broken) == ["1.0", "1.2"]


def test_only_the_backend_of_another_contract_is_left_out(install: Install) -> None:
    """D2: its plugin's other backends are good."""
    registry = load_registry([install(bringing(spec("old", contract="0.8"), spec("fast")))], {})
    assert list(registry.backends) == ["fast"]
    assert [(fault.name, fault.contract) for fault in registry.broken] == [("old", "0.8")]


def test_a_field_of_another_contract_says_which_contract_is_spoken(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D4: a plugin for a newer contract fails on the field before its version can be read."""

    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        return [spec(tree_attention=True)]

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert "tree_attention" in error
    assert f"contract {CONTRACT_VERSION}" in error
