"""MLA prefilled as MHA: over rows passed as arguments, one-shot or chunked, alone and inside every wrapper."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import (
    BackendContext,
    BackendError,
    Claims,
    ExtendPath,
    ForwardMode,
    GraphLevel,
    Plan,
    PlanError,
    RaggedCall,
    Serving,
)
from attnplug.contract.backend import bind_hook, hook_signatures
from attnplug.contract.batch import BackendId
from attnplug.host import ExtendPolicy
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_conformance.arithmetic import relative_error
from attnplug_conformance.checks.mla_paths import UpProjected
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene, mla
from attnplug_testing.references.flashattention import build, on_cpu, on_devices

ONE_SHOT, CHUNKED = ExtendPath.ONE_SHOT, ExtendPath.CHUNKED
everywhere = on_devices("fa4", "fa2", "torch", "torch before paging")
MIXED_PREFIXES = ((130, 40), (0, 9), (64, 1), (1, 3))


class NoLinear:
    """Stand-in for a hybrid model's linear backend; all layers under test are MLA."""

    claims = Claims(cuda_graph=GraphLevel.ALWAYS, needs_cpu_seq_lens=False)

    def __init__(self) -> None:
        self.backend_id = BackendId("linear")

    def init_forward_metadata(self, batch):
        return Plan(self.backend_id, batch.forward_mode, 0, None)


def alone(context: BackendContext, kernel: str):
    return build(kernel)(context)


def hybrid(context: BackendContext, kernel: str):
    return HybridLinearBackend(build(kernel)(context), NoLinear(), context.model)


def split(context: BackendContext, kernel: str):
    return SplitBackend(build(kernel)(context), TorchNativeBackend(context))


def hybrid_of_split(context: BackendContext, kernel: str):
    return HybridLinearBackend(split(context, kernel), NoLinear(), context.model)


def scene(case: KernelCase, kernel: str, device: str, wrap=alone) -> KernelScene:
    case = on_cpu(case) if device == "cpu" else case
    return KernelScene(case, device, lambda context: wrap(context, kernel))


def error(layer: UpProjected, policy: ExtendPolicy) -> float:
    out, wanted = layer.run(policy), layer.wanted()
    assert (out[len(wanted) :] == 0).all()
    return relative_error(out[: len(wanted)], wanted)


@everywhere
@pytest.mark.parametrize(("path", "capacity"), [(ONE_SHOT, 100), (CHUNKED, 1), (CHUNKED, 100)])
@pytest.mark.sample(6)
def test_chunks_that_split_and_pack_and_leave_requests_out(path, capacity, kernel, device):
    """C1, C2, C3, C4"""
    prefixes = ((3, 4), (0, 2), (2, 5)) if capacity == 1 else MIXED_PREFIXES
    if device == "cuda" and capacity != 1:
        prefixes = ((900, 333), (0, 90), (64, 1), (1, 30))
    stage = scene(mla(prefixes, page_size=16, padding=3, heads=4), kernel, device)
    assert error(UpProjected(stage), ExtendPolicy(forced=path, chunk_capacity=capacity)) <= 4 * stage.tolerance


@on_devices("fa4", "torch")
@pytest.mark.parametrize(
    ("wrap", "mode"),
    [
        (alone, ForwardMode.MIXED),
        (hybrid, ForwardMode.EXTEND),
        (split, ForwardMode.DRAFT_EXTEND),
        (hybrid_of_split, ForwardMode.MIXED),
    ],
)
def test_every_wrapper_drives_it_without_a_hook(mode, wrap, kernel, device):
    """A6, A8, A9: no ``init_mha_chunk_metadata`` means nothing to plan, also behind wrappers. Short prefixes, which
    others would extend absorbed, run as MHA too: it claims no absorbed path."""
    stage = scene(mla(MIXED_PREFIXES, mode, heads=4), kernel, device, wrap)
    assert stage.backend.claims.mla_extend == {ONE_SHOT, CHUNKED}
    layer = UpProjected(stage)
    assert error(layer, ExtendPolicy()) <= 4 * stage.tolerance
    (call,) = layer.batch.geometry.calls  # in one shot
    assert sum(call.kv_lens) == sum(stage.totals)
    assert layer.batch.plan.chunks is None


