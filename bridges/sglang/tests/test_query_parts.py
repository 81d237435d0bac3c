"""Queries and new rows of absorbed MLA layers in two parts: latent and rotary columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import in_parts
from attnplug import BackendError
from attnplug.host import load_registry
from attnplug_testing.errors import naming
from sglang_fakes import Mode, batch, slots_table
from sglang_stand_in import IN_PARTS, Radix
from test_backend import NAME, PAGE, mla_runner, ours, pool, runner

__all__ = ["ours"]  # a fixture

PARTS = "attnplug:in_parts"
BATCHES = [(Mode.EXTEND, [0, 6], [5, 3]), (Mode.DECODE, [4, 8], [1, 1]), (Mode.TARGET_VERIFY, [2, 6], [3, 3])]


@pytest.fixture
def with_parts(ours: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Install the backend ``in_parts``, and restore SGLang's list behind the test."""
    (spec,) = in_parts.attnplug_backends()
    found = load_registry()
    backends = {**found.backends, spec.name: replace(found.get("torch_native"), spec=spec)}
    monkeypatch.setattr(ours.build, "load_registry", lambda: replace(found, backends=backends))
    yield ours
    del IN_PARTS[1:]


def attended(
    ours: SimpleNamespace, made: tuple[Any, Any, Any], table: Tensor, of: Any, parts: bool, **more: Any
) -> Any:
    """Output of a batch and the cache behind it. Queries in parts are views of other layouts, as SGLang's are."""
    torch.manual_seed(1)
    runner, latent, _ = made
    backend = ours.build.build(runner.decode_attention_backend_str, runner)
    mode, prefixes, new = of
    given, rows = batch(table, prefixes, new, mode), sum(new)
    backend.init_forward_metadata(given)
    q_nope, q = torch.randn(4, rows, 16).transpose(0, 1), torch.randn(rows, 4, 12)
    k_nope, row = torch.randn(rows, 1, 16), torch.randn(rows, 1, 20)
    q_rope, k_rope = q[..., 8:], row[..., 16:]
    run = backend.forward_decode if mode is Mode.DECODE else backend.forward_extend
    if parts:
        out = run(q_nope, k_nope, k_nope, latent, given, q_rope=q_rope, k_rope=k_rope, **more)
    else:
        out = run(torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1), k_nope, latent, given, **more)
    return out, runner.token_to_kv_pool.get_key_buffer(0).float()


def stored_by(kv: Any, rank: int = 16) -> list[Any]:
    """Give a pool SGLang's method for rows in two parts; return the slots that it is called with."""
    stored: list[Any] = []

    def set_mla_kv_buffer(layer: Any, loc: Tensor, k_nope: Tensor, k_rope: Tensor) -> None:
        stored.append(loc)
        buffer = kv.get_key_buffer(layer.layer_id)
        buffer[loc, :, :rank], buffer[loc, :, rank:] = k_nope.to(kv.dtype), k_rope.to(kv.dtype)

    kv.set_mla_kv_buffer = set_mla_kv_buffer
    return stored


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("of", BATCHES)
def test_queries_and_rows_in_two_parts_are_attended_to_as_in_one(
    with_parts: SimpleNamespace, of: Any, saved: bool
) -> None:
    """SGLang writes the rows, unless the model says that they are in the cache already."""
    table = slots_table([before + more for before, more in zip(*of[1:], strict=True)], PAGE)
    found = []
    for name in (NAME, PARTS):
        torch.manual_seed(0)
        made = mla_runner(table, name)
        stored = stored_by(made[0].token_to_kv_pool)
        found.append(attended(with_parts, made, table, of, name == PARTS, save_kv_cache=saved))
        assert len(stored) == (saved and name == PARTS)
    for one, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", [NAME, PARTS])
def test_parts_are_concatenated_where_they_must_be(with_parts: SimpleNamespace, name: str, dtype: torch.dtype) -> None:
    """Queries if the backend takes one tensor; rows if the backend has to write them: its fp8 saturates, SGLang's does
    not."""
    table, found = slots_table([5, 9], PAGE), []
    for parts in (False, True):
        torch.manual_seed(0)
        made = mla_runner(table, name if parts else NAME, pool={"dtype": dtype})
        stored = stored_by(made[0].token_to_kv_pool)
        found.append(attended(with_parts, made, table, BATCHES[1], parts))
        assert len(stored) == (parts and dtype is torch.float32)
    for one, parted in zip(*found, strict=True):
        torch.testing.assert_close(parted, one)


def test_rows_of_a_window_pool_in_two_parts_are_written_by_the_backend(with_parts: SimpleNamespace) -> None:
    """Only the bridge translates their slots."""
    table, found = slots_table([5, 9], PAGE), []
    swa = {"layers_mapping": {0: (0, True)}, "translate_loc_from_full_to_swa": lambda slots: slots + PAGE}
    for name in (NAME, PARTS):
        torch.manual_seed(0)
        made = mla_runner(table, name, pool=swa, latent={"sliding_window_size": 3})
        stored = stored_by(made[0].token_to_kv_pool)
        found.append(attended(with_parts, made, table, BATCHES[1], name == PARTS))
        assert not stored
    for one, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, one)


def test_other_arguments_of_sglangs_absorbed_path_are_refused(with_parts: SimpleNamespace) -> None:
    """SGLang passes them by keyword, most of them as None."""
    table = slots_table([5, 9], PAGE)
    made = mla_runner(table, PARTS)
    stored_by(made[0].token_to_kv_pool)
    attended(with_parts, made, table, BATCHES[1], True, cos_sin_cache=None, is_neox=None, llama_4_scaling=None)
    with pytest.raises(BackendError, check=naming("attn_sink")):
        attended(with_parts, made, table, BATCHES[1], True, attn_sink=torch.ones(4))


def test_sglang_passes_parts_to_backends_that_take_them(with_parts: SimpleNamespace, monkeypatch) -> None:
    """Its own backends are left alone. What a process served before does not matter."""
    table = slots_table([5], PAGE)

    def listed(name: str = PARTS, scaling: Any = None, **changes: Any) -> list[str]:
        made, *_ = mla_runner(table, name, **changes)
        made.model.llama_4_scaling_config = scaling
        with_parts.build.build(name, made)
        return IN_PARTS[1:]

    with_parts.build.build(NAME, runner([Radix()], table, pool(0)))
    assert listed(NAME) == [] and IN_PARTS == ["flashinfer"]
    assert listed() == listed() == [PARTS]
    assert listed(scaling={"beta": 0.1}) == [], "SGLang would not scale the queries"
    assert listed() == [PARTS]
    drafts = {
        "speculative_algorithm": "NEXTN",
        "speculative_num_draft_tokens": 2,
        "speculative_draft_attention_backend": "triton",
    }
    assert listed(arguments=drafts) == [], "drafts of 0.5.14 look up the target's name"
    assert listed() == [PARTS]
    with monkeypatch.context() as patch:
        patch.setattr(torch.version, "hip", "7.2")
        assert listed() == []
    assert listed() == listed(NAME) == [PARTS] and IN_PARTS[0] == "flashinfer"


def test_parts_without_rotary_columns_are_not_asked_for(with_parts: SimpleNamespace) -> None:
    made, latent, _ = mla_runner(slots_table([5], PAGE), PARTS, pool={"row": (1, 16)})
    vars(latent).update(head_dim=16, qk_head_dim=16)
    made.model_config.qk_rope_head_dim = 0
    made.model = torch.nn.ModuleList([latent])
    assert not with_parts.build.build(PARTS, made).takes_q_rope
    assert IN_PARTS == ["flashinfer"]
