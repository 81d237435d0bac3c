"""From entry points to backends: what a plugin may bring, every way it can be wrong, and that it is wrong alone."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from attnplug import (
    CONTRACT_VERSION,
    AttentionKind,
    BackendSpec,
    Capabilities,
    DType,
    GraphLevel,
    PageSizes,
    PluginError,
    Registry,
    Role,
    UsageError,
    hookimpl,
    load_registry,
)
from attnplug.contract import contract_problem
from attnplug.loading import GROUP, Broken

CAPABILITIES = Capabilities(kinds={"mha"}, devices={"cpu"}, dtypes={"float32"})


class Distribution(NamedTuple):
    """What a registry reads of an entry point's distribution."""

    name: str | None
    version: str | None

    def read_text(self, file: str) -> str | None:
        lines = [("Name", self.name), ("Version", self.version)]
        return "".join(f"{key}: {value}\n" for key, value in lines if value is not None) if file == "METADATA" else None


def spec(name: str = "fast", **changes: Any) -> BackendSpec:
    fields = {
        "name": name,
        "summary": "a backend of a test",
        "contract": CONTRACT_VERSION,
        "factory": "nowhere:build",
        "capabilities": CAPABILITIES,
    }
    return BackendSpec(**{**fields, **changes})


def module(**members: object) -> ModuleType:
    plugin = ModuleType("plugin")
    vars(plugin).update(members)
    return plugin


def bringing(*specs: BackendSpec) -> ModuleType:
    """A good plugin with these backends."""

    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        return list(specs)

    return module(attnplug_backends=attnplug_backends)


Install = Callable[..., EntryPoint]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Fabricates the entry point of a plugin object."""

    def make(
        plugin: object, name: str = "fast", distribution: str | None = "fast-attention", version: str | None = "1.2.3"
    ) -> EntryPoint:
        home = f"plugin_{name}_of_{distribution}".replace("-", "_").replace(".", "_")
        monkeypatch.setitem(sys.modules, home, module(plugin=plugin))
        return EntryPoint(name, f"{home}:plugin", GROUP)._for(Distribution(distribution, version))  # type: ignore[attr-defined]

    return make


@pytest.fixture
def install_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Fabricates the entry point of a module with this source."""
    monkeypatch.syspath_prepend(tmp_path)
    made = []

    def make(source: str) -> EntryPoint:
        home = f"plugin_source_{len(made)}"
        (tmp_path / f"{home}.py").write_text(source)
        made.append(home)
        return EntryPoint("fast", home, GROUP)._for(Distribution("fast-attention", "1.2.3"))  # type: ignore[attr-defined]

    yield make
    for home in made:
        sys.modules.pop(home, None)


@pytest.fixture
def only_fault(install: Install) -> Callable[[EntryPoint], Broken]:
    """Loads a bad plugin between two good ones and gives its one fault; both good ones must be there (D2)."""

    def load(point: EntryPoint) -> Broken:
        before = install(bringing(spec("before")), "before", "a-first")
        behind = install(bringing(spec("behind")), "behind", "z-last")
        registry = load_registry([before, point, behind], {})
        assert set(registry.backends) == {"before", "behind"}
        (fault,) = registry.broken
        assert (fault.source.distribution, fault.source.version) == ("fast-attention", "1.2.3")
        assert "fast-attention 1.2.3" in str(fault)
        return fault

    return load


def place(function: Callable[..., Any]) -> str:
    """Where an author wrote a function, as an error has to give it."""
    function = getattr(function, "__func__", function)
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno}"


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


def test_a_backend_remembers_who_brought_it(install: Install) -> None:
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


# ---- isolation ----


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("import no_such_kernel_library", "no_such_kernel_library"),
        ("raise AssertionError('needs an H100')", "AssertionError: needs an H100"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("def (", "SyntaxError"),
        ("class Odd(BaseException): pass\nraise Odd('neither an Exception')", "Odd: neither an Exception"),
        ("class Mute(Exception):\n def __str__(self): raise ValueError('no text')\nraise Mute", "Mute"),
    ],
)
def test_a_module_that_fails_to_import_is_broken_alone(
    install_source: Install, only_fault: Callable[[EntryPoint], Broken], source: str, needs: str
) -> None:
    """D2"""
    fault = only_fault(install_source(source))
    assert needs in fault.error
    assert fault.name == "fast"


