"""PageLayout and split_table: the same memory in every order of dimensions and with every page size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug import PoolError
from attnplug.kernels import PageLayout, split_table
from attnplug_testing.errors import raises_naming

SIZES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(1, 4))


def test_token_major_is_contiguous_in_logical_order() -> None:
    layout = PageLayout.named("token_major", 3, 4, 2, 5)
    view = layout.view(torch.arange(layout.elements))
    assert view.shape == (3, 4, 2, 5)
    assert view.is_contiguous()


def test_head_major_is_contiguous_with_heads_before_tokens() -> None:
    layout = PageLayout.named("head_major", 3, 4, 2, 5)
    view = layout.view(torch.arange(layout.elements))
    assert view.shape == (3, 4, 2, 5)
    assert view.transpose(1, 2).is_contiguous()


@settings(deadline=None)
@given(SIZES)
def test_every_place_has_an_element_of_its_own(sizes: tuple[int, int, int, int]) -> None:
    for layout in (PageLayout.named("token_major", *sizes), PageLayout.named("head_major", *sizes)):
        pages, page_size, heads, dim = sizes
        assert (layout.num_pages, layout.page_size, layout.heads, layout.dim) == sizes
        assert layout.elements == pages * page_size * heads * dim
        seen = layout.view(torch.arange(layout.elements))
        assert seen.flatten().sort().values.tolist() == list(range(layout.elements))


def test_a_view_writes_to_its_buffer() -> None:
    layout = PageLayout.named("head_major", 2, 2, 2, 2)
    buffer = torch.zeros(layout.elements)
    layout.view(buffer)[1, 0, 1, 1] = 7.0
    assert buffer.sum() == 7.0


def test_a_view_begins_where_its_buffer_does() -> None:
    layout = PageLayout.named("token_major", 1, 2, 1, 2)
    assert layout.view(torch.arange(10)[3:]).flatten().tolist() == [3, 4, 5, 6]


@pytest.mark.parametrize("buffer", [torch.zeros(15), torch.zeros(2, 8), torch.zeros(32)[::2]])
def test_a_buffer_that_cannot_hold_the_layout_is_refused(buffer: torch.Tensor) -> None:
    with raises_naming(PoolError, 16):
        PageLayout.named("token_major", 2, 2, 2, 2).view(buffer)


def test_strides_of_a_padded_cache_are_accepted() -> None:
    keys_beside_values = PageLayout((3, 4, 1, 2), (16, 2, 2, 1))
    assert keys_beside_values.elements == 2 * 16 + 3 * 2 + 1 + 1


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (PageLayout.named("token_major", 3, 4, 2, 5), "token_major"),
        (PageLayout.named("head_major", 3, 4, 2, 5), "head_major"),
        (PageLayout.named("head_major", 3, 4, 1, 5), "token_major"),
        (PageLayout((1, 4, 2, 5), (99, 10, 5, 1)), "token_major"),
        (PageLayout((3, 4, 2, 5), (80, 10, 5, 1)), "strided"),
        (PageLayout((3, 4, 2, 5), (40, 10, 1, 2)), "strided"),
    ],
)
def test_a_layout_has_a_name_by_where_its_places_lie(layout: PageLayout, name: str) -> None:
    assert layout.name == name


def test_a_tensor_tells_its_layout() -> None:
    pages = torch.zeros(3, 2, 4, 5).transpose(1, 2)
    assert PageLayout.of(pages) == PageLayout.named("head_major", 3, 4, 2, 5)
    with raises_naming(PoolError, "[3, 4]", "[pages, page_size, heads, dim]"):
        PageLayout.of(torch.zeros(3, 4))


def test_overlapping_strides_are_refused() -> None:
    with raises_naming(PoolError, "overlap"):
        PageLayout((2, 4, 1, 2), (7, 2, 2, 1))


@pytest.mark.parametrize("shape", [(0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)])
def test_an_empty_layout_is_refused(shape: tuple[int, int, int, int]) -> None:
    with raises_naming(PoolError, shape, 1):
        PageLayout.named("token_major", *shape)


@pytest.mark.parametrize("kernel_page_size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "layout",
    [PageLayout.named("token_major", 3, 8, 2, 5), PageLayout.named("head_major", 3, 8, 1, 5)],
    ids=["token", "one head"],
)
def test_a_split_layout_sees_the_same_memory(layout: PageLayout, kernel_page_size: int) -> None:
    buffer = torch.arange(layout.elements)
    pages, kernel_pages = layout.view(buffer), layout.split(kernel_page_size).view(buffer)
    ratio = 8 // kernel_page_size
    assert kernel_pages.shape == (3 * ratio, kernel_page_size, layout.heads, 5)
    for page in range(3):
        seen = torch.cat([kernel_pages[page * ratio + part] for part in range(ratio)])
        assert torch.equal(seen, pages[page])


@pytest.mark.parametrize("kernel_page_size", [3, 16, 0, -4])
def test_a_kernel_page_size_that_does_not_divide_is_refused(kernel_page_size: int) -> None:
    with raises_naming(PoolError, 8, kernel_page_size):
        PageLayout.named("token_major", 3, 8, 2, 5).split(kernel_page_size)


def test_head_major_with_several_heads_cannot_be_split() -> None:
    with raises_naming(PoolError, 8, 4, "token_major"):
        PageLayout.named("head_major", 3, 8, 2, 5).split(4)


def test_a_layout_split_into_its_own_page_size_is_itself() -> None:
    layout = PageLayout.named("head_major", 3, 8, 2, 5)
    assert layout.split(8) is layout


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_split_table_numbers_the_kernel_pages(dtype: torch.dtype) -> None:
    table = torch.tensor([[5, 0, -1], [2, -1, -7]], dtype=dtype)
    split = split_table(table, 2)
    assert split.tolist() == [[10, 11, 0, 1, -1, -1], [4, 5, -1, -1, -1, -1]]
    assert split.dtype == dtype
    assert split.is_contiguous()


def test_a_table_split_by_one_is_the_same_table() -> None:
    table = torch.tensor([[5, 0, -1]], dtype=torch.int32)
    split = split_table(table, 1)
    assert torch.equal(split, table)
    split.zero_()
    assert table.tolist() == [[5, 0, -1]]


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_an_empty_table_can_be_split(shape: tuple[int, int]) -> None:
    assert split_table(torch.zeros(shape, dtype=torch.int32), 4).shape == (shape[0], shape[1] * 4)


@pytest.mark.parametrize(("table", "ratio"), [(torch.zeros(2, 3), 0), (torch.zeros(3), 2)])
def test_a_table_that_cannot_be_split_is_refused(table: torch.Tensor, ratio: int) -> None:
    with raises_naming(PoolError, list(table.shape), ratio):
        split_table(table, ratio)


@settings(deadline=None)
@given(st.data(), st.sampled_from([(8, 1), (8, 2), (8, 4), (6, 3)]))
def test_layout_and_table_split_alike(data: st.DataObject, sizes: tuple[int, int]) -> None:
    page_size, kernel_page_size = sizes
    layout = PageLayout.named("token_major", 4, page_size, 2, 3)
    buffer = torch.arange(layout.elements)
    row = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    table = torch.tensor([row], dtype=torch.int32)
    kernel_table = split_table(table, page_size // kernel_page_size)
    tokens = layout.view(buffer)[table[0]].flatten(0, 1)
    kernel_tokens = layout.split(kernel_page_size).view(buffer)[kernel_table[0]].flatten(0, 1)
    assert torch.equal(tokens, kernel_tokens)