def test_it_has_no_chunk_hook_and_every_other_one_that_it_claims():
    """A6, A9"""
    backend = scene(mla(((0, 3),), heads=4), "fa4", "cpu").backend
    hooks = {name for name, given in hook_signatures().items() if bind_hook(backend, name, tuple(given.parameters))}
    assert hooks == {
        "forward_ragged",
        "init_cuda_graph_state",
        "init_forward_metadata_out_graph",
        "init_forward_metadata_in_graph",
        "get_cuda_graph_seq_len_fill_value",
    }


@pytest.mark.parametrize("wrap", [split, hybrid_of_split])
def test_another_backend_decodes_what_it_prefilled(wrap):
    """A9: prefill by this one and decode by another, over one cache."""
    stage = scene(mla(((0, 30), (0, 7)), heads=4, page_size=16), "fa4", "cpu", wrap)
    layer = UpProjected(stage)
    layer.run(ExtendPolicy())
    stage.case = replace(stage.case, mode=ForwardMode.DECODE, lengths=tuple((n, 1) for n in stage.totals))
    stage.new, stage.totals = [1, 1], [total + 1 for total in stage.totals]
    stage.keys = [torch.cat([rows, stage.normal(1, *rows.shape[1:])]) for rows in stage.keys]
    stage.values = [rows[..., : stage.widths[1]] for rows in stage.keys]
    layer.q = stage.normal(2, 4, stage.layer.head_dim)
    assert error(layer, ExtendPolicy()) <= 1e-5


@pytest.mark.parametrize("chunks_off", [True, False])
@pytest.mark.parametrize("prefix", [0, 50])
def test_switches_that_would_leave_it_nothing(prefix, chunks_off):
    """A3's switches: without chunks it prefills in one shot. Without ragged attention it has no path left and
    refuses."""
    serving = Serving(disable_chunked_prefix_cache=chunks_off)
    stage = scene(mla(((prefix, 9),), heads=4, serving=serving), "fa4", "cpu")
    layer = UpProjected(stage)
    assert error(layer, ExtendPolicy(disable_chunked_prefix_cache=chunks_off, chunk_capacity=4)) <= 4 * stage.tolerance
    assert layer.batch.geometry.calls[0].kv_lens == (prefix + 9 if chunks_off else 9,)
    with pytest.raises(PlanError):
        layer.run(ExtendPolicy(disable_ragged=True))


def test_an_mla_layer_cannot_be_run_in_latent_space():
    stage = scene(mla(((20, 1),), ForwardMode.DECODE, heads=4), "fa4", "cpu")
    with pytest.raises(BackendError) as caught:
        stage.run()
    assert caught.value.settings == ("prefill_attention_backend",)


def test_a_log_sum_exp_of_another_shape_is_refused():
    stage = scene(mla(((0, 3),), heads=4), "fa4", "cpu")
    layer = UpProjected(stage)
    keys, values = layer.weights.up_project(stage.new_rows(stage.keys).squeeze(1))
    call = RaggedCall.of(0, [3], [3], causal=True, device=stage.device)
    with raises_naming(BackendError, (3, 4)):
        stage.backend.forward_ragged(layer.q, keys, values, stage.layer, call, lse=torch.empty(4, 3))


@pytest.mark.parametrize("kernel", ["fa4", "torch"])
def test_a_captured_decode_or_verify_of_another_backend_is_refused(kernel):
    """A9: it claims captured decodes for MLA whichever kernel it prefills with, so that a split can capture the decodes
    of its other child. A verify or a decode that is sent to it is refused."""
    backend = scene(mla(((0, 3),), heads=4), kernel, "cpu").backend
    assert backend.claims.cuda_graph is GraphLevel.DECODE
    backend.init_cuda_graph_state(2, 8)
    for lengths, mode in ((((30, 4),), ForwardMode.TARGET_VERIFY), (((30, 1),), ForwardMode.DECODE)):
        batch = scene(mla(lengths, mode, heads=4), kernel, "cpu").batch()
        with raises_naming(PlanError, mode):
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
