"""SGLang's protocol over a backend built over its caches, with stand-ins for SGLang's base class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from attnplug import BackendError, Claims, ForwardBatch, GraphLevel, Plan, PlanError, Role
from attnplug.contract.batch import BackendId
from attnplug.host import KVPools, ModelAttention, load_registry
from attnplug_sglang import plugin
from attnplug_sglang.host import Refused
from attnplug_sglang.kv_pools import PageTable
from attnplug_sglang.layers import Layers
from attnplug_testing.claiming import registry_claiming
from attnplug_testing.errors import naming
from sglang_fakes import Mode, batch, mha_layer, reference, slots_table
from sglang_stand_in import (
    CHOICES,
    CHUNKED,
    DETERMINISTIC,
    DETERMINISTIC_WITH_RADIX,
    HANDLERS,
    HOOKS,
    IN_GRAPH,
    IN_PARTS,
    REGISTERED,
    Method,
    Radix,
    sglang,
)

PAGES, PAGE, NAME = 40, 4, "attnplug:torch_native"


@pytest.fixture(scope="module")
def ours() -> Iterator[SimpleNamespace]:
    with sglang() as found:
        yield found


def pool(*layers: int, row: tuple[int, int] = (2, 8), dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A pool of SGLang's, with random rows."""
    keys, values = ({layer: torch.randn(PAGES * PAGE, *row).to(dtype) for layer in layers} for _ in range(2))
    return SimpleNamespace(
        dtype=dtype,
        get_key_buffer=keys.__getitem__,
        get_value_buffer=values.__getitem__,
        layer_transfer_counter=None,
        **more,
    )


def runner(modules: list[Any], table: Tensor, kv: Any, **changes: Any) -> Any:
    """A ``ModelRunner`` on the CPU."""
    arguments = {
        "speculative_attention_mode": "prefill",
        "enable_deterministic_inference": False,
        "speculative_algorithm": None,
        "speculative_num_draft_tokens": None,
        "speculative_eagle_topk": None,
        "cuda_graph_config": None,
        "chunked_prefill_size": 64,
        "max_prefill_tokens": 128,
        "disaggregation_mode": "null",
        "disable_chunked_prefix_cache": False,
        "disable_radix_cache": False,
    }
    config = {"num_attention_heads": 4, "context_len": 64, "hf_config": SimpleNamespace(model_type="llama")}
    config["hf_text_config"] = config["hf_config"]
    values = {
        "server_args": SimpleNamespace(**{**arguments, **changes.pop("arguments", {})}),
        "model": torch.nn.ModuleList(modules),
        "model_config": SimpleNamespace(**{**config, **changes.pop("config", {})}),
        "req_to_token_pool": SimpleNamespace(req_to_token=table, size=table.shape[0] - 1),
        "token_to_kv_pool": kv,
        "page_size": PAGE,
        "device": "cpu",
        "gpu_id": 0,
        "dtype": torch.float32,
        "kv_cache_dtype": kv.dtype,
        "is_generation": True,
        "is_draft_worker": False,
        "use_mla_backend": False,
        "prefill_attention_backend_str": NAME,
        "decode_attention_backend_str": NAME,
    }
    return SimpleNamespace(**{**values, **changes})


def rows(count: int) -> list[Tensor]:
    return [torch.randn(count, heads, 8) for heads in (4, 2, 2)]


# Registered


def test_every_backend_with_softmax_attention_is_a_choice_once(ours: SimpleNamespace) -> None:
    """SGLang calls the plugin in every process, and may do so again."""
    plugin._registered.clear()
    plugin.register()
    plugin.register()
    found = load_registry().backends
    full = [name for name, one in found.items() if any(not kind.is_linear for kind in one.spec.capabilities.kinds)]
    assert sorted(CHOICES) == sorted(REGISTERED) == sorted(f"attnplug:{name}" for name in (*full, "auto"))
    assert len(full) < len(found), "one that is installed has linear attention alone"
    assert IN_PARTS == ["flashinfer"], "SGLang's own backends"
    assert sorted(DETERMINISTIC) == sorted(CHOICES), "the bridge refuses backends that do not claim it, with the reason"
    with_radix = [f"attnplug:{name}" for name in full if "chunks" in found[name].spec.capabilities.invariant]
    assert sorted(DETERMINISTIC_WITH_RADIX) == sorted(with_radix)
    assert "attnplug:torch_native" in CHUNKED and "attnplug:triton_mha" not in CHUNKED
    ((target, hook, kind),) = HOOKS
    assert target.endswith("ServerArgs.check_server_args") and (hook, kind) == (plugin.check_arguments, "before")


