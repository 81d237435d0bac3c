"""Cross-compilation of the engine's kernels. It needs no GPU and tests neither results nor speed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnplug_testing.triton_mode import compiled_by

pytestmark = pytest.mark.cross_compile

Facts = dict[str, list[Any]]
WITH_WEIGHTS = {"product", "preloaded", "preloaded fp8", "absorb", "by_head", "rms_norm", "angles"}


@pytest.fixture(scope="module")
def facts() -> Facts:
    """Facts about the compiled kernels from ``compile_all.py``, by purpose."""
    pytest.importorskip("triton")
    return compiled_by(Path(__file__).with_name("compile_all.py"))


def test_models(facts: Facts) -> None:
    """Every one for SM 90, some for SM 80 and for newer ones."""
    every = {
        "product",
        "preloaded",
        "preloaded fp8",
        "streamed",
        "absorb",
        "heads",
        "latent",
        "by_head",
        "pairs",
        "rms_norm",
        "silu_and_mul",
        "angles",
    }
    assert {one["kernel"] for one in facts["models"] if one["sm"] == 90} == every
    assert {one["kernel"] for one in facts["models"] if one["sm"] == 80} == {
        "product",
        "streamed",
        "absorb",
        "by_head",
    }
    assert {one["sm"] for one in facts["models"] if one["kernel"] == "preloaded fp8"} == {90, 100, 120}
    assert all(one["spilled"] == 0 for one in facts["models"])


def test_preloaded_products_fit_in_shared_memory(facts: Facts) -> None:
    """On SM 120, a program has 99 KiB. On SM 90, a multiprocessor has 228 KiB, of which each program uses another
    one."""
    from attnplug_engine.kernels import gemm_tiles

    assert all(one["shared"] <= 99 << 10 for one in facts["models"] if one["kernel"].startswith("preloaded"))
    for name, size in (("ONE_ROW", 2), ("LONG_WAIT", 2), ("ONE_ROW_FP8", 1), ("LONG_WAIT_FP8", 1)):
        for (outputs, inputs), config in getattr(gemm_tiles, f"{name}_CONFIGS").items():
            gated = outputs > 4096
            taken = config.stages * config.block_n * inputs * size * (2 if gated else 1)
            assert config.programs * (taken + (1 << 10) + 256) <= 228 << 10, (name, config)


@pytest.mark.parametrize("sm", [80, 90])
def test_streamed_products_take_no_more_shared_memory_than_is_looked_for(sm: int, facts: Facts) -> None:
    from attnplug_engine.kernels.gemm_tiles import MANY, MORE, STREAMED, STREAMED_GATED, streamed_bytes

    taken = [one["shared"] for one in facts["models"] if one["kernel"] == "streamed" and one["sm"] == sm]
    plain, gated = taken
    assert 0 < plain <= streamed_bytes(STREAMED, MORE, 1) and 0 < gated <= streamed_bytes(STREAMED_GATED, MANY, 2)


def test_weights_are_loaded_before_the_kernel_waits_for_its_input(facts: Facts) -> None:
    """On SM 90, a kernel starts while the previous one is running. Nothing is stored before the wait."""
    for one in facts["models"]:
        assert one["stored_early"] == 0
        assert (one["loaded_early"] > 0) == (one["sm"] >= 90 and one["kernel"] in WITH_WEIGHTS), one


def test_angles_are_computed_exactly(facts: Facts) -> None:
    """The GPU's own approximation is far off at positions of a long context."""
    assert not any(one["approximate_angles"] for one in facts["models"])


def test_experts(facts: Facts) -> None:
    every = {
        "_sort_pairs",
        "_up_projection",
        "_up_one",
        "_down_projection",
        "_down_one",
        "_combine",
        "_score",
        "_choose",
    }
    assert {name for sm, name, _ in facts["experts"] if sm == 90} == every
    assert {name for sm, name, _ in facts["experts"] if sm == 80} == {"_up_projection", "_down_projection"}
    room = {80: 163 * 1024, 90: 227 * 1024}
    assert all(taken <= room[sm] for sm, _, taken in facts["experts"]), facts["experts"]


