"""Faults of one plugin, from its import to its contract version, and their isolation from other plugins."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from importlib_metadata import EntryPoint

from attnplug import BackendSpec, Problem, Refusal, Role, hookimpl
from attnplug.host import load_registry
from attnplug.registry.loading import GROUP, Broken
from attnplug_testing.errors import raises_naming
from attnplug_testing.plugins import Install, bringing, module, place, spec

# ---- isolation ----


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("import no_such_kernel_library", "no_such_kernel_library"),
        ("raise AssertionError('needs an H100')", "AssertionError: needs an H100"),
        ("raise RuntimeError('driver too old')", "RuntimeError: driver too old"),
        ("import sys; sys.exit('bye')", "SystemExit: bye"),
        ("import os; os._exit(3)", "os._exit(3)"),
        ("from os import _exit\ntry: _exit(0)\nexcept Exception: pass", "os._exit(0)"),
        ("raise GeneratorExit", "GeneratorExit"),
        ("def again(): again()\nagain()", "RecursionError"),
        ("def (", "SyntaxError"),
        ("class Odd(BaseException): pass\nraise Odd('neither an Exception')", "Odd: neither an Exception"),
        ("class Mute(Exception):\n def __str__(self): raise ValueError('no text')\nraise Mute", "Mute"),
        ("class Mute(Exception):\n def __str__(self): raise SystemExit\nraise Mute", "Mute: (its message cannot"),
        ("raise ValueError('x' * 100_000)", "x… (100000 characters)"),
        (r"raise ValueError('\x1b[31mred\x00')", "ValueError: ?[31mred?"),
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
    missing = EntryPoint("fast", f"{point.value}:plugin", GROUP)._for(point.dist)
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


def test_a_generator_that_raises_midway_provides_nothing(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D2: half a plugin is not used."""

    @hookimpl
    def attnplug_backends() -> Iterator[BackendSpec]:
        yield spec("half")
        raise RuntimeError("midway")

    assert "RuntimeError: midway" in only_fault(install(module(attnplug_backends=attnplug_backends))).error


def test_an_interrupt_names_the_plugin_that_was_loading(install_source: Install) -> None:
    """The message names the plugin that was loading, whether the user or the plugin raised the interrupt."""
    with raises_naming(KeyboardInterrupt, "fast (fast-attention 1.2.3)"):
        load_registry([install_source("raise KeyboardInterrupt")], {})


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import sys; sys.path.clear()", "sys.path"),
        ("import sys; sys.path = []", "sys.path"),
        ("import sys; del sys.path[0]", "sys.path"),
        ("import sys; sys.meta_path.clear()", "sys.meta_path"),
        ("import sys; sys.path_hooks.clear()", "sys.path_hooks"),
    ],
)
def test_a_plugin_that_breaks_the_import_system_is_broken_alone(
    install_source: Install, only_fault: Callable[[EntryPoint], Broken], source: str, what: str
) -> None:
    """D2: otherwise nothing could be imported afterwards."""
    before = sys.path, list(sys.path), list(sys.meta_path), list(sys.path_hooks)
    assert f"removed entries from {what}" in only_fault(install_source(source)).error
    assert before == (sys.path, list(sys.path), list(sys.meta_path), list(sys.path_hooks))
    assert before[0] is sys.path


GOOD = "\nfrom attnplug_testing.plugins import bringing, spec\nattnplug_backends = bringing(spec()).attnplug_backends"


def process_state() -> list[object]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    settings = [os._exit, list(warnings.filters), *handlers]
    return [os.getcwd(), sys.stdout, sys.stderr, "HOSTILE" in os.environ, *settings]


