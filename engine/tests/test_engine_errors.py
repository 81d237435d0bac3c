"""Errors of the engine: invalid calls, logits that are not finite, broken backends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from attnplug import (
    BackendContext,
    BackendError,
    KVFormat,
    PageSizes,
    PoolError,
    RefusalCode,
    Role,
    RowPart,
    UsageError,
)
from attnplug.auto.schedule import BackendSchedule
from attnplug.declare.errors import PluginError, PluginWarning
from attnplug.declare.spec import Registered, Source
from attnplug.host import TINY_CONFIGS, ModelConfigError, Registry, SelectionError, load_model, load_registry
from attnplug_engine import Engine
from attnplug_engine.execution.runner import NotFinite
from attnplug_engine.memory.pools import check_codecs
from attnplug_engine.parallel.collectives import ParallelError
from attnplug_engine.prepare import check_same_choice
from attnplug_testing.errors import having, naming, refusing


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine("tiny:llama", attention_backend="torch_native", device="cpu", page_size=4, num_pages=64, max_batch=4)


class TestErrors:
    @pytest.mark.parametrize("prompts", ["hi", [1, 2, 3]])
    def test_a_prompt_in_place_of_a_list_of_prompts(self, engine, prompts):
        with pytest.raises(UsageError, check=naming("prompts")):
            engine.generate(prompts, max_tokens=2)

    def test_text_that_is_none(self, engine):
        with pytest.raises(UsageError, match="surrogate"):
            engine.generate(["\ud800"], max_tokens=2)

    def test_more_pages_than_memory(self):
        with pytest.raises(PoolError, check=having(10**12, settings=("num_pages",))):
            Engine("tiny:llama", device="cpu", num_pages=1000000000000)

    def test_empty_prompt(self, engine):
        with pytest.raises(UsageError, check=naming("prompt 1")):
            engine.generate(["fine", ""], max_tokens=2)
        assert not engine.scheduler.has_work

    def test_prompt_longer_than_the_context(self, engine):
        short = Engine("tiny:llama", device="cpu", context_length=8)
        with pytest.raises(UsageError, check=naming("prompt 0", 20, 8)):
            short.generate([[1] * 20], max_tokens=2)

    def test_token_id_out_of_range(self, engine):
        with pytest.raises(UsageError, check=naming("prompt 0", 128, 127)):
            engine.generate([[1, 128]], max_tokens=2)
        with pytest.raises(UsageError, check=naming("prompt 0", 127)):
            engine.generate([[10**5000]], max_tokens=2)
        with pytest.raises(UsageError, check=naming("prompt 0", -1, 127)):
            engine.generate([[-1]], max_tokens=2)
        with pytest.raises(UsageError, check=naming("prompt 0", True, 127)):
            engine.generate([[True]], max_tokens=2)

    def test_pool_too_small_for_one_request(self):
        small = Engine("tiny:llama", device="cpu", page_size=4, num_pages=3)
        with pytest.raises(PoolError, check=having(8, 3, settings=("max_tokens", "num_pages"))):
            small.generate([[1] * 20], max_tokens=12)

    def test_model_that_does_not_exist(self):
        with pytest.raises(ModelConfigError, check=having(source="no/such/model")):
            Engine("no/such/model")

    def test_architecture_that_the_engine_does_not_know(self, tmp_path):
        config = {**TINY_CONFIGS["llama"], "model_type": "phi"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(UsageError, check=having(model_type="phi")):
            Engine(str(tmp_path), device="cpu")

    def test_layers_that_no_backend_serves(self, monkeypatch):
        monkeypatch.setenv("ATTNPLUG_PLUGINS", "")
        with pytest.raises(SelectionError, check=refusing("torch_native", RefusalCode.KIND)):
            Engine("tiny:mamba2", device="cpu")

    def test_backend_for_full_attention_where_there_is_none(self):
        """D3: nothing is ignored silently."""
        with pytest.raises(UsageError, check=naming("bogus")):
            Engine("tiny:mamba2", attention_backend="bogus", device="cpu")
        with pytest.raises(UsageError, check=having(settings=("attention_backend", "linear_attention_backend"))):
            Engine("tiny:mamba2", attention_backend="torch_native", device="cpu")

    def test_format_of_a_kv_cache_where_there_is_none(self):
        """D3"""
        with pytest.raises(UsageError, check=having("float8_e4m3fn", settings=("kv_dtype",))):
            Engine("tiny:mamba2", kv_dtype="float8_e4m3fn", device="cpu")

    def test_state_slots_of_a_model_without_states(self):
        with pytest.raises(UsageError, check=having(2, settings=("state_slots",))):
            Engine("tiny:llama", state_slots=2, device="cpu")

    def test_states_that_do_not_fit_say_how_much_they_take(self):
        with pytest.raises(PoolError, check=having(10**12, "GiB", settings=("num_pages", "state_slots", "max_batch"))):
            Engine("tiny:mamba2", state_slots=10**12, device="cpu")

    def test_backend_that_does_not_exist(self):
        with pytest.raises(UsageError, check=naming("torch_nativ", "torch_native")):
            Engine("tiny:llama", attention_backend="torch_nativ", device="cpu")

    def test_heads_that_cannot_be_divided(self):
        class Three:
            rank, size = 0, 3

        with pytest.raises(ParallelError, check=having(what="attention heads", size=3, fitting=(1, 2, 4))):
            Engine("tiny:llama", device="cpu", parallel=Three())

    def test_cuda_where_there_is_none(self):
        if torch.cuda.is_available():
            pytest.skip("there is a CUDA device here")
        with pytest.raises(UsageError, check=having("cuda", settings=("device",))):
            Engine("tiny:llama", device="cuda")

    @pytest.mark.parametrize(
        ("setting", "value"),
        [
            ("max_batch", 0),
            ("num_pages", 0),
            ("num_pages", 2**62),
            ("seed", -1),
            ("chunked_prefill_size", 0),
            ("context_length", -1),
        ],
    )
    def test_settings_out_of_range(self, setting, value):
        with pytest.raises(UsageError, check=having(value, settings=(setting,))):
            Engine("tiny:llama", device="cpu", **{setting: value})

    def test_an_unknown_dtype_is_refused_with_its_setting(self):
        with pytest.raises(UsageError, check=having("int7", settings=("dtype",))):
            Engine("tiny:llama", device="cpu", dtype="int7")

    def test_a_dtype_that_the_model_asks_for_is_not_blamed_on_an_option(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["llama"], "dtype": "int7"}))
        with pytest.raises(UsageError, check=having("int7", "config", settings=("dtype",))):
            Engine(tmp_path, device="cpu")

    def test_unknown_setting_is_an_error(self):
        with pytest.raises(TypeError, check=naming("max_batches")):
            Engine("tiny:llama", max_batches=3)


def poison(engine: Engine, layer: int) -> None:
    """Token 9 makes the layer's output NaN, for whichever request has it."""

    def corrupt(_module, inputs, output):
        hidden = inputs[0]
        return torch.where(engine.poisoned.unsqueeze(-1), float("nan"), output) if hidden is not None else output

    engine.runner.model.layers[layer].register_forward_hook(corrupt, prepend=True)
    original = engine.runner.model.forward

    def forward(input_ids, positions, batch):
        engine.poisoned = input_ids == 9
        return original(input_ids, positions, batch)

    engine.runner.model.forward = forward


