"""One workspace, owned in one place (A2)."""

from __future__ import annotations

import gc

import pytest
import torch

from attnplug import SCRATCH, WorkspaceKind
from attnplug.declare.errors import WorkspaceError
from attnplug.host import WorkspaceOwner
from attnplug_testing.errors import raises_naming

MiB = 1 << 20
SEMAPHORES = WorkspaceKind("semaphores", zeroed=True)
OVERWRITTEN = WorkspaceKind("overwritten")


def test_same_contract_shares_one_allocation():
    """A2: two backends with the same contract share one allocation."""
    owner = WorkspaceOwner()
    first = owner.request("flashinfer_mla", "cpu", SCRATCH, 384 * 1024)
    second = owner.request("trtllm_mla", "cpu", SCRATCH, 150 * 1024)
    assert first.buffer.data_ptr() == second.buffer.data_ptr()
    assert owner.nbytes == 384 * 1024


def test_asking_for_more_grows_it_for_everyone():
    """A2: asking for more grows it."""
    owner = WorkspaceOwner()
    first = owner.request("a", "cpu", SCRATCH, MiB)
    second = owner.request("b", "cpu", SCRATCH, 4 * MiB)
    assert first.buffer.numel() == 4 * MiB
    assert first.buffer is second.buffer


def test_no_duplicate_remains_after_growing():
    """A2: the total has no duplicate."""
    owner = WorkspaceOwner()
    owner.request("a", "cpu", SCRATCH, MiB)
    owner.request("b", "cpu", SCRATCH, 4 * MiB)
    gc.collect()
    assert owner.nbytes == 4 * MiB


def test_a_holder_of_the_old_buffer_shows_in_the_report():
    """A2: the reported total includes a replaced buffer as long as a reference to it exists."""
    owner = WorkspaceOwner()
    held = owner.request("a", "cpu", SCRATCH, MiB).buffer
    owner.request("b", "cpu", SCRATCH, 4 * MiB)
    assert owner.report()[0].retired_bytes == held.numel() == MiB
    assert owner.nbytes == 5 * MiB
    del held
    gc.collect()
    assert owner.report()[0].retired_bytes == 0


def test_zeroed_memory_is_zero_and_never_handed_out_as_scratch():
    """A2: semaphore memory is a different kind from plain scratch."""
    owner = WorkspaceOwner()
    scratch = owner.request("a", "cpu", SCRATCH, 1024)
    scratch.buffer.fill_(7)
    semaphores = owner.request("trtllm_mla", "cpu", SEMAPHORES, 1024)
    assert semaphores.buffer.eq(0).all()
    assert semaphores.buffer.data_ptr() != scratch.buffer.data_ptr()


def test_zeroed_memory_is_zero_after_growing():
    """A2"""
    owner = WorkspaceOwner()
    owner.request("a", "cpu", SEMAPHORES, 64)
    assert owner.request("b", "cpu", SEMAPHORES, 1 << 16).buffer.eq(0).all()


def test_kinds_never_share():
    """A2: CuTe-DSL kernels overwrite theirs, TRT-LLM's leave theirs zero."""
    owner = WorkspaceOwner()
    buffers = {
        owner.request("backend", "cpu", kind, 1024).buffer.data_ptr() for kind in (SCRATCH, SEMAPHORES, OVERWRITTEN)
    }
    assert len(buffers) == 3


def test_one_name_with_two_contracts_is_refused():
    owner = WorkspaceOwner()
    owner.request("a", "cpu", WorkspaceKind("mine", zeroed=True), 16)
    with raises_naming(WorkspaceError, "'mine'", "zeroed=False", "zeroed=True"):
        owner.request("b", "cpu", WorkspaceKind("mine"), 16)


def test_report_gives_bytes_by_owner_and_kind():
    """A2: a report of bytes by owner and kind."""
    owner = WorkspaceOwner()
    owner.request("a", "cpu", SCRATCH, 100)
    owner.request("b", "cpu", SCRATCH, 300)
    owner.request("a", "cpu", SCRATCH, 50)
    owner.request("b", "cpu", SEMAPHORES, 10)
    report = {use.kind: use for use in owner.report()}
    assert report["scratch"].nbytes == 300
    assert report["scratch"].owners == {"a": 100, "b": 300}
    assert report["semaphores"].owners == {"b": 10}
    assert report["semaphores"].zeroed