def test_an_entry_point_to_nothing_is_broken_alone(
    install_source: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D2"""
    point = install_source("")
    missing = EntryPoint("fast", f"{point.value}:plugin", GROUP)._for(point.dist)  # type: ignore[attr-defined]
    assert "plugin" in only_fault(missing).error


@pytest.mark.parametrize("error", [ValueError("bad day"), SystemExit(3), KeyError("k")])
def test_an_exception_inside_a_hook_is_broken_alone(
    install: Install, only_fault: Callable[[EntryPoint], Broken], error: BaseException
) -> None:
    """D2"""

    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        raise error

    fault = only_fault(install(module(attnplug_backends=attnplug_backends)))
    assert f"{type(error).__name__}: {error}" in fault.error


def test_an_exception_inside_a_hook_leads_to_the_hook(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        raise ValueError("bad day")

    assert place(attnplug_backends) in only_fault(install(module(attnplug_backends=attnplug_backends))).error


def test_a_generator_that_raises_midway_brings_nothing(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D2: half a plugin is not used."""

    @hookimpl
    def attnplug_backends() -> Iterator[BackendSpec]:
        yield spec("half")
        raise RuntimeError("midway")

    assert "RuntimeError: midway" in only_fault(install(module(attnplug_backends=attnplug_backends))).error


def test_a_keyboard_interrupt_is_the_user_s(install_source: Install) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_registry([install_source("raise KeyboardInterrupt")], {})


@pytest.mark.parametrize(("name", "version"), [(None, None), (None, "1.0"), ("fast-attention", None)])
def test_a_distribution_with_damaged_metadata_disturbs_nobody(
    install: Install, name: str | None, version: str | None
) -> None:
    """D2: an interrupted pip leaves a .dist-info without METADATA, and then name and version are None."""
    damaged = install(bringing(spec("damaged")), "damaged", name, version)
    good = install(bringing(spec("good")), "good", "good-dist")
    for setting in ({}, {"ATTNPLUG_PLUGINS": "good-dist"}):
        assert "good" in load_registry([damaged, good], setting).backends


def test_printing_while_loading_does_not_reach_stdout(
    install_source: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    load_registry([install_source("print('hello from a kernel library')")], {})
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "hello from a kernel library" in captured.err


def test_printing_in_a_hook_does_not_reach_stdout(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    @hookimpl
    def attnplug_backends() -> Iterator[BackendSpec]:
        print("hello from a hook")
        yield spec()

    load_registry([install(module(attnplug_backends=attnplug_backends))], {})
    assert capsys.readouterr().out == ""


# ---- wrong return types ----


@pytest.mark.parametrize(
    ("returned", "needs"),
    [
        (None, "None"),
        ("fast", "'fast'"),
        (7, "7"),
        (spec(), "[spec]"),
        ([spec(), "fast"], "'fast'"),
        ([BackendSpec], "BackendSpec"),
        ({"fast": spec()}, "'fast'"),
        (b"fast", "bytes"),
    ],
    ids=["None", "str", "int", "one spec", "a wrong item", "the class", "dict", "bytes"],
)
def test_a_wrong_return_type_is_reported_with_the_author_s_signature(
    install: Install, only_fault: Callable[[EntryPoint], Broken], returned: object, needs: str
) -> None:
    """D2"""

    @hookimpl
    def attnplug_backends() -> Any:
        return returned

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert needs in error
    assert "BackendSpec" in error
    assert "def attnplug_backends()" in error
    assert place(attnplug_backends) in error


def test_a_dict_is_called_a_dict(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    """D2: its keys are what iterating gives, but what the author returned is a dict."""

    @hookimpl
    def attnplug_backends() -> Any:
        return {"fast": spec()}

    assert "dict" in only_fault(install(module(attnplug_backends=attnplug_backends))).error


def test_the_position_of_a_wrong_item_is_given(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    @hookimpl
    def attnplug_backends() -> Any:
        return [spec("a"), spec("b"), 3.5]

    assert "position 2" in only_fault(install(module(attnplug_backends=attnplug_backends))).error


def test_a_plugin_without_backends_is_reported(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    assert "no backend" in only_fault(install(bringing())).error


# ---- hooks that pluggy would never call, or call wrongly ----


def test_a_misspelled_hook_is_reported_with_the_right_name(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D2: pluggy ignores it."""

    @hookimpl
    def attnplug_backend() -> list[BackendSpec]:
        return [spec()]

    error = only_fault(install(module(attnplug_backend=attnplug_backend))).error
    assert "def attnplug_backend()" in error
    assert place(attnplug_backend) in error
    assert "did you mean attnplug_backends?" in error


def test_a_hook_of_an_unknown_name_gets_the_list_of_hooks(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    @hookimpl
    def something_else() -> None: ...

    error = only_fault(install(module(something_else=something_else))).error
    assert "something_else" in error
    assert "attnplug_backends" in error


def test_a_misspelled_hook_beside_a_good_one_is_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    plugin = bringing(spec())

    @hookimpl
    def attnplug_bakcends() -> list[BackendSpec]:
        return []

    plugin.attnplug_bakcends = attnplug_bakcends  # type: ignore[attr-defined]
    assert "attnplug_bakcends" in only_fault(install(plugin)).error


def test_an_optional_hook_is_no_way_around(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    """D2: pluggy's optionalhook turns its own check of names off, not ours."""

    @hookimpl(optionalhook=True)
    def attnplug_backend() -> list[BackendSpec]:
        return [spec()]

    assert "attnplug_backends" in only_fault(install(module(attnplug_backend=attnplug_backend))).error


def test_an_undecorated_hook_is_reported(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    def attnplug_backends() -> list[BackendSpec]:
        return [spec()]

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert "@attnplug.hookimpl" in error
    assert "def attnplug_backends()" in error
    assert place(attnplug_backends) in error


def test_an_undecorated_hook_that_is_no_function_is_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """A partial has no __name__ to print."""
    hook = functools.partial(list, [spec()])
    error = only_fault(install(module(attnplug_backends=hook))).error
    assert "@attnplug.hookimpl" in error
    assert "attnplug_backends" in error


def test_a_module_without_hooks_is_told_what_to_define(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    error = only_fault(install(module())).error
    assert "attnplug_backends()" in error
    assert "hookimpl" in error


def _with_default(config: object = None) -> list[BackendSpec]:
    return [spec()]


def _keyword_only(*, config: object) -> list[BackendSpec]:
    return [spec()]


def _extra_argument(config: object) -> list[BackendSpec]:
    return [spec()]


@pytest.mark.parametrize("function", [_with_default, _keyword_only, _extra_argument])
def test_a_hook_argument_that_nobody_fills_is_reported_with_the_author_s_signature(
    install: Install, only_fault: Callable[[EntryPoint], Broken], function: Callable[..., Any]
) -> None:
    """D2: pluggy passes no argument that has a default, and there is none to pass."""
    hook = hookimpl(specname="attnplug_backends")(function)
    error = only_fault(install(module(hook=hook))).error
    assert "config" in error
    assert f"{function.__name__}(" in error
    assert place(function) in error


def test_a_class_in_place_of_its_instance_is_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    class Plugin:
        @hookimpl
        def attnplug_backends(self) -> list[BackendSpec]:
            return [spec()]

    error = only_fault(install(Plugin)).error
    assert "is a class" in error and "an instance" in error


def test_a_hook_wrapper_is_reported(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    """D2: a wrapper could change what others bring."""

    @hookimpl(wrapper=True)
    def attnplug_backends() -> Any:
        return (yield)

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert "wrapper" in error
    assert place(attnplug_backends) in error


def test_one_plugin_under_two_entry_points_is_reported_as_that(install: Install) -> None:
    """D2: pluggy's own words for it speak of its internals."""
    plugin = bringing(spec())
    registry = load_registry([install(plugin, "one"), install(plugin, "two")], {})
    (fault,) = registry.broken
    assert "one" in fault.error and "two" in str(fault)


# ---- contract versions ----


@pytest.mark.parametrize("contract", ["0.9", "1.1", "2.0", "1", "1.0.0", "", 1.0, None, "one.zero", " 1.0"])
def test_another_contract_version_is_reported_with_both(
    install: Install, only_fault: Callable[[EntryPoint], Broken], contract: object
) -> None:
    """D2, D4"""
    fault = only_fault(install(bringing(spec(contract=contract))))
    assert str(contract) in fault.error
    assert CONTRACT_VERSION in fault.error
    assert fault.name == "fast"


def test_an_absurd_contract_version_disturbs_nobody(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D2: Python refuses to make a number of thousands of digits."""
    only_fault(install(bringing(spec(contract="1." + "9" * 5000))))


def test_the_contract_of_this_core_is_accepted() -> None:
    """D4"""
    assert contract_problem(CONTRACT_VERSION) is None


def test_an_older_minor_version_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """D4: a minor version only adds what old backends need not know."""
    monkeypatch.setattr("attnplug.contract.MINOR", 3)
    assert contract_problem("1.2") is None
    assert contract_problem("1.4") is not None


def test_only_the_backend_of_another_contract_is_left_out(install: Install) -> None:
    """D2: its plugin's other backends are good."""
    registry = load_registry([install(bringing(spec("old", contract="0.9"), spec("fast")))], {})
    assert list(registry.backends) == ["fast"]
    assert [(fault.name, fault.contract) for fault in registry.broken] == [("old", "0.9")]


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


# ---- capabilities that contradict themselves ----

CUDA = {"kinds": {"mha"}, "devices": {"cuda"}, "dtypes": {"float32"}}
CPU = {**CUDA, "devices": {"cpu"}}
LINEAR = {**CUDA, "kinds": {"gdn"}, "roles": {"linear"}}


@pytest.mark.parametrize(
    ("capabilities", "needs"),
    [
        ({**CPU, "kinds": ()}, ["kinds", "empty"]),
        ({**CPU, "devices": ()}, ["devices", "empty"]),
        ({**CPU, "dtypes": ()}, ["dtypes", "empty"]),
        ({**CPU, "roles": ()}, ["roles", "empty"]),
        ({**CPU, "head_dims": ()}, ["head_dims", "empty"]),
        ({**CPU, "kinds": {"mla"}, "mla_dims": ()}, ["mla_dims", "empty"]),
        ({**CPU, "devices": {"tpu"}}, ["'tpu'", "cpu, cuda"]),
        ({**CPU, "kinds": {"mha", "gdn"}}, ["gdn", "role linear"]),
        ({**CPU, "roles": {"prefill", "linear"}}, ["role linear", "mha"]),
        ({**CPU, "kinds": {"mha", "gdn"}, "roles": {"linear"}}, ["mha", "only the role linear"]),
        ({**LINEAR, "roles": {"linear", "decode"}}, ["decode", "only linear kinds"]),
        ({**CPU, "min_sm": 90}, ["SM", "cpu"]),
        ({**CPU, "max_sm": 90}, ["SM", "cpu"]),
        ({**CUDA, "min_sm": 100, "max_sm": 90}, ["100", "90"]),
        ({**CPU, "cuda_graph": GraphLevel.DECODE}, ["DECODE", "cpu"]),
        ({**CPU, "page_sizes": PageSizes.of(0, 16)}, ["[0, 16]"]),
        ({**CPU, "page_sizes": PageSizes.of()}, ["page_sizes"]),
        ({**CPU, "mla_dims": {(512, 64)}}, ["mla_dims", "mha"]),
        ({**CPU, "kinds": {"mla"}, "head_dims": {(64, 64)}}, ["head_dims", "mla"]),
        ({**CPU, "max_speculative_tokens": -1}, ["max_speculative_tokens", "-1"]),
        ({**CPU, "roles": {"prefill", "draft"}}, ["draft", "max_speculative_tokens"]),
    ],
)
def test_a_capability_that_contradicts_itself_is_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken], capabilities: dict[str, Any], needs: list[str]
) -> None:
    """D2"""

    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        return [spec("torn", capabilities=Capabilities(**capabilities))]

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert "'torn'" in error
    for text in needs:
        assert text in error


def test_every_contradiction_is_reported_at_once() -> None:
    torn = Capabilities(kinds=(), devices={"tpu"}, dtypes=(), min_sm=9, max_speculative_tokens=-1)
    with pytest.raises(PluginError) as caught:
        spec(capabilities=torn)
    for text in ("kinds", "tpu", "dtypes", "SM", "max_speculative_tokens"):
        assert text in str(caught.value)


def test_a_contradiction_leads_to_the_hook(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    @hookimpl
    def attnplug_backends() -> list[BackendSpec]:
        return [spec(capabilities=Capabilities(**{**CPU, "min_sm": 90}))]

    assert place(attnplug_backends) in only_fault(install(module(attnplug_backends=attnplug_backends))).error


def test_capabilities_without_contradiction_are_accepted() -> None:
    everything = Capabilities(
        kinds=set(AttentionKind),
        devices={"cpu", "cuda"},
        dtypes=set(DType),
        roles=set(Role),
        min_sm=80,
        max_sm=80,
        page_sizes=PageSizes.of(1),
        head_dims={(64, 64)},
        mla_dims={(512, 64)},
        max_speculative_tokens=1,
        cuda_graph=GraphLevel.ALWAYS,
    )
    assert list(everything.contradictions()) == []


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


# ---- ATTNPLUG_PLUGINS ----


@pytest.fixture
def three(install: Install) -> list[EntryPoint]:
    """The built-in, one plugin whose distribution has an odd spelling, and another."""
    return [
        install(bringing(spec("built_in")), "built_in", "attnplug", "0.1.0"),
        install(bringing(spec("fast")), "fast_entry", "My_Dist.X", "1.0"),
        install(bringing(spec("slow")), "slow_entry", "slow-dist", "1.0"),
    ]


def loaded(points: list[EntryPoint], setting: str | None) -> Registry:
    return load_registry(points, {} if setting is None else {"ATTNPLUG_PLUGINS": setting})


@pytest.mark.parametrize(
    ("setting", "backends"),
    [
        (None, {"built_in", "fast", "slow"}),
        ("", {"built_in"}),
        (" , ,", {"built_in"}),
        ("attnplug", {"built_in"}),
        ("my-dist-x", {"built_in", "fast"}),
        ("MY.DIST_X", {"built_in", "fast"}),
        ("  my-dist-x ,", {"built_in", "fast"}),
        ("fast_entry", {"built_in", "fast"}),
        ("Fast-Entry", {"built_in", "fast"}),
        ("fast_entry,slow-dist", {"built_in", "fast", "slow"}),
        ("nobody", {"built_in"}),
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


def test_a_name_in_the_allow_list_that_matches_nothing_is_told(three: list[EntryPoint]) -> None:
    assert loaded(three, "slow-dist,fst_entry, Zzz").unmatched == ("Zzz", "fst_entry")
    assert loaded(three, "slow-dist").unmatched == ()


def test_a_blocked_plugin_is_not_imported(install_source: Install) -> None:
    registry = loaded([install_source("raise RuntimeError('imported')")], "")
    assert registry.broken == ()
    assert [str(source) for source in registry.blocked] == ["fast-attention 1.2.3"]


def test_a_plugin_cannot_call_itself_built_in(install: Install) -> None:
    """The built-in is known by its distribution: an entry point's name is for anyone to choose."""
    intruder = install(bringing(spec()), "attnplug", "intruder-dist")
    assert loaded([intruder], "").backends == {}


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
    with pytest.raises(PluginError, match=r"(?s)one-dist.*two-dist"):
        load_registry(points, {"ATTNPLUG_STRICT": "1"})


def test_strict_mode_minds_names_that_match_nothing(three: list[EntryPoint]) -> None:
    with pytest.raises(PluginError, match="'fst'"):
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


def test_an_unknown_name_far_from_all_gets_no_guess(install: Install) -> None:
    with pytest.raises(UsageError) as caught:
        load_registry([install(bringing(spec("flash_attn")))], {}).get("zzz")
    assert "did you mean" not in str(caught.value)
    assert "flash_attn" in str(caught.value)


def test_a_name_where_nothing_is_installed_is_told_so() -> None:
    with pytest.raises(UsageError, match="none"):
        load_registry([], {}).get("fast")


@pytest.mark.parametrize("name", ["", "é✨", "x" * 10_000, "a\nb", "%s", "{}", "[bold]"])
def test_any_text_as_a_name_is_an_error_for_a_person(install: Install, name: str) -> None:
    with pytest.raises(UsageError):
        load_registry([install(bringing(spec()))], {}).get(name)


def test_asking_for_a_broken_backend_tells_what_is_wrong(install: Install) -> None:
    """D2: by the backend's name, or by the entry point's where the backend's is not known."""
    registry = load_registry(
        [
            install(bringing(spec("old", contract="9.0")), "x", "old-dist", "7.7"),
            install(bringing(), "empty", "empty-dist", "8.8"),
        ],
        {},
    )
    with pytest.raises(PluginError, match=r"(?s)'old'.*old-dist 7\.7.*9\.0"):
        registry.get("old")
    with pytest.raises(PluginError, match=r"(?s)'empty'.*empty-dist 8\.8"):
        registry.get("empty")


def test_asking_for_a_taken_name_tells_both_claims(install: Install) -> None:
    """D2"""
    points = [install(bringing(spec()), "x", f"{letter}-dist") for letter in "ab"]
    with pytest.raises(PluginError, match=r"(?s)a-dist.*b-dist"):
        load_registry(points, {}).get("fast")


def test_asking_for_a_blocked_backend_tells_how_to_allow_it(install: Install) -> None:
    registry = loaded([install(bringing(spec()), "fast")], "")
    with pytest.raises(UsageError) as caught:
        registry.get("fast")
    for text in ("blocked", "ATTNPLUG_PLUGINS", "fast-attention", "1.2.3"):
        assert text in str(caught.value)