@pytest.mark.parametrize("overlap", [False, True])
def test_nan_in_logits_ends_the_request_that_has_it_and_no_other(overlap):
    """Also if it already has a row in the next step, which runs."""
    engine = Engine("tiny:llama", device="cpu", page_size=4, prefix_cache=False, overlap=overlap)
    wanted = engine.generate([[1, 2, 3]], max_tokens=4, stop_token_ids=frozenset({9}))[0]
    poison(engine, 1)
    good, bad = engine.generate([[1, 2, 3], [4, 5, 9]], max_tokens=4, stop_token_ids=frozenset({9}))
    assert good.token_ids == wanted.token_ids and good.error is None
    assert bad.finish_reason == "error" and "prompt 1" in bad.error and "--check-layers" in bad.error
    engine.options = replace(engine.options, check_layers=True)  # the last layer is fine, and logits are not
    assert "--check-layers" not in engine.generate([[4, 5, 9]], max_tokens=4)[0].error
    assert engine.runner.allocator.free_pages == engine.runner.allocator.num_pages


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("model", ["tiny:llama", "tiny:kimi_linear"])
@pytest.mark.sample(2)
def test_pages_of_a_request_that_ends_by_an_error_are_not_found_again(model, overlap):
    """Others with the same tokens would read what made it fail."""
    engine = Engine(model, device="cpu", page_size=4, chunked_prefill_size=4, state_checkpoint=64, overlap=overlap)
    poison(engine, 1)
    (bad,) = engine.generate([[4, 5, 6, 7, 8, 3, 2, 1, 5, 6, 7, 9]], max_tokens=4)
    assert bad.finish_reason == "error"
    assert len(engine.cache) == 0
    assert engine.runner.allocator.free_pages == engine.runner.allocator.num_pages


def test_checking_layers_names_the_first_that_is_not_finite():
    engine = Engine("tiny:llama", device="cpu", check_layers=True)
    poison(engine, 1)
    with pytest.raises(NotFinite) as caught:
        engine.generate([[4, 9]], max_tokens=2)
    assert caught.value.layer_id == 1
    assert not engine.scheduler.running or engine.scheduler.has_work