def test_frozen_workspace_serves_but_does_not_grow():
    """Captured graphs hold its address."""
    owner = WorkspaceOwner()
    before = owner.request("a", "cpu", SCRATCH, 100).buffer
    owner.freeze()
    assert owner.request("b", "cpu", SCRATCH, 100).buffer is before
    with raises_naming(WorkspaceError, "b", 101, 100):
        owner.request("b", "cpu", SCRATCH, 101)
    assert owner.report()[0].owners == {"a": 100, "b": 100}


def test_refused_request_leaves_no_trace():
    owner = WorkspaceOwner()
    owner.freeze()
    with pytest.raises(WorkspaceError):
        owner.request("a", "cpu", SCRATCH, 8)
    assert owner.report() == ()


def test_asking_for_nothing_is_refused():
    with raises_naming(WorkspaceError, "a", "0 bytes"):
        WorkspaceOwner().request("a", "cpu", SCRATCH, 0)


# Lanes


def test_lanes_never_share():
    """A2: plans of two lanes run at the same time, on two streams."""
    owner = WorkspaceOwner()
    first, second = (owner.request("a", "cpu", SCRATCH, 64, lane) for lane in (0, 1))
    assert first.buffer.data_ptr() != second.buffer.data_ptr()
    assert owner.request("b", "cpu", SCRATCH, 32, lane=1) is second
    assert [(use.lane, use.owners) for use in owner.report()] == [(0, {"a": 64}), (1, {"a": 64, "b": 32})]
    assert owner.nbytes == 128


def test_a_lane_that_was_not_reserved_cannot_be_asked_for_once_frozen():
    owner = WorkspaceOwner()
    owner.request("a", "cpu", SCRATCH, 64)
    owner.freeze()
    with raises_naming(WorkspaceError, "a", 64, 0):
        owner.request("a", "cpu", SCRATCH, 64, lane=1)


def test_a_lane_below_zero_is_refused():
    with raises_naming(WorkspaceError, "lane -1"):
        WorkspaceOwner().request("a", "cpu", SCRATCH, 64, lane=-1)


# A host's allocator


def test_a_host_can_supply_the_memory():
    asked = []

    def allocate(nbytes, device, zeroed):
        asked.append((nbytes, device, zeroed))
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    owner = WorkspaceOwner(allocate)
    owner.request("a", "cpu", SCRATCH, 64)
    owner.request("b", "cpu", SEMAPHORES, 8)
    owner.request("b", "cpu", SCRATCH, 32)
    assert asked == [(64, torch.device("cpu"), False), (8, torch.device("cpu"), True)]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (torch.zeros(8), ["[8] torch.float32", "[8] torch.uint8"]),
        (torch.zeros(9, dtype=torch.uint8), ["[9]", "[8]"]),
        (torch.zeros(2, 4, dtype=torch.uint8), ["[2, 4]", "[8]"]),
        (torch.zeros(16, dtype=torch.uint8)[::2], ["contiguous"]),
        (torch.zeros(8, dtype=torch.uint8, device="meta"), ["meta", "cpu"]),
        (torch.ones(8, dtype=torch.uint8), ["semaphores", "zero"]),
    ],
)
def test_what_an_allocator_gives_is_checked(given, named):
    owner = WorkspaceOwner(lambda nbytes, device, zeroed: given)
    with raises_naming(WorkspaceError, *named):
        owner.request("a", "cpu", SEMAPHORES, 8)
    assert owner.report() == ()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_devices_do_not_share_and_one_device_has_one_name():
    """A2: by (device, kind, size)."""
    owner = WorkspaceOwner()
    cpu = owner.request("a", "cpu", SCRATCH, 64)
    unnamed = owner.request("a", "cuda", SCRATCH, 64)
    named = owner.request("b", torch.device("cuda", torch.cuda.current_device()), SCRATCH, 64)
    assert cpu.buffer.device.type == "cpu" and unnamed.buffer.device.type == "cuda"
    assert unnamed is named
