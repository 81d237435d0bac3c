"""What a plugin gets that was written for the draft that called itself contract 1.0 (D4)."""

from __future__ import annotations

import pytest

import attnplug as author
from attnplug import host
from attnplug_testing.command import Attnplug, Package

GUIDE_PLUGIN = """
from attnplug import AttentionKind, BackendSpec, Capabilities, DType, hookimpl

@hookimpl
def attnplug_backends() -> list[BackendSpec]:
    return [BackendSpec(
        name="my_attention", summary="one request at a time", contract="1.0",
        factory="my_attention.backend:MyBackend",
        capabilities=Capabilities(kinds=frozenset({AttentionKind.MHA}), devices=frozenset({"cpu", "cuda"}),
                                  dtypes=frozenset({DType.FLOAT32, DType.BFLOAT16})),
    )]
"""
"""As the draft's guide had it."""

WRAPPER_PLUGIN = """
from attnplug import Capabilities, BackendSpec, ForwardingBackend, build_backend, hookimpl, load_registry

class Timed(ForwardingBackend):
    pass

@hookimpl
def attnplug_backends():
    return [BackendSpec("timed", "times another backend", "1.0", f"{__name__}:Timed",
                        Capabilities(kinds=["mha"], devices=["cpu"], dtypes=["float32"]))]
"""
"""A wrapper that builds what it wraps, by names that the draft's one face had."""


@pytest.fixture
def of_the_draft(plain_environment: None, package: Package) -> None:
    package("my_attention", GUIDE_PLUGIN)
    package("timed", WRAPPER_PLUGIN)


WHAT_TO_CHANGE = (
    "it speaks contract 1.0, this attnplug speaks 0.9: contract 1.0 was a draft that was never released; "
    "make the changes that CHANGELOG.md lists under 'Contract 0.9', then declare contract='0.9'"
)


@pytest.mark.usefixtures("of_the_draft")
def test_a_plugin_of_the_draft_is_listed_with_what_to_change(attnplug: Attnplug) -> None:
    """D2, D4"""
    rows = {row["name"]: row for row in attnplug("backends", "--all", "--json").json}
    assert (rows["my_attention"]["status"], rows["my_attention"]["contract"]) == ("broken", "1.0")
    assert rows["my_attention"]["error"] == WHAT_TO_CHANGE
    assert rows["torch_native"]["status"] == "usable"


@pytest.mark.usefixtures("of_the_draft")
def test_a_wrapper_of_the_draft_is_told_where_its_names_are(attnplug: Attnplug) -> None:
    """D2, D4: its module fails before its version can be read."""
    (row,) = [row for row in attnplug("backends", "--all", "--json").json if row["name"] == "timed"]
    assert row["error"] == "ImportError: build_backend is not in attnplug: from attnplug.host import build_backend"


@pytest.mark.usefixtures("of_the_draft")
def test_explaining_a_choice_warns_of_plugins_of_the_draft(attnplug: Attnplug) -> None:
    """D4"""
    outcome = attnplug("explain", "--model", "tiny:llama")
    assert outcome.code == 0
    assert f"warning: plugin my_attention (my_attention-dist 1.2.3): {WHAT_TO_CHANGE}" in outcome.err
    assert "attnplug.host import build_backend" in outcome.err


@pytest.mark.usefixtures("of_the_draft")
@pytest.mark.parametrize(("name", "needs"), [("my_attention", WHAT_TO_CHANGE), ("timed", "from attnplug.host import")])
def test_asking_for_a_backend_of_the_draft_tells_what_to_change(attnplug: Attnplug, name: str, needs: str) -> None:
    """D3, D4"""
    outcome = attnplug("explain", "--model", "tiny:llama", "--attention-backend", name)
    assert outcome.code != 0
    assert f"backend {name!r} is installed but broken" in outcome.err and needs in outcome.err


def test_a_name_that_is_gone_says_what_replaced_it() -> None:
    """D4"""
    assert author._REMOVED
    for name, instead in author._REMOVED.items():
        assert name not in author.__all__ and name not in host.__all__
        with pytest.raises(ImportError, match=f"{name} is gone since contract 0.9") as caught:
            exec(f"from attnplug import {name}")
        assert instead in str(caught.value)


def test_a_name_of_the_other_face_says_which() -> None:
    with pytest.raises(ImportError, match=r"from attnplug\.host import select$"):
        exec("from attnplug import select")
    with pytest.raises(ImportError, match=r"from attnplug import Plan$"):
        exec("from attnplug.host import Plan")


def test_a_name_that_nobody_has_is_missing_as_in_any_module() -> None:
    assert not hasattr(author, "no_such_name") and not hasattr(host, "no_such_name")
    with pytest.raises(ImportError, match="cannot import name"):
        exec("from attnplug import no_such_name")
