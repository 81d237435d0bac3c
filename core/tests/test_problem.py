"""Problems: numbers in range, the roles that layers need, and spellings of data types."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from attnplug import DType, LayerSpec, Problem, Role, UsageError
from attnplug.sparse import CompressedDims, IndexerDims
from attnplug_testing.specs import GDN, MHA, MLA, model


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"page_size": 0}, "page_size 0"),
        ({"page_size": -16}, "page_size -16"),
        ({"speculative_tokens": -1}, "speculative_tokens -1"),
        ({"speculative_topk": 0}, "speculative_topk 0"),
        ({"speculative_tokens": 65, "speculative_topk": 2}, "speculative_tokens 65 with speculative_topk 2"),
        ({"tensor_parallel": 0}, "tensor_parallel 0"),
        ({"sm": 9}, "sm 9"),
        ({"sm": 9000}, "sm 9000"),
    ],
)
def test_a_number_out_of_range_is_an_error_with_its_setting(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        Problem(**wrong)
    assert said in str(caught.value)
    assert caught.value.settings == tuple(wrong)


def test_a_ranks_part_of_a_model_is_not_divided_again() -> None:
    part = model(MHA).for_rank(2)
    assert Problem(part).model is part
    with pytest.raises(UsageError) as caught:
        Problem(part, tensor_parallel=2)
    assert caught.value.settings == ("tensor_parallel",)


@pytest.mark.parametrize(
    ("layers", "tokens", "roles"),
    [
        ((MHA,), 0, (Role.PREFILL, Role.DECODE)),
        ((GDN,), 0, (Role.LINEAR,)),
        ((MLA, GDN), 0, (Role.PREFILL, Role.DECODE, Role.LINEAR)),
        ((MLA,), 4, (Role.PREFILL, Role.DECODE, Role.DRAFT)),
    ],
)
def test_a_problem_needs_the_roles_of_its_layers(
    layers: tuple[LayerSpec, ...], tokens: int, roles: tuple[Role, ...]
) -> None:
    """D3"""
    assert Problem(model(*layers), speculative_tokens=tokens).roles() == roles


def test_a_draft_needs_one_backend_for_all_that_it_does() -> None:
    """D3"""
    assert Problem(model(MHA), speculative_tokens=4, is_draft=True).roles() == (Role.DRAFT,)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ("float32", DType.FLOAT32),
        ("torch.bfloat16", DType.BFLOAT16),
        ("BF16", DType.BFLOAT16),
        ("half", DType.FLOAT16),
        ("fp8", DType.FLOAT8_E4M3),
    ],
)
def test_usual_spellings_of_a_data_type_are_read(text: str, dtype: DType) -> None:
    assert DType.parse(text, "dtype") is dtype


def test_an_unknown_data_type_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(UsageError) as caught:
        DType.parse("int8", "kv_dtype")
    assert "kv_dtype" in str(caught.value) and "'int8'" in str(caught.value)
    assert all(dtype in str(caught.value) for dtype in DType)


def test_index_keys_of_a_model_without_an_index_have_no_type() -> None:
    with pytest.raises(UsageError) as caught:
        Problem(model(MHA), index_dtype=DType.FLOAT8_E4M3)
    entries = replace(MLA, sliding_window=8, indexer=IndexerDims(4, 8, 4), compressed=CompressedDims(4))
    with pytest.raises(UsageError) as caught:
        Problem(model(entries), index_dtype=DType.FLOAT8_E4M3)
    assert caught.value.settings == ("index_dtype",)
