"""Calls of kernels.py to the CUTLASS kernel of FlashInfer's paged wrapper match FlashInfer's signature."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attnplug import BackendError
from attnplug_flashinfer_mla.kernels import FlashInferMLAKernels, FlashInferMLALibrary
from attnplug_testing.errors import raises_naming
from recorded_library import cache, make, paged_call, planned_decode, queries


def test_cutlass_before_it_was_planned_is_refused(library: FlashInferMLALibrary) -> None:
    """There, every call copied the layer's whole cache."""
    if library.metadata is not None:
        make("cutlass")
        return
    with raises_naming(BackendError, "flashinfer-python 0.7", "0.6"):
        make("cutlass")


def planned_cutlass(library: FlashInferMLALibrary) -> FlashInferMLAKernels:
    if library.metadata is None:
        pytest.skip(f"flashinfer {library.version} does not plan it")
    return make("cutlass")


def test_cutlass_calls_are_taken(library: FlashInferMLALibrary) -> None:
    """The kernel reads the page table in rows of whole blocks of 128 tokens: three pages of 64 become four."""
    factory = planned_cutlass(library)
    call = replace(paged_call(causal=False), page_table=torch.zeros(2, 3, dtype=torch.int32))
    kernel = factory.paged(decode=True)
    kernel.plan(call)
    q, out, _ = queries(2)
    kernel.run(q, None, cache(), out, None)
    assert library.paged.last("__init__")["backend"] == "cutlass"
    given = library.paged.last("run")
    assert given["out"] is out and not given.get("return_lse")
    metadata = library.paged.last("plan")["metadata"]
    assert metadata.cum_seq_lens_q is call.lengths.qo_indptr and metadata.max_q_len == 1
    assert metadata.block_tables.shape == (2, 4)
    assert metadata.seq_lens is call.lengths.kv_lens  # on the host: nothing is read back


def test_cutlass_takes_one_tensor(library: FlashInferMLALibrary) -> None:
    kernel = planned_decode(planned_cutlass(library))
    q, out, _ = queries(2)
    q.normal_()
    kernel.run(q, None, cache(), out, None)
    assert library.paged.last("run")["query"] is q
    kernel.run(q[..., :512], q[..., 512:], cache(), out, None)
    assert torch.equal(library.paged.last("run")["query"], q)


def test_cutlass_refuses_what_its_kernel_lacks(library: FlashInferMLALibrary) -> None:
    kernel = planned_cutlass(library).paged(decode=True)
    q, out, lse = queries(2)
    with raises_naming(BackendError, "kernel=auto"):
        kernel.run(q, None, cache(), out, lse)
    with raises_naming(BackendError, "kernel=auto"):
        kernel.work_list()


def test_with_cutlass_everything_but_decode_is_fa2(library: FlashInferMLALibrary) -> None:
    factory = planned_cutlass(library)
    factory.paged(decode=False)
    factory.ragged()
    assert library.paged.last("__init__")["backend"] == "fa2"
    assert library.ragged.last("__init__")["backend"] == "fa2"