@pytest.mark.parametrize(
    "source",
    [
        "os.chdir('/')",
        "sys.stderr = None",
        "sys.stdout = io.StringIO()",
        "warnings.simplefilter('error')",
        "signal.signal(signal.SIGINT, signal.SIG_IGN)",
        "signal.signal(signal.SIGTERM, lambda *_: None)",
        "os.environ.clear()",
    ],
)
def test_what_a_plugin_changes_for_the_whole_process_is_put_back(
    install_source: Install, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """D2: e.g. a model's path may be relative, and Ctrl-C must still end a command."""
    monkeypatch.setenv("HOSTILE", "1")
    before = process_state()
    lines = f"import io, os, signal, sys, warnings\n{source}{GOOD}"
    assert load_registry([install_source(lines)], {}).broken == ()
    assert process_state() == before


def test_what_a_plugin_adds_to_the_environment_stays(install_source: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel libraries are configured by it."""
    monkeypatch.setenv("HOSTILE", "1")
    assert load_registry([install_source(f"import os; os.environ['HOSTILE'] = '2'{GOOD}")], {}).broken == ()
    assert os.environ["HOSTILE"] == "2"


@pytest.mark.parametrize(
    "source",
    [
        "sys.stdout.close(); sys.stderr.close()",
        "sys.__stdout__.close(); sys.__stderr__.close()",
        "sys.__stdout__.buffer.close()",
        "sys.__stderr__.detach()",
        "os.close(0); os.close(1); os.close(2)",
        "os.dup2(os.open(os.devnull, os.O_WRONLY), 2)",
    ],
)
def test_streams_that_a_plugin_closes_are_open_again(
    install_source: Install, capfd: pytest.CaptureFixture[str], source: str
) -> None:
    """D2: a plugin's stdout is redirected to stderr, to which commands write their errors."""
    files = [os.fstat(descriptor) for descriptor in range(3)]
    assert load_registry([install_source(f"import os, sys\n{source}{GOOD}")], {}).broken == ()
    assert [os.path.samestat(file, os.fstat(descriptor)) for descriptor, file in enumerate(files)] == [True] * 3
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        print("é", file=stream, flush=True)
    assert capfd.readouterr() == ("é\né\n", "é\né\n")


def test_a_stream_that_a_plugin_keeps_can_be_written_to_later(
    install_source: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    """Logging handlers do this."""
    point = install_source(f"import logging\nhandler = logging.StreamHandler(){GOOD}")
    load_registry([point], {})
    point.load().handler.stream.write("later\n")
    assert "later" in capfd.readouterr().err


def test_a_process_that_a_plugin_forks_ends_as_it_wants(install_source: Install) -> None:
    source = "import os\nif os.fork() == 0: os._exit(7)\nassert os.waitstatus_to_exitcode(os.wait()[1]) == 7"
    assert load_registry([install_source(f"{source}{GOOD}")], {}).broken == ()


def test_the_stack_of_a_crash_names_the_plugin(install_source: Install, tmp_path: Path) -> None:
    """D2: native code may end the process, and faulthandler's stack is all that is left."""
    opened = f"with open({str(tmp_path / 'stack')!r}, 'w') as file:"
    load_registry([install_source(f"import faulthandler\n{opened} faulthandler.dump_traceback(file){GOOD}")], {})
    assert "loading fast (fast-attention 1.2.3)" in (tmp_path / "stack").read_text()


def test_what_a_plugin_adds_to_the_path_stays(install_source: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its backend may be found there, later."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = "import sys; sys.path.append('/no/such/folder')\nfrom attnplug_testing.plugins import bringing, spec\n"
    registry = load_registry([install_source(source + "attnplug_backends = bringing(spec()).attnplug_backends")], {})
    assert registry.broken == ()
    assert "/no/such/folder" in sys.path


@pytest.mark.parametrize(("name", "version"), [(None, None), (None, "1.0"), ("fast-attention", None)])
def test_a_distribution_with_damaged_metadata_is_isolated(
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
        (spec(), "one BackendSpec"),
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


def test_a_generator_without_end_is_broken_alone(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    """D2"""

    @hookimpl
    def attnplug_backends() -> Iterator[BackendSpec]:
        return itertools.repeat(spec())

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert "more than 1000" in error and place(attnplug_backends) in error


def test_a_spec_of_a_class_of_its_own_is_broken_alone(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D2: selection calls a spec's methods without a guard."""

    class Hostile(BackendSpec):
        def refusals(self, problem: Problem, role: Role | None = None) -> list[Refusal]:
            raise SystemExit

    fields = {field.name: getattr(spec(), field.name) for field in dataclasses.fields(BackendSpec)}
    assert "(Hostile) at position 0, not a BackendSpec" in only_fault(install(bringing(Hostile(**fields)))).error


def test_a_dict_is_called_a_dict(install: Install, only_fault: Callable[[EntryPoint], Broken]) -> None:
    """D2: the error speaks of the dict that the author returned, not of the keys that iterating it gives."""

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
    assert "returned nothing" in only_fault(install(bringing())).error


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

    plugin.attnplug_bakcends = attnplug_bakcends
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


def test_an_undecorated_hook_beside_a_good_one_is_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """D2: no hook of a plugin is dropped silently."""
    plugin = bringing(spec())
    plugin.attnplug_tiny_models = lambda: {}
    assert "is not marked as a hook" in only_fault(install(plugin)).error


def test_two_implementations_of_one_hook_are_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    @hookimpl(specname="attnplug_backends")
    def more() -> list[BackendSpec]:
        return [spec("other")]

    plugin = bringing(spec())
    plugin.more = more
    error = only_fault(install(plugin)).error
    assert "both implement attnplug_backends" in error and place(more) in error


def test_an_undecorated_hook_that_is_no_function_is_reported(
    install: Install, only_fault: Callable[[EntryPoint], Broken]
) -> None:
    """A partial has no __name__ to print."""
    hook = functools.partial(list, [spec()])
    error = only_fault(install(module(attnplug_backends=hook))).error
    assert "@attnplug.hookimpl" in error
    assert "attnplug_backends" in error


def test_the_error_for_a_module_without_hooks_says_what_to_define(
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
def test_a_hook_argument_that_is_never_passed_is_reported_with_the_author_s_signature(
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
    """D2: a wrapper could change the results of other plugins."""

    @hookimpl(wrapper=True)
    def attnplug_backends() -> Any:
        return (yield)

    error = only_fault(install(module(attnplug_backends=attnplug_backends))).error
    assert "wrapper" in error
    assert place(attnplug_backends) in error


def test_an_object_that_cannot_be_compared_is_loaded(install: Install) -> None:
    """D2: pluggy looks for registered plugins by comparing them."""

    class Plugin:
        __hash__ = None

        def __eq__(self, other: object) -> bool:
            raise TypeError("do not compare me")

        @hookimpl
        def attnplug_backends(self) -> list[BackendSpec]:
            return [spec()]

    points = [install(Plugin(), "fast"), install(bringing(spec("other")), "other", "z-last")]
    assert set(load_registry(points, {}).backends) == {"fast", "other"}


def test_one_plugin_under_two_entry_points_is_reported_as_that(install: Install) -> None:
    """D2: pluggy's own words for it speak of its internals."""
    plugin = bringing(spec())
    registry = load_registry([install(plugin, "one"), install(plugin, "two")], {})
    (fault,) = registry.broken
    assert "loaded by entry point fast-attention:one" in fault.error and "two" in str(fault)