def test_a_version_outside_the_range_is_refused_when_a_backend_is_built(ours: SimpleNamespace, monkeypatch) -> None:
    monkeypatch.setattr("attnplug.registry.hosts.installed_version", lambda name: "0.5.9")
    with pytest.raises(Refused) as refused:
        plugin._build(NAME, runner([Radix()], slots_table([3], PAGE), pool(0)))
    assert [reason.value for reason in refused.value.refusals] == ["0.5.9"]


# Built over SGLang's caches


def test_layers_of_two_pools_attend_to_their_own_rows(ours: SimpleNamespace) -> None:
    """A prefill and a decode. One layer has a window, so its rows are in SGLang's window pool, at slots shifted by
    four."""
    torch.manual_seed(0)
    table = slots_table([9, 6], PAGE)
    modules = [Radix(0), Radix(1, sliding_window_size=3)]
    mapping = {0: (0, False), 1: (0, True)}
    kv = pool(0, 1, layers_mapping=mapping, translate_loc_from_full_to_swa=lambda slots: slots + PAGE)
    backend = ours.build.build(NAME, runner(modules, table, kv))
    for mode, before, new in ((Mode.EXTEND, [0, 2], [8, 3]), (Mode.DECODE, [8, 5], [1, 1])):
        given = batch(table, before, new, mode)
        backend.init_forward_metadata(given)
        run = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
        for module, spec, shift in ((modules[0], mha_layer(0), 0), (modules[1], mha_layer(1, 4), PAGE)):
            q, k, v = rows(sum(new))
            out = run(q.flatten(1), k, v, module, given)
            assert out.shape == (sum(new), 32)
            cache = kv.get_key_buffer(spec.layer_id), kv.get_value_buffer(spec.layer_id)
            start = 0
            for row, (prefix, more) in enumerate(zip(before, new, strict=True), start=1):
                slots = table[row, : prefix + more] + shift
                expected = reference(q[start : start + more], cache, slots, spec).flatten(1)
                torch.testing.assert_close(out[start : start + more].double(), expected, atol=1e-5, rtol=1e-5)
                start += more


def test_rows_that_sglang_wrote_itself_are_not_written_again(ours: SimpleNamespace) -> None:
    table, module = slots_table([5], PAGE), Radix()
    kv = pool(0)
    backend = ours.build.build(NAME, runner([module], table, kv))
    given = batch(table, [4], [1], Mode.DECODE)
    backend.init_forward_metadata(given)
    before = kv.get_key_buffer(0).clone()
    q, k, v = rows(1)
    backend.forward_decode(q, k, v, module, given, save_kv_cache=False)
    backend.forward_decode(q, None, None, module, given)
    assert torch.equal(kv.get_key_buffer(0), before)


def mla_runner(table: Tensor, name: str = NAME, **changes: Any) -> tuple[Any, Any, Any]:
    latent = Radix(tp_k_head_num=1, head_dim=20, qk_head_dim=20, v_head_dim=16, **changes.pop("latent", {}))
    as_mha = Radix(tp_k_head_num=4, head_dim=12, qk_head_dim=12, v_head_dim=8)
    dims = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    kv = pool(0, **{"row": (1, 20), **changes.pop("pool", {})})
    names = dict.fromkeys(("prefill_attention_backend_str", "decode_attention_backend_str"), name)
    made = runner([latent, as_mha], table, kv, use_mla_backend=True, config=dims, **names, **changes)
    return made, latent, as_mha


def test_latent_rows_are_attended_to_where_sglang_keeps_them(ours: SimpleNamespace) -> None:
    torch.manual_seed(0)
    table = slots_table([7], PAGE)
    made, latent, _ = mla_runner(table)
    backend, given = ours.build.build(NAME, made), batch(table, [6], [1], Mode.DECODE)
    backend.init_forward_metadata(given)
    q, new = torch.randn(1, 4, 20), torch.randn(1, 1, 20)
    out = backend.forward_decode(q, new, new[..., :16], latent, given)
    keys = made.token_to_kv_pool.get_key_buffer(0)[table[1, :7].long(), 0].double()
    assert torch.equal(keys[-1].float(), new[0, 0])
    weights = torch.softmax(torch.einsum("hd,kd->hk", q[0].double(), keys) * 0.25, -1)
    torch.testing.assert_close(out.double(), (weights @ keys[:, :16]).flatten()[None], atol=1e-5, rtol=1e-5)


