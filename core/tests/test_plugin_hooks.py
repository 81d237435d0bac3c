"""Hooks other than backends: workspace kinds, measured tables, tiny models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from importlib_metadata import EntryPoint

from attnplug import AttentionKind, DType, Role, WorkspaceKind
from attnplug.declare.errors import PluginError
from attnplug.host import TINY_CONFIGS, ModelConfigError, Registry, load_model, load_registry
from attnplug.registry.loading import Broken
from attnplug.registry.registry import tiny_config
from attnplug.tables import MeasuredShape, MeasuredTable
from attnplug_testing.errors import having, raises_naming
from attnplug_testing.plugins import EMBEDDED, Install, also, bringing, module, spec

KINDS, TABLES, MODELS = "attnplug_workspace_kinds", "attnplug_rankings", "attnplug_tiny_models"
ACME = {**TINY_CONFIGS["llama"], "hidden_size": 32}


def table(**changes: Any) -> MeasuredTable:
    fields: dict[str, Any] = {
        "device": "NVIDIA H200",
        "sm": 90,
        "backend": "fast",
        "role": Role.DECODE,
        "shape": MeasuredShape(AttentionKind.MLA, 16, 1, 576, 512, DType.BFLOAT16, DType.BFLOAT16, 64),
        "rows": [(8, 4096, 1, True, 31.5, 31, 32), (1, 1024, 1, False, 12, 12, 12)],
        "versions": {"fast-attention": "1.2.3"},
        "measured": "2026-11-16",
    }
    return MeasuredTable(**{**fields, **changes})


HERE = Path(__file__).parent
SOME = {KINDS: [WorkspaceKind("acme")], TABLES: [HERE], MODELS: {"acme": ACME}}


def names(registry: Registry) -> dict[str, list[Any]]:
    folders = [each.value for each in registry.table_folders]
    return {KINDS: [*registry.workspace_kinds], TABLES: folders, MODELS: [*registry.tiny_models]}


# ---- what works ----


def test_a_plugin_may_implement_all_hooks(install: Install) -> None:
    registry = load_registry([install(also(bringing(spec()), **SOME))], {})
    assert registry.broken == () and list(registry.backends) == ["fast"]
    assert names(registry) == {KINDS: ["acme"], TABLES: [HERE], MODELS: ["acme"]}
    for found in (registry.workspace_kinds["acme"], *registry.table_folders, registry.tiny_models["acme"]):
        assert str(found.source) == "fast-attention 1.2.3"


@pytest.mark.parametrize("hook", SOME)
def test_a_plugin_need_not_provide_backends(install: Install, hook: str) -> None:
    registry = load_registry([install(also(module(), **{hook: SOME[hook]}))], {})
    assert registry.broken == () and registry.backends == {}
    assert names(registry)[hook]


def test_core_registers_its_items_through_the_same_hooks() -> None:
    """Core keeps no list of others' kinds of memory: plain scratch is its only one."""
    registry = load_registry([EMBEDDED], {})
    assert names(registry) == {KINDS: ["scratch"], TABLES: [], MODELS: sorted(TINY_CONFIGS)}


# ---- conflicts ----


def test_a_claim_to_what_another_brings_names_both(install: Install) -> None:
    """D2: neither is used, and their backends are."""
    points = [
        install(also(bringing(spec(name)), **{MODELS: {"acme": ACME}}), name, f"{name}-dist") for name in ("a", "b")
    ]
    registry = load_registry(points, {})
    assert names(registry)[MODELS] == [] and list(registry.backends) == ["a", "b"]
    assert [fault.source.distribution for fault in registry.broken] == ["a-dist", "b-dist"]
    for fault in registry.broken:
        assert "a-dist 1.2.3" in fault.error and "b-dist 1.2.3" in fault.error
        assert "acme" in str(fault)


def test_an_equal_kind_of_memory_is_shared(install: Install) -> None:
    """A2"""
    points = [install(also(bringing(spec(name)), **{KINDS: [WorkspaceKind("acme")]}), name, name) for name in "ab"]
    registry = load_registry(points, {})
    assert registry.broken == () and names(registry)[KINDS] == ["acme"]


def test_one_kind_of_memory_with_two_contracts_names_both(install: Install) -> None:
    """A2, D2"""
    kinds = {"a": WorkspaceKind("acme"), "b": WorkspaceKind("acme", zeroed=True)}
    points = [install(also(bringing(spec(n)), **{KINDS: [kind]}), n, f"{n}-dist") for n, kind in kinds.items()]
    registry = load_registry(points, {})
    assert names(registry)[KINDS] == []
    assert {fault.source.distribution for fault in registry.broken} == {"a-dist", "b-dist"}
    for fault in registry.broken:
        assert all(text in fault.error for text in ("'acme'", "zeroed", "a-dist 1.2.3", "b-dist 1.2.3"))


def test_core_keeps_its_kind_of_memory_and_its_models(install: Install) -> None:
    """D2"""
    mine = {KINDS: [WorkspaceKind("scratch", zeroed=True)], MODELS: {"llama": ACME}}
    registry = load_registry([install(also(bringing(spec()), **mine)), EMBEDDED], {})
    assert not registry.workspace_kinds["scratch"].value.zeroed
    assert registry.tiny_models["llama"].value == TINY_CONFIGS["llama"]
    assert [fault.name for fault in registry.broken] == ["workspace kind scratch", "tiny:llama"]
    for fault in registry.broken:
        assert "attnplug 1.0.0rc1" in fault.error and "fast-attention 1.2.3" in fault.error