def test_quantized(facts: Facts) -> None:
    """All kernels for SM 90; for SM 80 to 120, those that differ. Tensor cores multiply fp8 directly from SM 89 on, on
    SM 90 except in narrow tiles. No loop moves codes or decoded weights through shared memory: only scales, which take
    fewer stores. Products of few rows load codes before they wait for their input, and use shared memory for sums only.
    Partial sums of divided products are stored before a program's arrival, and read after the last one's."""
    found = facts["quantized"]
    expected = {"scaled", "narrow", "few rows", "tiled", "split", "split, normed", "fp8", "int4", "mxfp4", "rows"}
    experts = {f"experts, {form}" for form in ("scaled", "fp8", "int4", "mxfp4")}
    assert {one["kernel"] for one in found if one["sm"] == 90} == expected | experts
    assert {one["sm"] for one in found if one["kernel"] == "scaled"} == {89, 90, 100, 120}
    assert all({one["sm"] for one in found if one["kernel"] == name} == {80, 90} for name in ("fp8", "few rows"))
    room = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
    for one in found:
        # To fit one more program on a multiprocessor, ptxas spills up to 7 of 72 registers of a product of few rows.
        spilled = 28 if one["kernel"] == "few rows" else 0
        assert one["shared"] <= room[one["sm"]] and one["spilled"] <= spilled, one
        assert one["stores"] < (8 if one["kernel"].endswith(("scaled", "narrow", "normed")) else 1), one
        assert one["fp8"] == ("scaled" in one["kernel"]), one
        if one["kernel"] == "few rows":
            assert one["shared"] <= 256 and (one["loaded_early"] >= 4 or one["sm"] < 90), one
        assert one["arrives"] == one["kernel"].startswith("split"), one


def test_invariant_products_have_one_instruction(facts: Facts) -> None:
    """E3: tiles of more rows differ in the instruction's ``n`` only."""
    products = [one for one in facts["invariant"] if one["kernel"] != "add parts"]
    assert {one["kernel"] for one in products} == {"plain", "gated", "_up_projection", "_down_projection"}
    assert {tuple(one["mma"]) for one in products} == {("wgmma.mma_async.sync.aligned.m64k16",)}
    assert all(one["spilled"] == 0 and one["shared"] <= 227 * 1024 for one in facts["invariant"])


def test_hisparse(facts: Facts) -> None:
    """Rows come from the host by 16 bytes at a time."""
    copying = {"swap in", "swap in verified rows", "swap in entries", "stage", "gather"}
    assert {name for sm, name, *_ in facts["hisparse"] if sm == 90} == copying | {"translate"}
    assert {name for sm, name, *_ in facts["hisparse"] if sm == 80} == {"swap in"}
    assert all(spilled == 0 and wide == (name in copying) for _, name, spilled, wide in facts["hisparse"])


def test_linear_gates(facts: Facts) -> None:
    names = {"_delta_gates", "_time_steps", "_gated_norm", "_sigmoid_gate"}
    assert {tuple(each) for each in facts["linear gates"]} == {(80, "_gated_norm"), *((90, name) for name in names)}


def test_the_sampler(facts: Facts) -> None:
    assert [each[:2] for each in facts["sampler"]] == [[80, "_look"], [90, "_look"], [90, "_choose"]]
    assert all(spilled == 0 for *_, spilled in facts["sampler"]), facts["sampler"]


def test_speculation(facts: Facts) -> None:
    trees = {f"trees.{name}" for name in ("_relate", "_lay_out", "_accept", "_move")}
    names = (
        trees
        | {"draft_tree._grow", "draft_tree._prune"}
        | {"ngram._append", "ngram._search", "ngram._propose", "draft_topk._look", "draft_topk._choose"}
    )
    assert {name for sm, name, _ in facts["speculation"] if sm == 90} == names
    assert {name for sm, name, _ in facts["speculation"] if sm == 80} == {"draft_tree._prune", "ngram._search"}
    assert all(spilled == 0 for *_, spilled in facts["speculation"]), facts["speculation"]


def test_what_begins_and_ends_a_step(facts: Facts) -> None:
    """The mailbox is read past the caches, which may still hold its previous content."""
    begin, end = facts["steps"]
    assert begin["kernel"] == "_begin" and begin["uncached"] >= 3 and not begin["waits"]
    assert end["kernel"] == "_end" and not end["uncached"] and end["waits"]
