"""Registry: loading from entry points, duplicate names, the allow-list, strict mode and lookup by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from importlib_metadata import EntryPoint

from attnplug import BackendSpec, UsageError, hookimpl
from attnplug.declare.errors import PluginError
from attnplug.host import Registry, load_registry
from attnplug.registry.loading import GROUP
from attnplug_testing.errors import raises_naming
from attnplug_testing.plugins import EMBEDDED, Install, bringing, module, spec

# ---- what works ----


def test_an_entry_point_makes_its_backends_selectable(install: Install) -> None:
    """D1: nothing but the entry point is needed, and no list of names exists."""
    registry = load_registry([install(bringing(spec("fast"), spec("fast_mla")))], {})
    assert list(registry.backends) == ["fast", "fast_mla"]
    assert registry.get("fast_mla").spec.name == "fast_mla"
    assert registry.broken == registry.blocked == registry.unmatched == ()


def test_without_its_entry_point_a_backend_is_gone() -> None:
    """D1"""
    assert load_registry([], {}).backends == {}


def test_the_embedded_default_comes_through_the_same_door() -> None:
    """D1: it is an installed entry point as any other."""
    registered = load_registry(environment={}).get("torch_native")
    assert (registered.source.distribution, registered.source.entry_point) == ("attnplug", "torch_native")


def test_a_backend_knows_its_plugin(install: Install) -> None:
    source = load_registry([install(bringing(spec()), "entry", "some-dist", "3.4")], {}).get("fast").source
    assert (source.entry_point, source.distribution, source.version) == ("entry", "some-dist", "3.4")


def test_the_order_of_installation_does_not_matter(install: Install) -> None:
    points = [install(bringing(spec(name)), name, f"{name}-dist") for name in ("b", "a", "c")]
    forward, backward = load_registry(points, {}), load_registry(points[::-1], {})
    assert list(forward.backends) == list(backward.backends) == ["a", "b", "c"]


def test_a_plugin_may_be_an_object(install: Install) -> None:
    class Plugin:
        @hookimpl
        def attnplug_backends(self) -> list[BackendSpec]:
            return [spec()]

    assert "fast" in load_registry([install(Plugin())], {}).backends


@pytest.mark.parametrize("container", [list, tuple, iter])
def test_a_hook_may_return_any_iterable(install: Install, container: Callable[[Any], Any]) -> None:
    @hookimpl
    def attnplug_backends() -> Any:
        return container([spec()])

    assert "fast" in load_registry([install(module(attnplug_backends=attnplug_backends))], {}).backends


def test_a_hook_may_be_a_generator(install: Install) -> None:
    @hookimpl
    def attnplug_backends() -> Iterator[BackendSpec]:
        yield spec("one")
        yield spec("two")

    assert set(load_registry([install(module(attnplug_backends=attnplug_backends))], {}).backends) == {"one", "two"}


def test_an_entry_point_without_a_distribution_still_loads(install: Install) -> None:
    point = EntryPoint("fast", install(bringing(spec())).value, GROUP)
    assert "unknown distribution" in str(load_registry([point], {}).get("fast").source)


# ---- taken names ----


def test_a_taken_name_names_both_distributions_and_neither_wins(install: Install) -> None:
    """D2"""
    one = install(bringing(spec()), "x", "one-dist", "1.0")
    other = install(bringing(spec(), spec("unique")), "y", "other-dist", "2.0")
    registry = load_registry([one, other], {})
    assert list(registry.backends) == ["unique"]
    assert {fault.source.distribution for fault in registry.broken} == {"one-dist", "other-dist"}
    for fault in registry.broken:
        assert fault.name == "fast"
        assert "'fast'" in fault.error
        assert "one-dist 1.0" in fault.error and "other-dist 2.0" in fault.error


def test_the_allow_list_settles_a_taken_name(install: Install) -> None:
    """D2"""
    points = [install(bringing(spec()), "x", "one-dist"), install(bringing(spec()), "x", "other-dist")]
    registry = load_registry(points, {"ATTNPLUG_PLUGINS": "other-dist"})
    assert registry.get("fast").source.distribution == "other-dist"


def test_a_name_taken_by_three_names_all_three(install: Install) -> None:
    """D2"""
    points = [install(bringing(spec()), "x", f"dist-{letter}") for letter in "abc"]
    registry = load_registry(points, {})
    assert len(registry.broken) == 3
    assert all(f"dist-{letter}" in registry.broken[0].error for letter in "abc")


def test_a_name_given_twice_within_one_plugin_is_an_error(install: Install) -> None:
    """D2"""
    registry = load_registry([install(bringing(spec(summary="one"), spec(summary="two"), spec("good")))], {})
    assert list(registry.backends) == ["good"]
    assert {fault.name for fault in registry.broken} == {"fast"}
    assert "fast-attention 1.2.3" in registry.broken[0].error


def test_a_name_given_twice_within_one_plugin_is_no_matter_of_installing(install: Install) -> None:
    """Neither uninstalling one nor the allow-list can help there."""
    registry = load_registry([install(bringing(spec(summary="one"), spec(summary="two")))], {})
    for fault in registry.broken:
        assert "uninstall" not in fault.error
        assert "ATTNPLUG_PLUGINS" not in fault.error


@pytest.mark.parametrize("claimants", [1, 2])
def test_the_embedded_default_keeps_its_name(install: Install, claimants: int) -> None:
    """D2: others that claim it are broken, with an error that names both distributions."""
    taken = spec("torch_native")
    points = [install(bringing(taken, spec(f"own_{n}")), "x", f"usurper-{n}", "6.6") for n in range(claimants)]
    registry = load_registry([*points, EMBEDDED], {})
    assert registry.get("torch_native").source.distribution == "attnplug"
    assert set(registry.backends) == {"torch_native", *(f"own_{n}" for n in range(claimants))}
    assert [fault.source.distribution for fault in registry.broken] == [f"usurper-{n}" for n in range(claimants)]
    for number, fault in enumerate(registry.broken):
        for text in ("'torch_native'", "attnplug 1.0.0rc1", f"usurper-{number} 6.6", "keeps it"):
            assert text in fault.error


# ---- slow plugins ----


def test_a_plugin_that_takes_long_to_load_is_named(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    points = [install(bringing(spec(name)), name, f"{name}-dist") for name in ("quick", "slow")]
    clock = iter([10.0, 10.2, 20.0, 23.1])
    monkeypatch.setattr("attnplug.registry.registry.monotonic", lambda: next(clock))
    registry = load_registry(points, {})
    assert {str(source): round(seconds, 1) for source, seconds in registry.slow.items()} == {"slow-dist 1.2.3": 3.1}
    assert set(registry.backends) == {"quick", "slow"}


# ---- ATTNPLUG_PLUGINS ----


@pytest.fixture
def three(install: Install) -> list[EntryPoint]:
    """The built-in plugin, a plugin with an unusual spelling of its distribution, and another one."""
    return [
        EMBEDDED,
        install(bringing(spec("fast")), "fast_entry", "My_Dist.X", "1.0"),
        install(bringing(spec("slow")), "slow_entry", "slow-dist", "1.0"),
    ]


def loaded(points: list[EntryPoint], setting: str | None) -> Registry:
    return load_registry(points, {} if setting is None else {"ATTNPLUG_PLUGINS": setting})


@pytest.mark.parametrize(
    ("setting", "backends"),
    [
        (None, {"torch_native", "fast", "slow"}),
        ("", {"torch_native"}),
        (" , ,", {"torch_native"}),
        ("attnplug", {"torch_native"}),
        ("my-dist-x", {"torch_native", "fast"}),
        ("MY.DIST_X", {"torch_native", "fast"}),
        ("  my-dist-x ,", {"torch_native", "fast"}),
        ("fast_entry", {"torch_native", "fast"}),
        ("Fast-Entry", {"torch_native", "fast"}),
        ("fast_entry,slow-dist", {"torch_native", "fast", "slow"}),
        ("nobody", {"torch_native"}),
    ],
)
def test_the_allow_list_takes_distributions_and_names(
    three: list[EntryPoint], setting: str | None, backends: set[str]
) -> None:
    """D1: unset allows all, empty allows only the built-in."""
    registry = loaded(three, setting)
    assert set(registry.backends) == backends
    assert {source.entry_point for source in registry.blocked} == {"fast_entry", "slow_entry"} - {
        f"{name}_entry" for name in backends
    }


def test_a_name_in_the_allow_list_that_matches_nothing_is_reported(three: list[EntryPoint]) -> None:
    assert loaded(three, "slow-dist,fst_entry, Zzz").unmatched == ("Zzz", "fst_entry")
    assert loaded(three, "slow-dist").unmatched == ()


def test_a_blocked_plugin_is_not_imported(install_source: Install) -> None:
    registry = loaded([install_source("raise RuntimeError('imported')")], "")
    assert registry.broken == ()
    assert [str(source) for source in registry.blocked] == ["fast-attention 1.2.3"]


@pytest.mark.parametrize("distribution", ["intruder-dist", "attnplug"])
def test_a_plugin_cannot_call_itself_built_in(install: Install, distribution: str) -> None:
    """D2: the built-in is known by its module. An entry point's name, and metadata, are for anyone to choose."""
    intruder = install(bringing(spec("torch_native")), "attnplug", distribution)
    assert set(loaded([intruder, EMBEDDED], None).backends) == {"torch_native"}
    assert not loaded([intruder, EMBEDDED], "").broken


