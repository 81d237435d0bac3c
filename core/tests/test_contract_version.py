"""The contract gate: a plugin for another contract version is refused, with what to do (D4)."""

from __future__ import annotations

import pytest

from attnplug_testing.command import Attnplug, Package
from attnplug_testing.errors import missing_values

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