def test_an_unknown_model_may_be_a_broken_plugins(install: Install) -> None:
    registry = load_registry([install(also(bringing(spec()), **{MODELS: {"acme": []}})), EMBEDDED], {})
    with raises_naming(ModelConfigError, "'tiny:acme'", "attnplug plugins"):
        tiny_config("tiny:acme", registry)


def test_an_equal_declaration_of_plain_scratch_is_no_conflict(install: Install) -> None:
    shared = also(bringing(spec()), **{KINDS: [WorkspaceKind("scratch")]})
    registry = load_registry([install(shared, "z", "zzz"), install(shared, "a", "aaa"), EMBEDDED], {})
    assert registry.workspace_kinds["scratch"].source.embedded


# ---- wrong returns ----


@pytest.mark.parametrize(
    ("hook", "returned", "needs"),
    [
        (KINDS, None, "return a list of WorkspaceKind"),
        (KINDS, WorkspaceKind("acme"), "one WorkspaceKind"),
        (KINDS, ["acme"], "'acme' (str) at position 0, not a WorkspaceKind"),
        (TABLES, {"fast": HERE}, "return a list of folders"),
        (TABLES, HERE, "return a list"),
        (TABLES, [table()], "not a Path"),
        (TABLES, [HERE / "nothing"], "nothing, which is not a folder"),
        (MODELS, None, "return a dict of configs by name"),
        (MODELS, [ACME], "return a dict of configs by name"),
        (MODELS, {"a b": ACME}, "'a b'"),
        (MODELS, {"acme": []}, "model_type"),
        (MODELS, {"acme": {"hidden_size": 32}}, "model_type"),
        (MODELS, {"acme": {**ACME, "dtype": object()}}, "not JSON serializable"),
    ],
)
def test_a_wrong_return_is_broken_alone(
    install: Install, only_fault: Callable[[EntryPoint], Broken], hook: str, returned: object, needs: str
) -> None:
    """D2: half a plugin is not used, and the error gives the author's source location."""
    error = only_fault(install(also(bringing(spec()), **{hook: returned}))).error
    assert needs in error and "plugins.py:" in error


def test_a_misspelled_hook_gets_the_nearest(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    """D2: pluggy ignores it."""
    plugin = also(bringing(spec()), attnplug_tiny_model={"acme": ACME})
    assert "did you mean attnplug_tiny_models?" in only_fault(install(plugin)).error


@pytest.mark.parametrize(("name", "zeroed"), [("", False), ("Acme", False), ("a b", False), (7, False), ("acme", 1)])
def test_a_kind_of_memory_is_checked_when_it_is_made(name: Any, zeroed: Any) -> None:
    with raises_naming(PluginError, "workspace kind"):
        WorkspaceKind(name, zeroed)


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({"device": ""}, "device=''"),
        ({"backend": None}, "backend=None"),
        ({"sm": "90"}, "sm='90'"),
        ({"role": "cooking"}, "cooking"),
        ({"shape": "cooking"}, "cooking"),
        ({"rows": []}, "no rows"),
        ({"rows": "rows"}, "rows='rows'"),
        ({"rows": [(1, 2, 3)]}, "(1, 2, 3)"),
        ({"rows": [(1, 2, 3, False, 0, 1, 1)]}, "(1, 2, 3, False, 0, 1, 1)"),
        ({"rows": [(1, 2, 3, False, float("nan"), 1, 1)]}, "nan"),
        ({"rows": [(1.5, 2, 3, False, 4, 4, 4)]}, "whole numbers"),
        ({"rows": [(1, 2, 3, False, 4, 4, 4), (1, 2, 3, False, 5, 5, 5)]}, "twice"),
        ({"versions": {}}, "versions={}"),
        ({"versions": {"torch": 2}}, "'torch': 2"),
    ],
)
def test_a_measured_table_is_checked_when_it_is_made(changes: dict[str, Any], needs: str) -> None:
    with pytest.raises(PluginError) as caught:
        table(**changes)
    assert needs in str(caught.value)


def test_a_measured_tables_rows_are_in_order() -> None:
    assert [row.requests for row in table().rows] == [1, 8]
    assert table(role="decode") == table()


# ---- tiny models by reference ----


@pytest.fixture
def with_acme(install: Install) -> Registry:
    return load_registry([install(also(module(), **{MODELS: {"acme": ACME}})), EMBEDDED], {})


def test_a_plugins_tiny_model_is_a_model(with_acme: Registry) -> None:
    assert load_model("tiny:acme", with_acme).name == "tiny:acme"
    assert tiny_config("tiny:acme", with_acme) == ACME


def test_an_unknown_tiny_model_lists_those_of_plugins(with_acme: Registry) -> None:
    with pytest.raises(ModelConfigError, check=having("tiny:acme", "tiny:llama", source="tiny:acne")):
        load_model("tiny:acne", with_acme)


def test_a_tiny_model_that_two_plugins_claim_names_both(install: Install) -> None:
    """D2"""
    points = [install(also(module(), **{MODELS: {"acme": ACME}}), name, f"{name}-dist") for name in "ab"]
    with raises_naming(PluginError, "'tiny:acme'", "a-dist", "b-dist"):
        tiny_config("tiny:acme", load_registry(points, {}))
