"""Trees of drafted tokens: rules of the contract, and torch_native against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from attnplug import BackendContext, Claims, DType, ForwardBatch, ForwardMode, Geometry, PlanError
from attnplug.cli.backends import describe
from attnplug.host import MLADims
from attnplug.torch_native.backend import TorchNativeBackend
from attnplug.wrappers.forwarding import HybridLinearBackend, SplitBackend
from attnplug_conformance.arithmetic import NAN, relative_error
from attnplug_testing import kernel_scene
from attnplug_testing.batches import capabilities
from attnplug_testing.command import Attnplug
from attnplug_testing.devices import DEVICES
from attnplug_testing.errors import raises_naming
from attnplug_testing.kernel_scene import KernelCase, KernelScene
from attnplug_testing.specs import GDN, MHA, model
from attnplug_testing.trees import ancestors, chain, random_trees, tree_attention, tree_bits
from support.recorder import Recorder

VERIFY = ForwardMode.TARGET_VERIFY
NARROW = MLADims(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16)
PREFIXES = (0, 1, 37, 64)


def geometry(**changes: Any) -> Geometry:
    """Two requests of 3 new rows, the second padded, and only the device knows."""
    given = {
        "mode": VERIFY,
        "page_table": torch.tensor([[4, 1], [0, 0]], dtype=torch.int32),
        "seq_lens": torch.tensor([5, 0], dtype=torch.int32),
        "page_size": 4,
        "rows": 6,
        "max_seq_len": 8,
        "max_new": 3,
        "tree": tree_bits([(-1, 0, 0), (-1, 0, 1)]),
    }
    return Geometry(**{**given, **changes})


class TestGeometry:
    def test_bits_are_a_row_and_its_ancestors(self):
        assert tree_bits([(-1, 0, 0, 1), chain(4)]).tolist() == [[1, 0b11, 0b101, 0b1011], [1, 3, 7, 15]]

    def test_halves_have_the_trees_of_their_requests(self):
        first, second = geometry(step=2).split(1)
        assert first.tree.tolist() == [[1, 3, 5]] and second.tree.tolist() == [[1, 3, 7]]
        assert (first.step, second.step) == (2, 2)

    def test_exact_lengths_and_fewer_requests_keep_the_trees(self):
        measured = geometry(step=1).with_host_lengths()
        assert measured.tree.tolist() == [[1, 3, 5]] and measured.step == 1
        trees = random_trees(3, 3)
        table = torch.zeros(3, 2, dtype=torch.int32)
        whole = Geometry.of_lengths(VERIFY, table, [3] * 3, [5, 6, 7], 4, tree=tree_bits(trees), step=3)
        some = whole.only([0, 2])
        assert torch.equal(some.tree, tree_bits([trees[0], trees[2]])) and some.step == 3


class TestRefusals:
    """A tree never runs as a chain."""

    def backend(
        self, window: int | None = None, page_size: int = 64, **declared: Any
    ) -> tuple[KernelScene, TorchNativeBackend]:
        def build(context: BackendContext) -> TorchNativeBackend:
            return TorchNativeBackend(replace(context, declared=replace(capabilities("torch_native"), **declared)))

        given = {"dtype": DType.FLOAT32, "window": window, "trees": random_trees(1, 3)}
        stage = KernelScene(kernel_scene.mha(((5, 3),), VERIFY, page_size, **given), "cpu", build)
        return stage, stage.backend

    def test_a_backend_that_takes_chains_only(self):
        stage, backend = self.backend(trees=False)
        with raises_naming(PlanError, "under_test", 3, "chains"):
            backend.init_forward_metadata(stage.batch())

    def test_a_layer_with_a_window(self):
        stage, backend = self.backend(window=7)
        with raises_naming(PlanError, "under_test", "layer 1", 7):
            backend.init_forward_metadata(stage.batch())

    @pytest.mark.parametrize(
        ("wrong", "named"),
        [
            ({"mode": ForwardMode.EXTEND}, ["extend", "tree"]),
            ({"new_lens": torch.tensor([3, 3], dtype=torch.int32)}, ["target_verify", "new_lens", "tree"]),
            ({"tree": torch.ones(2, 3, dtype=torch.int32)}, ["torch.int32", (2, 3), "torch.int64"]),
            (
                {"tree": torch.ones(3, 2, dtype=torch.int64)},
                ["torch.int64", (3, 2), (2, 3)],
            ),
            ({"tree": torch.ones(2, 3, dtype=torch.int64, device="meta")}, ["meta", "cpu"]),
            ({"max_new": 65, "rows": 130, "tree": torch.ones(2, 65, dtype=torch.int64)}, [65, 64]),
        ],
        ids=["mode", "ragged", "type", "shape", "device", "rows"],
    )
    def test_a_tree_that_no_kernel_could_read(self, wrong, named):
        _, backend = self.backend(page_size=4)
        with raises_naming(PlanError, *named):
            backend.init_forward_metadata(ForwardBatch(geometry(**wrong)))

    @pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
    def test_a_wrapper_takes_trees_if_both_children_do(self, first, second):
        """A9"""
        children = [Recorder("a", Claims(trees=first)), Recorder("b", Claims(trees=second))]
        for made in (SplitBackend(*children), HybridLinearBackend(*children, model(MHA, GDN))):
            assert made.claims.trees is (first and second)
            assert bool(made.limiting_children.get("trees")) is not (first and second)

    def test_a_wrapper_hands_the_tree_to_the_child_that_verifies(self):
        children = [Recorder("a", Claims(trees=True)), Recorder("b", Claims(trees=True))]
        batch = ForwardBatch(geometry())
        SplitBackend(*children).init_forward_metadata(batch)
        (given,) = children[1].given("init_forward_metadata")
        assert given["batch"] is batch and children[0].calls == []


def test_explain_judges_trees(attnplug: Attnplug) -> None:
    """D3"""
    common = ("explain", "--model", "tiny:llama", "--device", "cpu", "--speculative-tokens", "8")
    outcome = attnplug(*common, "--speculative-topk", "2")
    assert outcome.code == 0 and "8 speculative tokens, trees of drafts with 2 branches" in outcome.out


def test_a_backend_that_takes_trees_says_so_where_backends_are_listed() -> None:
    declared = capabilities("torch_native")
    assert describe(declared).endswith(", trees") and "trees" not in describe(replace(declared, trees=False))


def native(context: BackendContext) -> TorchNativeBackend:
    return TorchNativeBackend(replace(context, declared=capabilities("torch_native")))


def mha(rows: int, prefixes: tuple[int, ...] = PREFIXES, **changes: Any) -> KernelCase:
    trees = random_trees(len(prefixes), rows, seed=rows)
    given = {"page_size": 16, "head_dim": 16, "dtype": DType.FLOAT32, "trees": trees, "seed": rows}
    return kernel_scene.mha(tuple((prefix, rows) for prefix in prefixes), VERIFY, **{**given, **changes})


def mla(rows: int, prefixes: tuple[int, ...] = PREFIXES, **changes: Any) -> KernelCase:
    trees = random_trees(len(prefixes), rows, seed=rows)
    given = {"page_size": 16, "heads": 4, "dims": NARROW, "dtype": DType.FLOAT32, "trees": trees, "seed": rows}
    return kernel_scene.mla(tuple((prefix, rows) for prefix in prefixes), VERIFY, **{**given, **changes})


def by_chosen_keys(stage: KernelScene) -> tuple[torch.Tensor, torch.Tensor]:
    """The result by another float64 than the kit's: each row takes the keys that it sees and no others."""
    found = []
    for request, q in enumerate(stage.q.split(stage.new)):
        shared = stage.layer.num_heads // stage.keys[request].shape[1]
        keys, values = (rows.repeat_interleave(shared, 1) for rows in stage.stored(request))
        found.append(tree_attention(q, keys, values, stage.layer.scale, stage.case.trees[request], stage.case.cap))
    return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])