# ---- ATTNPLUG_STRICT ----


@pytest.mark.parametrize("setting", ["1", "true", "YES", " on ", "2"])
def test_in_strict_mode_a_broken_plugin_is_an_error(install: Install, install_source: Install, setting: str) -> None:
    """D2"""
    with pytest.raises(PluginError) as caught:
        load_registry([install_source("raise ValueError('bad day')")], {"ATTNPLUG_STRICT": setting})
    for text in ("ATTNPLUG_STRICT", "fast-attention", "1.2.3", "bad day"):
        assert text in str(caught.value)


@pytest.mark.parametrize("setting", ["", "0", "false", "No", "off", "  "])
def test_strict_mode_can_be_off(install_source: Install, setting: str) -> None:
    assert load_registry([install_source("raise ValueError")], {"ATTNPLUG_STRICT": setting}).broken


def test_strict_mode_lists_every_broken_plugin(install: Install) -> None:
    points = [install(bringing(), name, f"{name}-dist") for name in ("one", "two")]
    with raises_naming(PluginError, "one-dist", "two-dist"):
        load_registry(points, {"ATTNPLUG_STRICT": "1"})


def test_strict_mode_lists_every_factory_that_is_not_there(install: Install) -> None:
    """D2"""
    bad = [spec(name, factory=f"no_such_{name}.backend:build") for name in ("one", "two")]
    point = install(bringing(*bad, spec("good")))
    assert set(load_registry([point], {}).backends) == {"one", "two", "good"}
    with raises_naming(PluginError, "one (fast-attention 1.2.3)", "no_such_one", "no_such_two") as caught:
        load_registry([point], {"ATTNPLUG_STRICT": "1"})
    assert "good" not in str(caught.value)


