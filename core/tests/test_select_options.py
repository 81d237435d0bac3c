"""Selection by page sizes and options: open values are settled, given values are kept or refused."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from attnplug import PageSizes, Problem, Refusal, RefusalCode, Role, UsageError
from attnplug.host import BackendRequest, SelectionError, explain, select
from attnplug_testing.errors import raises_naming
from support.selection import LLAMA, PLAIN, backend, registry

# ---- the page size ----


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([PageSizes()], 64),
        ([PageSizes.of(1)], 64),
        ([PageSizes.of(16)], 64),
        ([PageSizes.of(64, 32)], 64),
        ([PageSizes.of(128)], 128),
        ([PageSizes.of(48)], 48),
        ([PageSizes.of(128, 256)], 128),
        ([PageSizes(), PageSizes.of(128)], 128),
        ([PageSizes.of(32), PageSizes.of(48)], 96),
        ([PageSizes.of(16), PageSizes.of(64)], 64),
    ],
)
def test_the_page_size_left_open_is_one_that_all_chosen_can_read(sizes: list[PageSizes], expected: int) -> None:
    """A9: it is in the intersection, and 64 if possible."""
    installed = registry(
        *(backend(name, replace(PLAIN, page_sizes=each)) for name, each in zip("ab", sizes, strict=False))
    )
    request = BackendRequest("a", {Role.DECODE: "b"} if len(sizes) > 1 else {})
    selection = select(installed, request, Problem(LLAMA))
    assert selection.page_size == expected
    for choice in selection.choices.values():
        assert choice.chosen is not None
        assert choice.chosen.spec.refusals(Problem(LLAMA, page_size=selection.page_size), choice.role) == []


def test_the_page_size_asked_for_is_kept() -> None:
    assert select(registry(backend("a")), BackendRequest(), Problem(LLAMA, page_size=7)).page_size == 7


def test_a_backend_that_cannot_read_the_page_size_is_refused() -> None:
    """D3"""
    narrow = backend("a", replace(PLAIN, page_sizes=PageSizes.of(32)))
    with pytest.raises(SelectionError) as caught:
        select(registry(narrow), BackendRequest(), Problem(LLAMA, page_size=16))
    (refusal,) = caught.value.selection.choices[Role.PREFILL].candidates[0].refusals
    assert refusal.code == RefusalCode.PAGE_SIZE


def test_where_nothing_is_chosen_the_page_size_stays_open() -> None:
    assert explain(registry(), BackendRequest(), Problem(LLAMA)).page_size is None


# ---- options ----


@dataclass(frozen=True)
class Options:
    split: int = 1


def test_options_are_parsed_for_the_chosen() -> None:
    installed = registry(backend("a", options=Options, preference=1), backend("b"))
    selection = select(installed, BackendRequest(options={"a": {"split": "4"}}), Problem(LLAMA))
    assert selection.options == {"a": Options(4)}


def test_options_not_given_are_the_defaults() -> None:
    installed = registry(backend("a", options=Options), backend("b"))
    selection = select(installed, BackendRequest("a", {Role.DECODE: "b"}), Problem(LLAMA))
    assert selection.options == {"a": Options(), "b": None}


def test_options_for_a_backend_that_is_not_chosen_are_an_error() -> None:
    """Nothing is dropped silently."""
    installed = registry(backend("a"), backend("b", options=Options))
    with pytest.raises(UsageError) as caught:
        select(installed, BackendRequest(options={"b": {"split": "4"}}), Problem(LLAMA))
    for text in ("b.split", "chosen: a", "attention_backend b"):
        assert text in str(caught.value)


def test_options_that_are_empty_are_no_error() -> None:
    installed = registry(backend("a"), backend("b", options=Options))
    assert select(installed, BackendRequest(options={"b": {}}), Problem(LLAMA)).options == {"a": None}


def test_options_for_an_unknown_backend_are_an_error() -> None:
    with raises_naming(UsageError, "'zzz'"):
        select(registry(backend("a")), BackendRequest(options={"zzz": {"x": "1"}}), Problem(LLAMA))


def test_a_wrong_option_is_an_error_even_where_the_backend_is_refused() -> None:
    installed = registry(backend("a", replace(PLAIN, kinds={"mla"}), options=Options))
    with raises_naming(UsageError, "split", "int"):
        explain(installed, BackendRequest("a", options={"a": {"splt": "4"}}), Problem(LLAMA))


def test_options_for_a_backend_that_was_asked_for_and_refused_do_not_hide_why() -> None:
    """D3"""
    installed = registry(backend("a", replace(PLAIN, kinds={"mla"}), options=Options))
    with pytest.raises(SelectionError):
        select(installed, BackendRequest("a", options={"a": {"split": "4"}}), Problem(LLAMA))


@dataclass(frozen=True)
class Kernel:
    kernel: str = "auto"


def _choosy(problem: Problem, role: Role | None, options: Kernel) -> list[Refusal]:
    if options.kernel == "auto":
        return []
    return [Refusal("kernel", f"kernel={options.kernel} is not for SM {problem.sm}", setting="choosy.kernel")]


CHOOSY = backend("choosy", check=_choosy, options=Kernel, preference=9)


def test_a_check_receives_the_options_that_were_given() -> None:
    """D3: what an option rules out is refused here, and not when the backend is built."""
    request = BackendRequest("choosy", options={"choosy": {"kernel": "fa9"}})
    with pytest.raises(SelectionError) as caught:
        select(registry(CHOOSY), request, Problem(LLAMA, "cuda", 90))
    reasons = caught.value.selection.unserved[0].candidates[0].refusals
    assert [(reason.code, reason.setting) for reason in reasons] == [("kernel", "choosy.kernel")]
    assert not explain(registry(CHOOSY), BackendRequest("choosy"), Problem(LLAMA, "cuda", 90)).unserved


def test_an_option_that_rules_its_backend_out_under_auto_is_an_error_that_says_why() -> None:
    """D3: the option would be ignored, and another backend run."""
    request = BackendRequest(options={"choosy": {"kernel": "fa9"}})
    with raises_naming(UsageError, "choosy", "kernel=fa9 is not for SM 90") as caught:
        select(registry(CHOOSY, backend("other")), request, Problem(LLAMA, "cuda", 90))
    assert caught.value.settings == ("choosy.kernel",)