def check(case: KernelCase, device: str) -> None:
    stage = KernelScene(case, device, native)
    for mine, wanted in zip(stage.results(), by_chosen_keys(stage), strict=True):
        assert mine is None or relative_error(mine, wanted) <= stage.tolerance


both = pytest.mark.parametrize("case", [mha, mla])
on_every_device = pytest.mark.parametrize("device", DEVICES)


class TestTorchNative:
    @on_every_device
    @both
    @pytest.mark.parametrize("rows", [1, 5, 64])
    @pytest.mark.sample(4)
    def test_trees_of_their_own_for_every_request(self, rows, case, device):
        """C4; whole pages, parts of pages and no prefix at all."""
        for lse in (True, False):
            check(case(rows, lse=lse), device)

    @both
    def test_a_chain_is_a_causal_batch(self, case):
        """Bit for bit: it is the same computation."""
        tree, causal = (KernelScene(case(6, trees=some), "cpu", native) for some in ((chain(6),) * 4, None))
        for mine, theirs in zip(tree.results(), causal.results(), strict=True):
            assert torch.equal(mine, theirs)
        assert relative_error(tree.wanted()[0], causal.wanted()[0]) <= 1e-12, "the references agree"

    @on_every_device
    def test_requests_of_very_different_lengths_keep_their_trees(self, device):
        """They run in groups, longest first."""
        check(mha(4, (3, 9000, 12, 20)), device)

    @on_every_device
    def test_logit_cap(self, device):
        check(mha(7, cap=3.0), device)

    @on_every_device
    @both
    def test_what_a_row_must_not_see_may_be_nan(self, case, device):
        """NaN values of one token reach only the rows that attend to it, not those of its siblings."""
        parents = (-1, 0, 0, 1, 2, 0)
        stage = KernelScene(case(6, (20,), trees=(parents,)), device, native)
        stage.values[0][22] = NAN  # of MLA, a part of the latent row
        out, wanted = stage.results()[0], by_chosen_keys(stage)[0]
        blind = [row for row in range(6) if 2 not in ancestors(parents, row)]
        assert blind == [0, 1, 3, 5]
        assert relative_error(out[blind], wanted[blind]) <= stage.tolerance
        assert out[[2, 4]].isnan().all()

    @on_every_device
    def test_padded_requests_are_left_out(self, device):
        """Only the device knows the lengths until they are copied."""
        stage = KernelScene(mha(3, (20, 5)), device, native)
        known = stage.batch().geometry
        table = torch.cat([known.page_table, torch.full_like(known.page_table[:1], 1 << 30)])
        lens, tree = torch.cat([known.seq_lens, known.seq_lens[:1] * 0]), torch.cat([known.tree, ~known.tree[:1]])
        unknown = replace(known, page_table=table, seq_lens=lens, tree=tree, rows=9, host=None)
        assert stage.error(ForwardBatch(unknown.with_host_lengths())) <= stage.tolerance