def test_a_prefill_as_mha_gives_the_log_sum_exp_beside_the_rows(ours: SimpleNamespace) -> None:
    """C4: SGLang merges the output and the log-sum-exp. Without a log-sum-exp, the output is flat."""
    table = slots_table([3], PAGE)
    made, _, as_mha = mla_runner(table)
    backend = ours.build.build(NAME, made)
    more = {"mha_one_shot": False, "attn_attend_prefix_cache": None, "num_prefix_chunks": 0}
    given = batch(table, [0], [3], mha_return_lse=True, **more)
    backend.init_forward_metadata(given)
    q, k, v = torch.randn(3, 4, 12), torch.randn(3, 4, 12), torch.randn(3, 4, 8)
    out, lse = backend.forward_extend(q, k, v, as_mha, given, save_kv_cache=False)
    assert out.shape == (3, 4, 8)
    torch.testing.assert_close(lse[0], (q[0] * k[0]).sum(-1) * 0.25)
    given.mha_return_lse = False
    torch.testing.assert_close(backend.forward_extend(q, k, v, as_mha, given, save_kv_cache=False), out.flatten(1))
    with pytest.raises(BackendError, check=naming("layer 0", "MHA")):
        backend.forward_extend(q, k, v, as_mha, given)


def test_mla_models_see_how_a_batch_extends(ours: SimpleNamespace) -> None:
    """C1: SGLang's thresholds choose the path. Inside a prefill graph, extends run absorbed."""
    made, _, _ = mla_runner(slots_table([3], PAGE))
    ours.build.build(NAME, made)
    layer = SimpleNamespace(chunked_prefix_cache_threshold=10, disable_chunked_prefix_cache=False)

    def method(prefix: int) -> Method:
        given = batch(torch.zeros(2, 512), [prefix], [4], get_max_chunk_capacity=lambda: 100)
        found: Method = HANDLERS[NAME](layer, given)
        return found

    assert [method(n) for n in (0, 3, 200)] == [Method.MHA_ONE_SHOT, Method.MLA, Method.MHA_CHUNKED_KV]
    for kind in IN_GRAPH:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(IN_GRAPH, kind, True)
            assert method(0) is Method.MLA


def test_deterministic_mla_extends_absorbed(ours: SimpleNamespace, monkeypatch) -> None:
    """E3: the other paths are chosen by the lengths of the whole batch."""
    levels = ("run", "batch", "graph")
    monkeypatch.setattr(ours.build, "load_registry", lambda: registry_claiming("torch_native", levels))
    made, _, _ = mla_runner(slots_table([3], PAGE), arguments={"enable_deterministic_inference": True})
    ours.build.build(NAME, made)
    layer = SimpleNamespace(chunked_prefix_cache_threshold=10, disable_chunked_prefix_cache=False)
    given = batch(torch.zeros(2, 512), [200], [4], get_max_chunk_capacity=lambda: 100)
    assert HANDLERS[NAME](layer, given) is Method.MLA


def test_drafts_are_refused(ours: SimpleNamespace) -> None:
    with pytest.raises(Refused, check=naming("--speculative-draft-attention-backend")):
        ours.build.build(NAME, runner([Radix()], slots_table([3], PAGE), pool(0), is_draft_worker=True))


def test_scales_of_an_fp8_cache_are_the_checkpoints(ours: SimpleNamespace) -> None:
    """Keys come first. A layer without scales in the checkpoint is left out; a single missing scale is 1."""
    modules = [Radix(0, k_scale_float=2.0, v_scale_float=3.0), Radix(1), Radix(2, v_scale_float=5.0)]
    made = runner(modules, slots_table([3], PAGE), pool(0, 1, 2, dtype=torch.float8_e4m3fn))
    assert ours.build._scales(made) == {0: (2.0, 3.0), 2: (1.0, 5.0)}
    (attention,) = ours.build.build(NAME, made).attention
    assert attention.backend.layers._mha.scales(0) == (2.0, 3.0)
    assert ours.build._scales(runner(modules, slots_table([3], PAGE), pool(0, 1, 2))) == {}


