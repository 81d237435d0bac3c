"""One workspace for the backend and its fallback (A2)."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from attnplug import BackendContext, BackendError, ForwardMode, Serving
from attnplug.host import Limits
from attnplug_flashinfer_mla.backend import FlashInferMLABackend
from attnplug_flashinfer_mla.plugin import CAPABILITIES
from attnplug_testing.batches import declaring
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelScene, mla
from attnplug_testing.references.blackwell import pretend
from attnplug_trtllm_mla import build as plugin
from attnplug_trtllm_mla.backend import TRTLLMMLABackend
from attnplug_trtllm_mla.options import TRTLLMMLAOptions

MIB = 1 << 20
CASE = mla(((20, 1),), ForwardMode.DECODE, heads=128)


def trtllm_mla(context: BackendContext) -> TRTLLMMLABackend:
    return plugin.trtllm_mla(declaring(context, "trtllm_mla"))


def test_one_scratch_buffer_and_semaphores_apart_from_it(monkeypatch):
    """A2: the fallback requests the same amount of the same kind, and gets the same memory."""
    given = pretend(monkeypatch)
    stage = KernelScene(CASE, "cpu", trtllm_mla)
    scratch, semaphores = stage.workspace.report()
    assert (scratch.kind, scratch.zeroed, scratch.nbytes) == ("scratch", False, 128 * MIB)
    assert scratch.owners == {"under_test": 128 * MIB, "under_test/flashinfer_mla": 128 * MIB}
    assert (semaphores.kind, semaphores.zeroed, semaphores.nbytes) == ("trtllm-semaphores", True, 4 * MIB)
    assert semaphores.owners == {"under_test": 4 * MIB}
    assert scratch.retired_bytes == semaphores.retired_bytes == 0
    assert stage.workspace.nbytes == 132 * MIB
    (lane,) = stage.backend.lanes
    assert given and all(buffer is lane.decode.scratch.buffer for buffer in given)
    assert lane.decode.counters.buffer.data_ptr() != lane.decode.scratch.buffer.data_ptr()


def test_every_lane_has_memory_of_its_own(monkeypatch):
    """A2: a lane shares its memory only with the fallback's lane of the same number."""
    given = pretend(monkeypatch)
    stage = KernelScene(replace(CASE, lanes=2), "cpu", trtllm_mla)
    lanes = stage.backend.lanes
    assert [buffer.data_ptr() for buffer in given] == [lane.decode.scratch.buffer.data_ptr() for lane in lanes]
    memories = {memory.buffer.data_ptr() for lane in lanes for memory in (lane.decode.scratch, lane.decode.counters)}
    assert len(memories) == 4
    assert all(lane.ragged._scratch is lane.decode.scratch for lane in lanes)
    assert stage.workspace.nbytes == 2 * 132 * MIB


@pytest.mark.parametrize(("heads", "kernel_heads"), [(3, 8), (8, 8), (9, 16), (65, 128), (96, 128)])
def test_semaphores_are_for_the_heads_that_the_kernel_is_given(monkeypatch, heads, kernel_heads):
    """One a request and head, those that pad the model's included, and for the most requests of a call."""
    pretend(monkeypatch)
    stage = KernelScene(replace(CASE, mla_heads=heads), "cpu", trtllm_mla)
    (semaphores,) = (use for use in stage.workspace.report() if use.kind == "trtllm-semaphores")
    assert semaphores.nbytes == 4 * 8192 * kernel_heads
    assert stage.backend.lanes[0].decode.heads == kernel_heads


def test_the_fallback_is_built_from_the_same_parts(monkeypatch):
    """A10: the fallback gets the coordinator and all other parts of the context. Only its name and options are its own,
    and its capabilities are those of flashinfer_mla."""
    pretend(monkeypatch)
    coordinator, contexts = object(), []

    def build(context: BackendContext) -> object:
        contexts.append(replace(context, coordinator=coordinator))
        return trtllm_mla(contexts[0])

    case = replace(CASE, serving=Serving(disaggregation_mode="prefill"))
    own = KernelScene(case, "cpu", build).backend._fallback.context
    for field in fields(BackendContext):
        if field.name not in ("name", "options", "declared"):
            assert getattr(own, field.name) is getattr(contexts[0], field.name), field.name
    assert own.declared is CAPABILITIES


def test_a_larger_workspace_is_asked_for_before_the_fallback_holds_a_smaller_one(monkeypatch):
    """A2"""
    given = pretend(monkeypatch)
    stage = KernelScene(replace(CASE, options=TRTLLMMLAOptions(workspace_mib=200)), "cpu", trtllm_mla)
    assert {buffer.numel() for buffer in given} == {200 * MIB}
    assert stage.workspace.nbytes == 204 * MIB


def test_beside_flashinfer_mla_itself_nothing_is_added_but_semaphores(monkeypatch):
    """A2: workspaces of equal kind are shared, even by different backends."""
    pretend(monkeypatch)

    def both(context: BackendContext) -> FlashInferMLABackend:
        trtllm_mla(replace(context, name="trtllm_mla"))
        return FlashInferMLABackend(replace(context, name="flashinfer_mla", declared=CAPABILITIES))

    stage = KernelScene(CASE, "cpu", both)
    assert stage.workspace.nbytes == 132 * MIB
    assert set(stage.workspace.report()[0].owners) == {"trtllm_mla", "trtllm_mla/flashinfer_mla", "flashinfer_mla"}


@pytest.mark.parametrize("sm", [80, 90, 101, 120])
def test_on_another_gpu_nothing_is_built(monkeypatch, sm):
    """A caller that builds without a selection is refused, too, before any memory is requested."""
    given = pretend(monkeypatch, sm)
    owners = []

    def build(context: BackendContext) -> object:
        owners.append(context.workspace)
        return trtllm_mla(context)

    with raises_naming(BackendError, f"SM {sm}") as caught:
        KernelScene(CASE, "cpu", build)
    assert caught.value.settings == ("attention_backend",)
    assert not given and owners[0].report() == ()


@pytest.mark.parametrize(("mib", "tokens", "least"), [(70, 1, 76), (128, 1 << 17, 129)])
def test_too_little_scratch_is_refused_with_what_is_enough(monkeypatch, mib, tokens, least):
    """Partial results of decode on 148 multiprocessors, or statistics of the largest step."""
    pretend(monkeypatch)

    def build(context: BackendContext) -> object:
        limits = Limits(1, tokens, context.limits.max_context)
        return trtllm_mla(replace(context, limits=limits, options=TRTLLMMLAOptions(mib)))

    with raises_naming(BackendError, least) as caught:
        KernelScene(CASE, "cpu", build)
    assert caught.value.settings == ("under_test.workspace_mib",)