def test_a_table_that_memory_cannot_hold_is_an_error(monkeypatch):
    monkeypatch.setattr("attnplug_engine.scheduling.slot_table.SlotTable", Mock(side_effect=MemoryError))
    with pytest.raises(PoolError, check=having(2, 1024, settings=("max_batch", "context_length", "num_pages"))):
        Engine("tiny:llama", device="cpu", page_size=4, max_batch=2)


class TestABackendThatCannotBeBuilt:
    """D2: it has the highest preference and another page size, and no refusal until it is built."""

    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch: pytest.MonkeyPatch) -> Registry:
        embedded = load_registry().get("torch_native")
        can = replace(embedded.spec.capabilities, page_sizes=PageSizes.of(48))
        spec = replace(embedded.spec, name="odd", factory=f"{__name__}:no_kernel", capabilities=can, preference=1000)
        odd = Registered(spec, Source("odd", "odd", "odd-dist", "1.2.3"))
        installed = Registry({"odd": odd, "torch_native": embedded})
        monkeypatch.setattr("attnplug_engine.prepare.load_registry", lambda: installed)
        return installed

    def test_auto_runs_on_the_next_one_with_a_warning(self, engine: Engine) -> None:
        with pytest.warns(PluginWarning, match=r"odd \(odd-dist 1\.2\.3\).*no kernel image.*auto continues without it"):
            fallen_back = Engine("tiny:llama", device="cpu", num_pages=64, max_batch=4)
        assert fallen_back.selection.choices[Role.PREFILL].chosen_name == "torch_native"
        assert fallen_back.runner.capacity.page_size == fallen_back.selection.page_size == 64
        assert fallen_back.generate(["hi"], max_tokens=4) == engine.generate(["hi"], max_tokens=4)

    def test_one_that_cannot_be_imported_is_reported_once(
        self, installed: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Before weights are loaded, and not again when the rest is built."""
        (tmp_path / "half_a_library.py").write_text("raise OSError('libcudart.so.13')")
        monkeypatch.syspath_prepend(tmp_path)
        odd = installed.backends["odd"]
        unimportable = replace(odd, spec=replace(odd.spec, factory="half_a_library:Backend"))
        registry = replace(installed, backends={**installed.backends, "odd": unimportable})
        monkeypatch.setattr("attnplug_engine.prepare.load_registry", lambda: registry)
        with pytest.warns(PluginWarning, match=r"odd-dist.*libcudart") as caught:
            assert Engine("tiny:llama", device="cpu", num_pages=64, max_batch=4).selection.failed.keys() == {"odd"}
        assert len(caught) == 1

    def test_asked_for_it_is_an_error(self) -> None:
        with pytest.raises(BackendError, check=naming("odd", "odd-dist", "no kernel image")):
            Engine("tiny:llama", attention_backend="odd", device="cpu")


def no_kernel(context: BackendContext) -> None:
    raise RuntimeError("no kernel image")


def test_ranks_that_chose_differently_are_an_error(engine: Engine) -> None:
    """Ranks run one schedule, which different page sizes would not allow."""

    class Ranks:
        rank, size = 0, 2

        def __init__(self) -> None:
            self.gathered: list[torch.Tensor] = []

        def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
            self.gathered = [*self.gathered, tensor][-2:]
            return torch.cat(self.gathered, dim)

    ranks, cpu, selection = Ranks(), torch.device("cpu"), engine.selection
    for _ in range(2):
        check_same_choice(selection, ranks, cpu)
    with pytest.raises(BackendError, check=having("rank 0", "torch_native", settings=("attention_backend",))):
        check_same_choice(replace(selection, page_size=48), ranks, cpu)
    by_batch = BackendSchedule({"torch_native": {(1, 64, 1): 2.0}})
    scheduled = {role: replace(choice, schedule=by_batch) for role, choice in selection.choices.items()}
    with pytest.raises(BackendError, check=having("rank 0", "torch_native", settings=("attention_backend",))):
        check_same_choice(replace(selection, choices=scheduled, page_size=48), ranks, cpu)
    without = {role: replace(choice, chosen=None) for role, choice in selection.choices.items()}
    with pytest.raises(BackendError, check=having("rank 0", None, settings=("attention_backend",))):
        check_same_choice(replace(selection, choices=without, page_size=48), ranks, cpu)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "qwen3_next"])
def test_a_codec_that_cannot_be_imported_is_named_before_pools_are_built(name: str) -> None:
    """E2: by its format and module, for every kind of row."""
    format = KVFormat("acme_int8", "8-bit integers", (RowPart("int8"),), 0.1, codec="no_such_module")
    with pytest.raises(PluginError, check=naming("acme_int8", "no_such_module")):
        check_codecs(load_model(f"tiny:{name}").layers, format, torch.device("cpu"))