def test_strict_mode_minds_names_that_match_nothing(three: list[EntryPoint]) -> None:
    with raises_naming(PluginError, "fst"):
        load_registry(three, {"ATTNPLUG_STRICT": "1", "ATTNPLUG_PLUGINS": "fst"})


def test_strict_mode_minds_no_blocked_plugin(three: list[EntryPoint]) -> None:
    registry = load_registry(three, {"ATTNPLUG_STRICT": "1", "ATTNPLUG_PLUGINS": ""})
    assert len(registry.blocked) == 2


# ---- asking for a name ----


def test_an_unknown_name_gets_the_nearest_and_all(install: Install) -> None:
    registry = load_registry([install(bringing(spec("flash_attn"), spec("trtllm")))], {})
    with pytest.raises(UsageError) as caught:
        registry.get("flash_atn")
    assert "'flash_atn'" in str(caught.value)
    assert "did you mean flash_attn?" in str(caught.value)
    assert "flash_attn, trtllm" in str(caught.value)


@pytest.mark.parametrize("name", ["Torch_Native", "TORCH-NATIVE", "torch-native"])
def test_a_name_that_differs_in_case_or_hyphens_gets_the_one_meant(install: Install, name: str) -> None:
    registry = load_registry([install(bringing(spec("torch_native"), spec("torch_naive")))], {})
    with raises_naming(UsageError, "torch_native"):
        registry.get(name)


def test_an_unknown_name_far_from_all_gets_no_guess(install: Install) -> None:
    with pytest.raises(UsageError) as caught:
        load_registry([install(bringing(spec("flash_attn")))], {}).get("zzz")
    assert "did you mean" not in str(caught.value)
    assert "flash_attn" in str(caught.value)


def test_a_lookup_without_any_backend_says_so() -> None:
    with raises_naming(UsageError, "fast", "none"):
        load_registry([], {}).get("fast")


@pytest.mark.parametrize("name", ["", "é✨", "x" * 10_000, "a\nb", "%s", "{}", "[bold]"])
def test_any_text_as_a_name_is_an_error_for_a_person(install: Install, name: str) -> None:
    with pytest.raises(UsageError):
        load_registry([install(bringing(spec()))], {}).get(name)


def test_asking_for_a_broken_backend_tells_what_is_wrong(install: Install) -> None:
    """D2: by the backend's name, or by the entry point's if the backend's is unknown."""
    registry = load_registry(
        [
            install(bringing(spec("old", contract="9.0")), "x", "old-dist", "7.7"),
            install(bringing(), "empty", "empty-dist", "8.8"),
        ],
        {},
    )
    with raises_naming(PluginError, "old", "old-dist 7.7", "9.0"):
        registry.get("old")
    with raises_naming(PluginError, "empty", "empty-dist 8.8"):
        registry.get("empty")


def test_asking_for_a_taken_name_tells_both_claims(install: Install) -> None:
    """D2"""
    points = [install(bringing(spec()), "x", f"{letter}-dist") for letter in "ab"]
    with raises_naming(PluginError, "a-dist", "b-dist"):
        load_registry(points, {}).get("fast")


def test_asking_for_a_blocked_backend_tells_how_to_allow_it(install: Install) -> None:
    registry = loaded([install(bringing(spec()), "fast")], "")
    with pytest.raises(UsageError) as caught:
        registry.get("fast")
    for text in ("blocked", "ATTNPLUG_PLUGINS", "fast-attention", "1.2.3"):
        assert text in str(caught.value)
