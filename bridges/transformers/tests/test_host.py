"""Host description of transformers: the adapted problem, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attnplug import BackendError, DType, GraphLevel, Problem, RefusalCode, Role
from attnplug.declare.errors import PluginWarning
from attnplug.host import BackendRequest, BuildError, Selection
from attnplug.sparse import CompressedDims, IndexerDims
from attnplug_testing.measured import measured_twins
from attnplug_testing.specs import GDN, MHA, MLA, model
from attnplug_transformers import pages
from attnplug_transformers.errors import BridgeError
from attnplug_transformers_host import HOST, fit, refuse


def test_a_draft_is_an_extend_and_no_graphs_are_captured():
    asked = Problem(model(MHA), cuda_graph=GraphLevel.UNIFORM, wants_graphs=True, speculative_tokens=4)
    found = fit(asked)
    assert (found.cuda_graph, found.wants_graphs, found.speculative_tokens) == (GraphLevel.NEVER, False, 0)


def test_latent_layers_are_expanded_and_linear_layers_stay_with_transformers():
    found = fit(Problem(model(MLA, GDN))).model
    assert found is not None
    (layer,) = found.layers
    assert layer.mla is None and layer.num_kv_heads == layer.num_heads == MLA.num_heads


def test_keys_and_values_have_the_models_type():
    assert fit(Problem(model(MHA), dtype=DType.BFLOAT16)).kv_dtype is DType.BFLOAT16


@pytest.mark.parametrize(
    ("problem", "code", "value"),
    [
        (Problem(model(MHA), kv_dtype=DType.FLOAT8_E4M3), RefusalCode.KV_DTYPE, "float8_e4m3fn"),
        (Problem(model(GDN)), RefusalCode.KIND, ["gdn"]),
        (Problem(model(MHA, replace(MLA, indexer=IndexerDims(4, 64, 64)))), RefusalCode.FEATURE, "sparse"),
    ],
)
def test_what_the_bridge_cannot_carry_is_refused(problem, code, value):
    (reason,) = refuse(problem)
    assert (reason.code, reason.value) == (code, value)


def test_compressed_entries_are_refused():
    """They cannot be described as MHA; such a model's configuration can still be explained."""
    entries = replace(MLA, sliding_window=64, compressed=CompressedDims(4))
    problem = fit(Problem(model(MHA, entries)))
    assert [reason.value for reason in refuse(problem)] == ["compressed"]


def test_auto_takes_the_backend_that_was_measured_the_fastest(monkeypatch, tmp_path):
    """One backend serves all batches, as transformers cannot plan each batch with another one."""
    twins = measured_twins(monkeypatch, tmp_path, MHA, DType.FLOAT32)
    monkeypatch.setattr(pages, "load_registry", lambda: twins)
    found = pages.choose(BackendRequest(), Problem(model(MHA), "cpu", dtype=DType.FLOAT32))
    assert [backend.spec.name for backend in found.serving(Role.DECODE)] == ["beta"]


def test_auto_continues_without_a_backend_that_cannot_be_built(monkeypatch, tmp_path):
    """D2; one that is named is an error in transformers' words."""
    twins = measured_twins(monkeypatch, tmp_path, MHA, DType.FLOAT32)
    monkeypatch.setattr(pages, "load_registry", lambda: twins)

    def build(selection: Selection) -> str:
        chosen = selection.chosen(Role.DECODE)
        if chosen.spec.name == "beta":
            raise BuildError(chosen, BackendError("its library cannot be imported"))
        return chosen.spec.name

    problem = Problem(model(MHA), "cpu", dtype=DType.FLOAT32)
    with pytest.warns(PluginWarning, match="beta .* its library cannot be imported; auto continues without it"):
        assert pages.choose_and_build(BackendRequest(), problem, build) == "alpha"
    with pytest.raises(BridgeError, match="its library cannot be imported"):
        pages.choose_and_build(BackendRequest("beta"), problem, build)


def test_a_version_past_the_range_is_refused():
    assert HOST.version_refusal("5.23.3") is None and HOST.version_refusal("5.24.0") is not None


def test_every_setting_has_an_argument_or_is_not_shown():
    assert (HOST.render("dtype"), HOST.render("device")) == ("dtype=", "device_map=")
    assert HOST.render("max_batch") is None
    assert HOST.render("triton_mha.splits") == "attnplug_transformers.register(…): option triton_mha.splits"
