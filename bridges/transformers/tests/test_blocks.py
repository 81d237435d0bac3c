"""The memory of continuous batching, in the form of transformers 5.17 and in the present one; and plans over it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from attnplug import AttentionKind, LayerSpec
from attnplug.host import BackendRequest, Limits
from attnplug_testing.errors import naming
from attnplug_transformers import BridgeError, paged_attention
from attnplug_transformers.blocks import LayerGroup, read_gathered
from attnplug_transformers.paged_attention import PagedBatches, PagedGroup, PlannedLayers, _check, _geometry
from attnplug_transformers.pages import PageStore, choose_and_build

PAGE = 4


class Hashed(SimpleNamespace):
    """Namespace with hash by identity, as transformers' caches have."""

    __hash__ = object.__hash__

    def __init__(self, given: SimpleNamespace) -> None:
        super().__init__(**vars(given))


def cache(updated: list[object]) -> SimpleNamespace:
    """Four layers: 0 and 2 without a window, 1 and 3 with one. A group's layers have tensors by their place in it."""

    def update(key_states, value_states, layer_idx, read_index, write_index):
        updated.append((layer_idx, read_index, write_index))
        return key_states, value_states

    tensors = [[torch.full((3 * PAGE, 2, 8), 10.0 * kind + place) for place in range(2)] for kind in range(2)]
    return SimpleNamespace(
        block_size=PAGE,
        layer_index_to_group_indices={0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1)},
        sliding_windows={0: 1, 1: 6, 2: 1, 3: 6},
        key_cache=tensors[0],
        value_cache=tensors[1],
        update=update,
    )


def test_layers_of_one_kind_share_a_group():
    given = cache([])
    full, sliding = LayerGroup.of(given, 2), LayerGroup.of(given, 1)
    assert (full.index, full.layers, full.window, full.page_size, full.stride) == (0, (0, 2), None, PAGE, PAGE)
    assert (sliding.index, sliding.layers, sliding.window) == (1, (1, 3), 6)
    assert (full.layer_type, sliding.layer_type) == ("full_attention", "sliding_attention")


def test_a_layers_tensors_are_those_of_its_place():
    given = cache([])
    tensors = LayerGroup.of(given, 0).tensors(given)
    assert {index: (keys.shape, keys[0, 0, 0, 0], values[0, 0, 0, 0]) for index, (keys, values) in tensors.items()} == {
        0: ((3, PAGE, 2, 8), 0.0, 10.0),
        2: ((3, PAGE, 2, 8), 1.0, 11.0),
    }
    assert tensors[0][0].data_ptr() == given.key_cache[0].data_ptr()


def test_a_block_of_the_present_form_begins_at_every_stride():
    """A block holds a layer's keys, its values, and those of other layers. Ours are the first of each."""
    keys, values = torch.randn(6, PAGE, 2, 8), torch.randn(6, PAGE, 2, 8)
    allocator = SimpleNamespace(
        index=1,
        layer_type="full_attention",
        layer_indices=[0],
        tokens_per_page=PAGE,
        block_physical_stride=3 * PAGE,
        get_cache_for_block_table=lambda index: (keys, values),
    )
    given = SimpleNamespace(layer_to_allocator={0: allocator})
    group = LayerGroup.of(given, 0)
    assert (group.index, group.page_size, group.stride, group.window) == (1, PAGE, 3 * PAGE, None)
    found = group.tensors(given)[0]
    assert torch.equal(found[0], keys[::3]) and torch.equal(found[1], values[::3])


def test_rows_are_gathered_by_the_indices_of_the_step():
    updated: list[object] = []
    keys, values = torch.zeros(1), torch.ones(1)
    found = read_gathered(cache(updated), keys, values, 3, {"read_index": "r", "write_index": "w"})
    assert found[0] is keys and found[1] is values and updated == [(3, "r", "w")]


@pytest.mark.parametrize(("dense", "layout"), [(True, "token_major"), (False, "strided")])
def test_backends_are_chosen_for_the_memory_and_the_batches_that_there_are(monkeypatch, dense, layout):
    """Backends are chosen for the cache's layout and built for its batch limits. From 5.18 on, one buffer holds the
    blocks of several layers."""
    problems, limits = [], []
    monkeypatch.setattr(
        paged_attention,
        "choose_and_build",
        lambda request, problem, build: (problems.append(problem), choose_and_build(request, problem, build))[1],
    )
    monkeypatch.setattr(paged_attention, "attention_over", lambda *given: limits.append(given[-1]))
    given, request = cache([]), BackendRequest("torch_native")
    given.max_batch_tokens = 7
    if not dense:
        given.key_cache = [torch.zeros(3 * PAGE, 2, 16)[..., :8] for _ in given.key_cache]
    layer = LayerSpec(0, AttentionKind.MHA, 4, 2, 8, 8, 0.25)
    PagedBatches(request, PageStore(request))._over(given, PagedGroup(LayerGroup.of(given, 0)), layer, torch.zeros(1))
    assert [problem.layout for problem in problems] == [layout] and limits == [Limits(7, 7, 3 * PAGE)]