def test_a_rank_has_its_part_of_the_heads(ours: SimpleNamespace) -> None:
    made = runner([Radix()], slots_table([3], PAGE), pool(0), config={"num_attention_heads": 16}, tp_rank=6)
    _, model = ours.build._model(made)
    context = ours.build._context(made, model, KVPools(), None)
    assert model.ranks == 4 and (context.parallel.rank, context.parallel.size) == (2, 4)


def test_the_problem_has_the_compute_capability_of_the_gpu(
    ours: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda number: (10, 3))
    made = runner([Radix()], slots_table([3], PAGE), pool(0), device="cuda")
    assert ours.build._problem(made, ours.build._model(made)[1]).sm == 103


def test_limits_hold_the_largest_step_of_sglang(ours: SimpleNamespace) -> None:
    """A chunk of a prompt while every other request decodes, or a verify of all."""
    made = runner([Radix()], slots_table([3] * 7, PAGE), pool(0))
    _, model = ours.build._model(made)

    def limits(**arguments: Any) -> Any:
        vars(made.server_args).update(arguments)
        found = ours.build._context(made, model, KVPools(), None).limits
        return found.max_requests, found.max_tokens, found.max_context

    assert limits() == (8, 64 + 8, 64)
    assert limits(chunked_prefill_size=-1) == (8, 128 + 8, 64)
    assert limits(chunked_prefill_size=8, speculative_algorithm="EAGLE", speculative_num_draft_tokens=4) == (8, 32, 64)


def test_drafts_are_verified_by_the_role_that_sglang_says(ours: SimpleNamespace, monkeypatch) -> None:
    asked: list[Any] = []
    build = ours.build.choose_and_build
    monkeypatch.setattr(
        ours.build, "choose_and_build", lambda *given, **named: (asked.append(named), build(*given, **named))[1]
    )
    for mode in ("prefill", "decode"):
        given = {"speculative_attention_mode": mode}
        ours.build.build(NAME, runner([Radix()], slots_table([3], PAGE), pool(0), arguments=given))
    assert [named["verify"] for named in asked] == [Role.PREFILL, Role.DECODE]


# The protocol, over a backend that remembers what it is asked for


@dataclass
class Recorder:
    """Backend that records its calls. ``fill`` is the length that it requests for padded requests."""

    claims: Claims = field(
        default_factory=lambda: Claims(
            cuda_graph=GraphLevel.UNIFORM, needs_cpu_seq_lens=False, extras=frozenset({"sinks"})
        )
    )
    fill: int = 0
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.backend_id = BackendId("recorder")

    def init_forward_metadata(self, given: ForwardBatch) -> Plan:
        self.events.append("plan")
        return Plan.of(self.backend_id, given.geometry)

    def forward_extend(
        self, q: Tensor, k: Any, v: Any, layer: Any, given: Any, *, save_kv_cache: bool = True, extras: Any = None
    ) -> Tensor:
        self.events.append(extras)
        return q

    forward_decode = forward_extend

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        self.events.append(("reserve", max_bs, max_num_tokens))

    def init_forward_metadata_out_graph(self, forward_batch: ForwardBatch, in_capture: bool = False) -> Plan:
        self.events.append("capture" if in_capture else "replay")
        return Plan.of(self.backend_id, forward_batch.geometry)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        self.events.append("refill")

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return self.fill


def recording(ours: SimpleNamespace, sinks: tuple[int, ...] = (), **given: Any) -> tuple[Any, Recorder, Any, Tensor]:
    """A backend over a recorder, the recorder, a layer, and the table of slots."""
    table, module, recorder = slots_table([5, 9], PAGE), Radix(), Recorder(**given)
    group = ModelAttention(recorder, KVPools()), PageTable(table, PAGE), (0,)
    made = ours.backend.AttnplugBackend(runner([], table, pool(0)), Layers([module], None, 0, sinks), [group])
    return made, recorder, module, table


def test_another_batchs_plan_is_refused(ours: SimpleNamespace) -> None:
    """B5"""
    backend, _, module, table = recording(ours)
    backend.init_forward_metadata(batch(table, [0, 0], [4, 8]))
    with pytest.raises(PlanError, check=naming("decode", "extend")):
        backend.forward_decode(*rows(2), module, batch(table, [4, 8], [1, 1], Mode.DECODE))


