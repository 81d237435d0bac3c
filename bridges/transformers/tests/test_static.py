"""Decode steps over static caches: compiled without a graph break, over the cache's memory, planned on the device."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig
from transformers.cache_utils import StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from attnplug import CacheLayout, Role
from attnplug.host import BackendRequest, ModelAttention, load_registry
from attnplug_testing.errors import naming
from attnplug_transformers import BridgeError, static_cache
from attnplug_transformers.layer_call import layer_of
from attnplug_transformers.static_cache import CacheLayers, CacheShape, StaticCaches
from tiny_models import CONFIGS, NATIVE, VOCABULARY, WINDOW, generated, model, padded

# torch's own: as it imports its compilers (also before a test, when dynamo is reset), compiles float32 products, and
# captures an empty graph to begin with.
IGNORED = ("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning:torch.*")
pytestmark = [pytest.mark.filterwarnings(each) for each in IGNORED]
LENS = [40, 3, 17, 33]
"""Longer and shorter than a window."""


class AllDevices(CompileConfig):
    """Compiles on a CPU, too."""

    _compile_all_devices = True

    def __init__(self, backend: Callable[..., Any]) -> None:
        super().__init__(fullgraph=True, backend=backend)

    def to_dict(self) -> dict[str, Any]:
        return {"fullgraph": True, "backend": self.backend}


@pytest.fixture(autouse=True)
def _no_code_of_other_tests():
    torch._dynamo.reset()
    for name in CONFIGS:
        vars(model(name)).pop("_compiled_call", None)
        vars(model(name)).pop("_cache", None)


def compiled(name: str, prompts: dict[str, Tensor], backend: str, tokens: int) -> tuple[Tensor, int]:
    """Tokens of a compiled ``generate``, and how often it was compiled."""
    counter = CompileCounterWithBackend(backend)
    options = {"max_new_tokens": tokens, "cache_implementation": "static", "compile_config": AllDevices(counter)}
    return generated(name, NATIVE, prompts, **options), counter.frame_count


def noted() -> StaticCaches:
    return ALL_ATTENTION_FUNCTIONS[NATIVE]._static


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("name", "times"), [("llama", 1), ("deepseek_v3", 1), ("gemma2", 2), ("gpt_oss", 2)], ids=lambda value: str(value)
)
@pytest.mark.long
def test_generate_is_compiled_whole_and_not_again_for_each_token(name, times, backend):
    """``fullgraph=True`` refuses graph breaks. transformers itself compiles windows twice: below and at their size."""
    expected = generated(name, "eager", padded(LENS), max_new_tokens=12)
    found, count = compiled(name, padded(LENS), backend, 12)
    assert torch.equal(found, expected)
    assert count == times


def test_a_second_generate_runs_the_code_of_the_first():
    """The code is compiled once, without graph breaks, for all tokens of both, and reads the cache in place."""
    noted()._copies.clear()
    counter = CompileCounterWithBackend("eager")
    config = AllDevices(counter)
    for seed, lens in enumerate(([9, 5], [4, 8])):
        prompts = padded(lens)
        prompts["input_ids"] = (prompts["input_ids"] + seed) % VOCABULARY
        options = {"max_new_tokens": 8, "max_length": None, "compile_config": config, "max_cache_len": 32}
        found = generated("llama", NATIVE, prompts, cache_implementation="static", **options)
        assert torch.equal(found, generated("llama", "eager", prompts, max_new_tokens=8))
    assert counter.frame_count == 1
    assert not noted()._copies


@pytest.mark.long
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_compiled_steps_read_the_cache_in_place(backend):
    noted()._copies.clear()
    found, _ = compiled("llama", padded(LENS), backend, 8)
    assert torch.equal(found, generated("llama", "eager", padded(LENS), max_new_tokens=8))
    assert not noted()._copies


def test_a_compiler_that_copies_the_cache_costs_one_copy_for_all_layers():
    noted()._copies.clear()
    compiled("llama", padded(LENS), "aot_eager", 8)
    (layers,) = noted()._copies.values()
    assert len(layers.memory) == 1 and layers.memory[0][0].shape[2] == 256


def test_a_cache_that_is_gone_takes_its_pages_along():
    made = model("llama")
    made.set_attn_implementation(NATIVE)
    cache, ids, before = StaticCache(CONFIGS["llama"], 32), padded([6])["input_ids"], len(noted()._places)
    made(ids, past_key_values=cache)
    made(ids[:, :1], past_key_values=cache)
    assert len(noted()._places) == before + 2  # layers
    del cache
    gc.collect()
    assert len(noted()._places) <= before


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_prefill_builds_the_attention_of_decode_steps(name):
    """The second ``generate`` has another cache, and the first step that finds it may be a graph's capture.

    Gemma 3's last layer has a window, shorter than the prompt, and LFM2's is a convolution."""
    made = model(name)
    made.set_attn_implementation(NATIVE)
    cache, before = StaticCache(CONFIGS[name], 64), len(noted()._places)
    made(padded([30])["input_ids"], past_key_values=cache)
    assert not noted().is_registering and len(noted()._places) > before


def test_layers_that_share_a_cache_get_the_tokens_of_eager():
    """The last two layers of Gemma 3n read the caches of the first two."""
    prompts, options = padded([30, 7]), {"max_new_tokens": 6}
    found = generated("gemma3n", NATIVE, prompts, **options, cache_implementation="static", disable_compile=True)
    assert torch.equal(found, generated("gemma3n", "eager", prompts, **options))


def test_a_layer_that_shares_the_cache_of_another_kind_of_layer_is_refused():
    caches, rows = StaticCaches(BackendRequest("torch_native")), torch.zeros(1, 1, 8, 16)
    layers = [layer_of(rows, rows, rows, None, None, cap, False) for cap in (None, 5.0)]
    caches.register(0, rows, rows, layers[0])
    with pytest.raises(BridgeError, check=naming("layer 1 shares the cache")):
        caches.register(1, rows, rows, layers[1])


def test_caches_of_two_conversations_are_told_apart():
    """Both are filled before either decodes."""
    made, results = model("llama"), {}
    ids = padded([7, 7])["input_ids"]
    for implementation in ("eager", NATIVE):
        made.set_attn_implementation(implementation)
        caches = [StaticCache(CONFIGS["llama"], 24) for _ in range(2)]
        for row, cache in enumerate(caches):
            made(ids[row : row + 1], past_key_values=cache)
        for step in range(3):
            for row, cache in enumerate(caches):
                token = ids[row : row + 1, step : step + 1]
                results[implementation, row] = made(token, past_key_values=cache).logits
    for row in range(2):
        torch.testing.assert_close(results[NATIVE, row], results["eager", row])


# ---- planned on the device ----


def triton_attention(selection: Any, spec: Any, pool: Any, device: Any, dtype: Any, limits: Any) -> ModelAttention:
    """``attention_over`` with ``triton_mha`` in Triton's interpreter: a backend that graphs capture."""
    from attnplug.host import HostContext, KVPools, WorkspaceOwner
    from attnplug_triton_mha.backend import TritonMHABackend
    from attnplug_triton_mha.configurations import MHAKernelConfig

    pools = KVPools(mha=pool)
    context = HostContext(
        model=spec,
        device=device,
        dtype=dtype,
        kv_dtype=pool.dtype,
        page_size=1,
        limits=limits,
        pools=pools,
        workspace=WorkspaceOwner(),
    )
    own = load_registry().get("triton_mha").spec
    small = MHAKernelConfig(16, 16, 4, 2, programs=2, single=False, overlap=False)
    made = context.for_backend(own.name, own.capabilities)
    return ModelAttention(TritonMHABackend(made, choose=lambda *_: small, multiprocessors=2), pools)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    last: int,
    valid: Tensor,
    window: int | None,
    sinks: Tensor | None,
    cap: float | None,
) -> Tensor:
    """Attention of one token per request in float64, over its visible columns only."""
    out = torch.empty(q.shape[0], 1, q.shape[1], v.shape[3], dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for request in range(q.shape[0]):
        rows = [c for c in range(last + 1) if valid[request, c] and (window is None or c > last - window)]
        for head in range(q.shape[1]):
            keys, values = (t[request, head // group, rows].double() for t in (k, v))
            logits = keys @ q[request, head, 0].double() / 4
            logits = logits if cap is None else cap * torch.tanh(logits / cap)
            if sinks is not None:
                logits = torch.cat([logits, sinks[head : head + 1].double()])
                values = torch.cat([values, torch.zeros(1, values.shape[1], dtype=torch.float64)])
            out[request, 0, head] = logits.softmax(0) @ values
    return out


@pytest.mark.parametrize("kernel", ["torch_native", "triton_mha"])
@pytest.mark.parametrize(
    ("window", "sinks", "cap"), [(None, False, None), (9, False, None), (None, True, None), (9, True, 2.0)]
)
@pytest.mark.sample(4)
def test_every_step_attends_to_the_columns_that_are_there(kernel, window, sinks, cap, monkeypatch):
    """Padding on the left and between tokens; NaN in every column that must not be read."""
    if kernel == "triton_mha":
        if torch.cuda.is_available():
            pytest.skip("there is a GPU, for which Triton compiles: nothing is interpreted beside it in one process")
        monkeypatch.setattr(static_cache, "attention_over", triton_attention)
    torch.manual_seed(2)
    batch, heads, kv_heads, columns, dim = 3, 4, 2, 40, 16
    memory = [tuple(torch.full((batch, kv_heads, columns, dim), torch.nan) for _ in "kv") for _ in range(2)]
    layer = layer_of(torch.empty(batch, heads, 1, dim), *memory[0], None, window, cap, sinks)
    logits = torch.randn(heads) if sinks else None
    valid = torch.ones(batch, columns, dtype=torch.bool)
    valid[1, :11] = valid[2, 5:8] = valid[2, 20] = False
    caches = StaticCaches(BackendRequest("torch_native"))
    for index, pair in enumerate(memory):
        caches.register(index, *pair, layer)
    for last in (18, 19, 20, 39):
        for number, (keys, values) in enumerate(memory):
            for tensor in (keys, values):
                tensor[:, :, : last + 1] = torch.randn(batch, kv_heads, last + 1, dim)
                tensor.masked_fill_(~valid[:, None, :, None], torch.nan)
            q = torch.randn(batch, heads, 1, dim)
            out = caches.attend(layer, q, keys, values, torch.tensor(last), valid, logits, number == 0)
            expected = reference(q, keys, values, last, valid, window, logits, cap)
            torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    place = caches.find(*memory[1])
    assert place is not None and place.layers.captured is (kernel == "triton_mha")
    assert not caches._copies


def test_a_captured_plan_keeps_its_addresses(monkeypatch):
    """A graph that was captured in one step is replayed in later ones."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, for which Triton compiles: nothing is interpreted beside it in one process")
    monkeypatch.setattr(static_cache, "attention_over", triton_attention)
    memory = [(torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16))]
    layer = layer_of(torch.empty(1, 4, 1, 16), *memory[0], None, None, None, False)
    layers = CacheLayers(BackendRequest("torch_native"), CacheShape.of(layer, memory[0][0]), memory)
    batch = layers._batch
    geometry, plan = batch.geometry, batch.plan
    for last in (2, 5):
        layers.plan(torch.tensor(last), 8, None, None)
        assert layers._batch is batch and batch.geometry is geometry and batch.plan is plan
        assert geometry.seq_lens.tolist() == [last + 1] * 2
        assert geometry.page_table[:, : last + 1].tolist() == [list(range(first, first + last + 1)) for first in (0, 8)]


def test_backends_are_asked_for_pages_of_one_row():
    layer = layer_of(*(torch.empty(1, heads, 5, 16) for heads in (8, 2, 2)), None, WINDOW, None, True)
    shape = CacheShape.of(layer, torch.empty(3, 2, 64, 16))
    problem = shape.select(BackendRequest("torch_native")).problem
    assert (problem.page_size, problem.layout) == (1, CacheLayout.TOKEN_MAJOR)
    (one,) = problem.model.layers
    assert (one.num_heads, one.num_kv_heads, one.sliding_window, one.sinks) == (4, 1, None, False)
    assert shape.requests == 6


def test_a_capture_of_an_unknown_cache_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(BridgeError, check=naming("CUDA graph")):
        static_cache._in_new_thread(lambda: None, torch.device("cuda"))


def test_errors_of_a_build_reach_the_caller():
    q = torch.zeros(1, 2, 1, 16)
    layer = layer_of(q, q, q, None, None, None, False)
    with pytest.raises(BridgeError, check=naming("triton_mha")):
        StaticCaches(BackendRequest("triton_mha")).attend(layer, q, q, q, torch.tensor(0), None, None, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("lens", [[40], LENS])
def test_graphs_of_generate_give_the_logits_of_float32(name, lens):
    """``mode="reduce-overhead"``: warm-up, capture, then replays, with other lengths in a second call."""
    exact, made = (copy.deepcopy(model(name)).to("cuda", dtype) for dtype in (torch.float32, torch.bfloat16))
    exact.set_attn_implementation("eager")
    made.set_attn_implementation("attnplug:triton_mha")
    counters.clear()
    copies = ALL_ATTENTION_FUNCTIONS["attnplug:triton_mha"]._static._copies
    copies.clear()  # of other models
    for _ in range(2):
        prompts = {key: tensor.cuda() for key, tensor in padded(lens).items()}
        options = {"output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 16}
        settings = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_cache_len": 64}
        out = made.generate(
            **prompts,
            **options,
            **settings,
            cache_implementation="static",
            compile_config=CompileConfig(fullgraph=True),
        )
        mask = torch.nn.functional.pad(prompts["attention_mask"], (0, 16), value=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        wanted = exact(out.sequences, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -17:-1]
        torch.testing.assert_close(torch.stack(out.logits, 1), wanted, atol=0.15, rtol=0.05)
        lens = [length // 2 + 1 for length in lens]
    assert counters["inductor"]["cudagraph_skips"] == 0
    if name == "llama":
        assert not copies


def test_a_backend_without_graphs_is_left_out_of_compiled_steps_on_a_gpu(monkeypatch):
    """It plans on the host, which a graph would do only once. Attention then has a graph break, as for others."""
    caches = StaticCaches(BackendRequest("torch_native"))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(CacheShape, "of", classmethod(lambda cls, layer, key: _Selected(key)))
    key = torch.zeros(1, 2, 8, 16)
    caches.register(0, key, torch.zeros(1, 2, 8, 16), layer_of(key, key, key, None, None, None, False))
    assert caches.breaks_graphs


@pytest.mark.parametrize(("name", "plans_in_graphs"), [("auto", True), ("triton_mha", True), ("flashattention", False)])
def test_a_graph_captures_no_plan_that_needs_lengths_on_the_host(name, plans_in_graphs, monkeypatch):
    """Its own steps allocate memory that outlives the graph. ``auto`` leaves such backends out; one that is named runs
    outside of graphs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(Tensor, "is_cuda", True)
    query, key = torch.empty(1, 4, 1, 64), torch.empty(1, 2, 8, 64)
    layer = layer_of(query, key, key, None, None, None, False)
    shape = CacheShape(layer, 1, 2, 8, torch.device("cuda"), torch.bfloat16)
    selection = shape.select(BackendRequest(name))
    assert selection.problem.exact_lengths is not plans_in_graphs
    served = [backend.spec.capabilities for backend in selection.choices[Role.DECODE].serving]
    assert any(can.needs_cpu_seq_lens for can in served) is not plans_in_graphs
    caches = StaticCaches(BackendRequest(name))
    monkeypatch.setattr(CacheShape, "of", classmethod(lambda cls, layer, key: shape))
    caches.register(0, key, key.clone(), layer)
    assert caches.breaks_graphs is not plans_in_graphs


class _Selected:
    """Selection for a CPU in the place of a GPU's."""

    def __init__(self, key: Tensor) -> None:
        self.key = key

    def select(self, request: BackendRequest) -> Any:
        layer = layer_of(self.key, self.key, self.key, None, None, None, False)
        return CacheShape(layer, 1, 2, 8, torch.device("cpu"), torch.float32).select(request)
