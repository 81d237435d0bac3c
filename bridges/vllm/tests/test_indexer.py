"""Our index in the place of vLLM's: the layer that vLLM constructs, over stand-ins, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug_vllm import host, selection
from attnplug_vllm.host import index_is_ours
from vllm_stage import Metadata, config, metadata, run_sparse_layers_on_cpu
from vllm_stand_in import Host, Op, SparseAttnIndexer, Support, vllm

HEADS, BLOCK, TOPK, SCALE, RANK, ROPE = 4, 16, 8, 0.2, 32, 16
INDEX_HEADS, DIM, BLOCKS = 2, 16, 24
CPU = torch.device("cpu")
NAMES = ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"]
"""The second layer shares the selection of the first."""


@pytest.fixture(scope="module")
def loaded() -> Iterator[SimpleNamespace]:
    with vllm() as found:
        yield found


@pytest.fixture
def ours(loaded: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The bridge as on a GPU without vLLM's index, with the reference backend on a CPU."""
    selection.forget()
    run_sparse_layers_on_cpu(monkeypatch)
    monkeypatch.setattr(
        Host, "config", config({"attnplug": {"backend": "torch_sparse"}}, compilation_config__static_forward_context={})
    )
    Host.config.attention_config.backend = SimpleNamespace(name="CUSTOM")
    text = {"model_type": "deepseek_v32", "index_n_heads": INDEX_HEADS, "index_head_dim": DIM, "index_topk": TOPK}
    Host.config.model_config.hf_text_config = SimpleNamespace(**text)
    monkeypatch.setattr(Op, "replaced", {})
    for module in (host, loaded.sparse_mla, loaded.indexer):
        monkeypatch.setattr(module, "index_is_ours", lambda sm, version: True)
    monkeypatch.setattr(loaded.indexer, "op_registry_oot", Op.replaced)
    loaded.indexer.replace_layer()
    return loaded


def cache_layer(prefix: str) -> Any:
    return SimpleNamespace(prefix=prefix, kv_cache=torch.tensor([]), get_kv_cache_spec=lambda config: "spec")


def indexer(buffer: Tensor, prefix: str = "model.layers.0.indexer.k_cache") -> Any:
    """A model's indexer, with the layer that vLLM constructs."""
    op = SparseAttnIndexer(cache_layer(prefix), 128, "ue8m0", TOPK, DIM, 512, 512, buffer)
    return SimpleNamespace(indexer_op=op, topk_indices_buffer=buffer)


def layers(ours: SimpleNamespace) -> list[Any]:
    """Two attention layers. The first one has an indexer."""
    buffer = torch.full((64, TOPK), -1, dtype=torch.int32)
    dims = {"kv_lora_rank": RANK, "qk_nope_head_dim": 8, "qk_rope_head_dim": ROPE, "v_head_dim": 8}
    fixed = {"num_heads": HEADS, "head_size": RANK + ROPE, "scale": SCALE, "num_kv_heads": 1, "attn_type": "decoder"}
    none = ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")
    made = []
    for name, own in zip(NAMES, (indexer(buffer), None), strict=True):
        impl = ours.sparse_mla.AttnplugSparseMLAImpl(
            **{**fixed, **dict.fromkeys(none), "kv_cache_dtype": "auto", **dims},
            indexer=own,
            topk_indices_buffer=buffer,
        )
        cache = torch.full((BLOCKS, BLOCK, RANK + ROPE), torch.nan)
        found = SimpleNamespace(impl=impl, kv_cache_dtype="auto", kv_cache=cache, layer_name=name, _k_scale_float=1.0)
        Host.config.compilation_config.static_forward_context[name] = found
        made.append(found)
    made[0].impl.index.k_cache.kv_cache = torch.zeros(BLOCKS, BLOCK, DIM + 4, dtype=torch.uint8)
    return made