def test_layers_that_share_blocks_and_differ_are_refused(monkeypatch):
    request, given = BackendRequest("torch_native"), cache([])
    other = LayerSpec(0, AttentionKind.MHA, 2, 2, 8, 8, 0.5)

    def built(self, cache, group, layer, query):
        group.layers = {0: other}

    monkeypatch.setattr(PagedBatches, "_over", built)
    module, q = torch.nn.Identity(), torch.zeros(1, 2, 1, 8)
    module.layer_idx = 0
    with pytest.raises(BridgeError, check=naming("layer 0")):
        PagedBatches(request, PageStore(request)).attend(module, q, q, q, None, 0.0, 0.25, {"cache": Hashed(given)})


def step(lens: list[tuple[int, int]], **more: object) -> dict[str, object]:
    """Requests with (rows before, new tokens), each in separate blocks from block 1 on."""
    read, written, block = [], [], 1
    for before, new in lens:
        rows = [block * PAGE + place for place in range(before + new)]
        read, written, block = read + rows, written + rows[before:], block + -(-(before + new) // PAGE)
    total = torch.tensor([0, *(before + new for before, new in lens)]).cumsum(0)
    starts = torch.tensor([0, *(new for _, new in lens)]).cumsum(0)
    return {
        "cu_seq_lens_q": starts,
        "cu_seq_lens_k": {"full_attention": total},
        "max_seqlen_q": max(new for _, new in lens),
        "max_seqlen_k": {"full_attention": max(before + new for before, new in lens)},
        "read_index": [torch.tensor(read)],
        "write_index": [torch.tensor(written)],
        **more,
    }


def test_a_page_table_is_read_off_the_indices_of_rows():
    found = _geometry(LayerGroup.of(cache([]), 0), step([(5, 3), (2, 1)]))
    assert found.page_table.tolist()[0] == [1, 2] and found.page_table.tolist()[1][0] == 3
    assert (found.mode, found.rows, found.max_seq_len, found.max_new) == ("extend", 4, 8, 3)
    assert found.new_lens is not None and found.new_lens.tolist() == [3, 1] and found.seq_lens.tolist() == [8, 3]
    assert found.slots is not None and found.slots.tolist() == [9, 10, 11, 14]


def test_one_token_for_each_request_is_a_decode():
    found = _geometry(LayerGroup.of(cache([]), 0), step([(5, 1), (2, 1)]))
    assert found.mode == "decode" and found.new_lens is None


def test_requests_with_as_many_tokens_as_there_are_requests_are_no_decode():
    """One of three requests has two tokens and one has none; or there are fewer tokens than requests."""
    for lens in ([(5, 2), (2, 1), (1, 0)], [(5, 1), (2, 0)]):
        assert _geometry(LayerGroup.of(cache([]), 0), step(lens)).mode == "extend"


def test_gathered_rows_that_belong_to_no_request_are_left_out():
    """transformers pads the gathered rows behind those of the last request."""
    given = Hashed(cache([]))
    keys = torch.randn(7, 2, 8)
    given.update = lambda *_: (keys, keys)
    module, q = torch.nn.Identity(), torch.randn(1, 4, 2, 8)
    module.layer_idx = 1
    request = BackendRequest("torch_native")
    batches = PagedBatches(request, PageStore(request))
    others = step([(1, 1), (2, 1)], cache=given)
    others |= {
        name: {"sliding_attention": others[name]["full_attention"]} for name in ("cu_seq_lens_k", "max_seqlen_k")
    }
    batches.attend(module, q, q[:, :2], q[:, :2], None, 0.0, None, others)
    slots = batches._caches[given][1].planned.slots.tolist()
    assert slots[5:] == [-1, -1] and slots[:2] == [0, 1] and slots[3:5] == [slots[2] + 1, slots[2] + 2]


def test_a_step_is_planned_again_for_other_lengths_another_run_and_other_attention():
    group, plans = PagedGroup(LayerGroup.of(cache([]), 0)), []

    def plan(attention: object) -> PlannedLayers:
        plans.append(attention)
        return PlannedLayers(attention, None)

    first, second, ours, others = object(), object(), object(), object()
    asked = [(0, first, ours), (2, first, ours), (0, first, ours), (2, second, ours), (0, second, others)]
    for index, lengths, attention in asked:
        group.of_step(index, lengths, attention, lambda attention=attention: plan(attention))
    assert plans == [ours, ours, ours, others], "the second layer of a step takes the plan of the first"


@pytest.mark.parametrize(
    ("mask", "others", "named"),
    [
        (torch.ones(1), {}, "mask"),
        (None, {"block_table": torch.ones(1)}, "max_blocks_per_request=0"),
    ],
)
def test_what_continuous_batching_must_not_give_is_refused(mask, others, named):
    with pytest.raises(BridgeError, check=naming(named)):
        _check(torch.zeros(1), mask, others)