def test_nothing_is_planned_for_an_idle_batch(ours: SimpleNamespace) -> None:
    backend, recorder, module, table = recording(ours)
    decode = batch(table, [4, 8], [1, 1], Mode.DECODE)
    backend.init_forward_metadata(decode)
    backend.init_forward_metadata(batch(table, [4], [1], Mode.IDLE))
    assert recorder.events == ["plan"]
    with pytest.raises(PlanError, check=naming("decode")):
        backend.forward_decode(*rows(2), module, decode)


def test_sinks_reach_the_backend_in_float32(ours: SimpleNamespace) -> None:
    backend, recorder, module, table = recording(ours, sinks=(0,))
    given = batch(table, [4, 8], [1, 1], Mode.DECODE)
    backend.init_forward_metadata(given)
    backend.forward_decode(*rows(2), module, given, sinks=torch.ones(4, dtype=torch.bfloat16))
    assert recorder.events[-1].sinks.dtype is torch.float32
    with pytest.raises(BackendError, check=naming("layer 0", "sink")):
        backend.forward_decode(*rows(2), module, given)


@pytest.mark.parametrize("name", ["sinks", "q_rope"])
def test_what_a_model_gives_beyond_the_contract_is_refused_by_name(ours: SimpleNamespace, name: str) -> None:
    backend, _, module, table = recording(ours)
    given = batch(table, [4, 8], [1, 1], Mode.DECODE)
    backend.init_forward_metadata(given)
    with pytest.raises(BackendError, check=naming("sink" if name == "sinks" else "q_rope")):
        backend.forward_decode(*rows(2), module, given, **{name: torch.ones(4)})


def test_a_layer_waits_until_the_host_cache_has_loaded_it(ours: SimpleNamespace) -> None:
    backend, _, module, table = recording(ours)
    given, asked = batch(table, [4, 8], [1, 1], Mode.DECODE), []
    backend.init_forward_metadata(given)
    backend.token_to_kv_pool.layer_transfer_counter = object()
    backend.token_to_kv_pool.get_key_buffer = asked.append
    backend.forward_decode(*rows(2), module, given)
    assert asked == [0]


def test_captures_and_replays_reach_the_backend(ours: SimpleNamespace) -> None:
    """B2: what lengths decide is refilled inside the graph."""
    backend, recorder, _, table = recording(ours)
    given = batch(table, [4, 8], [1, 1], Mode.DECODE)
    with pytest.raises(PlanError, check=naming("init_cuda_graph_state")):
        backend.init_forward_metadata_out_graph(given)
    backend.init_cuda_graph_state(4, 8)
    backend.init_forward_metadata_out_graph(given, in_capture=True)
    backend.init_forward_metadata_in_graph(given)
    backend.init_forward_metadata_out_graph(given)
    assert recorder.events == [("reserve", 4, 8), "capture", "refill", "replay"]
    backend.init_cuda_graph_state(4, 8)
    with pytest.raises(BackendError, check=naming(4, 8, 9)):
        backend.init_cuda_graph_state(4, 9)


def test_trees_that_are_drafted_after_the_plan_are_read_again(ours: SimpleNamespace) -> None:
    backend, _, _, table = recording(ours)
    mask = torch.zeros(2, 3, 3, dtype=torch.bool)
    info = SimpleNamespace(tree_topk=2, draft_token_num=3, custom_mask=mask.flatten())
    given = batch(table, [2, 6], [3, 3], Mode.TARGET_VERIFY, spec_info=info)
    backend.init_cuda_graph_state(2, 6)
    for capture in (True, False):
        backend.init_forward_metadata_out_graph(given, in_capture=capture)
    tree = backend.forward_metadata.batches[0].geometry.tree
    assert not tree.any()
    mask[1, 2, 0] = mask[1, 2, 2] = True
    backend.update_verify_buffers_to_fill_after_draft(info, None)
    assert not tree.any(), "an eager batch is planned after the draft"
    backend.update_verify_buffers_to_fill_after_draft(info, 2)
    assert tree.tolist() == [[0, 0, 0], [0, 0, 0b101]]


def test_padded_requests_have_a_length_of_at_least_one(ours: SimpleNamespace) -> None:
    assert [recording(ours, fill=n)[0].get_cuda_graph_seq_len_fill_value() for n in (0, 7)] == [1, 7]


def test_lengths_on_the_host_are_asked_for_if_the_backend_needs_them(ours: SimpleNamespace) -> None:
    needs = [recording(ours, claims=Claims(needs_cpu_seq_lens=n))[0].needs_cpu_seq_lens for n in (False, True)]
    assert needs == [False, True]