def positions_of(given: Metadata) -> tuple[list[list[int]], Tensor]:
    """Slots that each new token sees, in order, and the slot of each."""
    found, new_slots, starts = [], [], given.query_start_loc_cpu.tolist()
    for request, total in enumerate(given.seq_lens.tolist()):
        table, new = given.block_table_tensor[request].tolist(), starts[request + 1] - starts[request]
        every = [table[position // BLOCK] * BLOCK + position % BLOCK for position in range(total)]
        found += [every[: total - new + number + 1] for number in range(new)]
        new_slots += every[total - new :]
    return found, torch.tensor(new_slots)


class Stage:
    """Two layers with rows and index keys of every slot, which the layers have written themselves."""

    def __init__(self, ours: SimpleNamespace) -> None:
        torch.manual_seed(5)
        self.first, self.second = layers(ours)
        self.op = self.first.impl.index
        self.rows = torch.randn(BLOCKS * BLOCK, RANK + ROPE)
        self.keys = torch.randn(BLOCKS * BLOCK, DIM)
        self.builder = ours.sparse_mla.AttnplugSparseMLABuilder(
            SimpleNamespace(block_size=BLOCK), NAMES, Host.config, CPU
        )
        for first in range(0, BLOCKS * BLOCK, 64):  # as many tokens as a step may have
            slots = torch.arange(first, min(first + 64, BLOCKS * BLOCK))
            self.write(slots, torch.randn(len(slots), INDEX_HEADS, DIM), torch.randn(len(slots), INDEX_HEADS))

    def write(self, slots: Tensor, q: Tensor, weights: Tensor) -> None:
        """Run the indexer, and store rows and keys as vLLM's layer does."""
        codes = q.to(torch.float8_e4m3fn)
        assert self.op(torch.empty(len(slots), 1), codes, self.keys[slots], weights) is self.op.topk_indices_buffer
        for layer in (self.first, self.second):
            latent, rope = self.rows[slots].split([RANK, ROPE], -1)
            layer.impl.do_kv_cache_update(latent, rope.unsqueeze(1), layer.kv_cache, slots, "auto", torch.ones(1))

    def step(self, given: Metadata, part: int | None = None) -> None:
        """Run a step with attention for only the first ``part`` tokens, and compare both layers with float64."""
        seen, slots = positions_of(given)
        q, weights = torch.randn(len(slots), INDEX_HEADS, DIM), torch.randn(len(slots), INDEX_HEADS)
        self.write(slots, q, weights)
        codes, step = q.to(torch.float8_e4m3fn).double(), self.builder.build(0, given)
        count = len(slots) if part is None else part
        queries = torch.randn(count, HEADS, RANK + ROPE)
        for layer in (self.first, self.second):
            parts = queries[..., :RANK], queries[..., RANK:]
            out, _ = layer.impl.forward_mqa(parts, layer.kv_cache, step, layer)
            for token in range(count):
                logits = (codes[token] @ self.stored(seen[token]).T).relu()
                scores = (weights[token].double()[:, None] * logits).sum(0)
                order = scores.sort(descending=True, stable=True).indices  # of equal scores, the first
                chosen = [seen[token][place] for place in order[:TOPK].tolist()]
                rows = self.rows[chosen].double()
                want = torch.softmax(queries[token].double() @ rows.T * SCALE, -1) @ rows[:, :RANK]
                torch.testing.assert_close(out[token].double(), want, atol=1e-5, rtol=1e-5)

    def stored(self, slots: list[int]) -> Tensor:
        """Index keys as vLLM's cache has them: e4m3 with a power of two each, keys of a page before its scales."""
        pages = self.op.k_cache.kv_cache.view(BLOCKS, -1)
        codes = pages[:, : BLOCK * DIM].contiguous().view(torch.float8_e4m3fn).view(-1, DIM).double()
        scales = pages[:, BLOCK * DIM :].contiguous().view(torch.float32).view(-1, 1).double()
        keys = (codes * scales)[slots]
        torch.testing.assert_close(keys, self.keys[slots].double(), atol=0.02, rtol=0.07)
        return keys


@pytest.mark.parametrize("lengths", [[(40, 1), (7, 1)], [(40, 1), (3, 1), (0, 20), (30, 3)], [(0, 30)]])
def test_rows_are_selected_by_the_keys_of_vllms_cache(ours, lengths):
    """A10: a layer with an index and one that shares it, prefill and decode."""
    Stage(ours).step(metadata(lengths))


def test_keys_of_a_prefill_that_runs_as_dense_mha_are_written_too(ours):
    stage = Stage(ours)
    given = metadata([(40, 1), (3, 1), (0, 5)])
    stage.step(given, part=2)
    _, slots = positions_of(given)
    stage.stored(slots.tolist())


def test_a_run_without_caches_writes_nothing(ours):
    first, _ = layers(ours)
    op = first.impl.index
    op.k_cache.kv_cache = torch.tensor([])
    op.write(first.impl.spec, torch.zeros(1, dtype=torch.int64))


def test_the_cache_is_vllms_and_its_metadata_is_ours(ours):
    """vLLM's builder would call DeepGEMM in every decode step."""
    first, _ = layers(ours)
    cache = Host.config.compilation_config.static_forward_context["model.layers.0.indexer.k_cache"]
    bound = torch.zeros(2, BLOCK, DIM + 4, dtype=torch.uint8)
    cache.kv_cache = bound
    assert first.impl.index.k_cache.kv_cache is bound and cache.kv_cache is bound
    assert cache.get_kv_cache_spec(Host.config) == "spec"
    builder = cache.get_attn_backend().get_builder_cls()
    assert builder.get_cudagraph_support(Host.config, None) is Support.ALWAYS
    assert builder(None, [], Host.config, CPU).build(0, None) is None


def test_layers_share_the_memory_of_their_inputs(ours):
    buffer = torch.zeros(64, TOPK, dtype=torch.int32)
    one, other = (indexer(buffer, f"model.layers.{number}.k_cache").indexer_op for number in range(2))
    assert one.kept is other.kept and one.kept.q.shape == (64, INDEX_HEADS, DIM)


def test_other_backends_keep_vllms_index(ours):
    """It behaves as if attnplug were not installed: its constructor raises, or its kernels run."""
    Host.config.additional_config = {}
    Host.config.attention_config.backend = SimpleNamespace(name="FLASHMLA_SPARSE")
    with pytest.raises(RuntimeError, match="DeepGEMM"):
        indexer(torch.zeros(64, TOPK, dtype=torch.int32))
    op = object.__new__(ours.indexer.AttnplugSparseIndexer)
    assert op.forward_cuda(None, None, None, None) == "vLLM's"


def test_a_layer_that_another_package_has_replaced_is_left_alone(ours):
    Op.replaced["SparseAttnIndexer"] = SparseAttnIndexer
    ours.indexer.replace_layer()
    assert Op.replaced["SparseAttnIndexer"] is SparseAttnIndexer


@pytest.mark.parametrize(
    ("sm", "version", "expected"),
    [
        (80, "0.26.0", True),
        (89, "0.26.3", True),
        (120, "0.26.0", True),
        (90, "0.26.0", False),
        (100, "0.26.0", False),
        (103, "0.26.0", False),
        (None, "0.26.0", False),
        (80, "0.32.0", False),
        (120, "0.33.0", False),
        (80, None, False),
    ],
)
def test_our_index_runs_where_vllms_does_not_and_can_be_replaced(sm, version, expected):
    assert index_is_ours(sm, version) is expected


def test_without_attnplug_sparse_vllms_index_stays(monkeypatch):
    """vLLM would not start: our layer imports that package, and this one does not require it."""
    monkeypatch.setattr(host, "find_spec", lambda name: None)
    assert not index_is_ours(80, "0.26.0") and not index_is_ours(120, "0.26.0")


def test_our_layer_is_registered_on_such_gpus_alone(ours, monkeypatch):
    """Registered more than once, as vLLM does it."""
    from attnplug_vllm import backends, register

    monkeypatch.setattr(backends, "replaced", {})
    monkeypatch.setattr("sys.argv", ["program"])
    monkeypatch.setattr(Host, "device", "cuda")
    Op.replaced.clear()
    monkeypatch.setattr(register, "index_is_ours", lambda sm, version: False)
    register.register()
    assert not Op.replaced
    monkeypatch.setattr(register, "index_is_ours", lambda sm, version: sm == 90)  # the stand-in's
    register.register()
    register.register()
    assert Op.replaced == {"SparseAttnIndexer": ours.indexer.AttnplugSparseIndexer}
