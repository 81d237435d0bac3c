"""MLA prefill as MHA: ragged attention against float64, interpreted on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from attnplug import AttentionKind, DType, ExtendPath, LayerSpec, RaggedCall
from attnplug.host import MLADims
from attnplug_testing.devices import DEVICES, INTERPRETED
from attnplug_testing.gluon_interpreter import interpreted
from attnplug_testing.kernel_scene import mla
from attnplug_testing.references.triton_mla import scene
from attnplug_triton_mla.gluon_ragged import attend_ragged_rows
from attnplug_triton_mla.ragged import RaggedConfig, fit_ragged, launch_ragged, plan_tiles

on_every_device = pytest.mark.parametrize("device", DEVICES)
SMALL = RaggedConfig(32, 16, 4, 2)
NAN = float("nan")


def attended(q, k, v, call, scale):
    """Attend in float64, sequence by sequence."""
    outs, lses = [], []
    for index, (new, keys) in enumerate(zip(call.query_lens, call.kv_lens, strict=True)):
        query, key = int(call.query_indptr[index]), int(call.kv_indptr[index])
        rows = slice(key, key + keys)
        logits = torch.einsum("qhd,khd->hqk", q[query : query + new].double(), k[rows].double()) * scale
        if call.causal:
            seen = torch.arange(keys, device=q.device) <= torch.arange(new, device=q.device)[:, None] + keys - new
            logits = logits.masked_fill(~seen, float("-inf"))
        lses.append(logits.logsumexp(-1).T)
        outs.append(torch.einsum("hqk,khd->qhd", logits.softmax(-1).nan_to_num(), v[rows].double()))
    return torch.cat(outs), torch.cat(lses)


def head_major(rows: torch.Tensor) -> torch.Tensor:
    """A copy in which the rows of a head are contiguous."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


def sm() -> int:
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


class Rows:
    """Arguments of one ragged call."""

    def __init__(self, device: str, queries, keys, causal, nope=128, rope=64, value=128, heads=2) -> None:
        dims = MLADims(kv_lora_rank=32, qk_nope_head_dim=nope, qk_rope_head_dim=rope)
        self.layer = LayerSpec(0, AttentionKind.MLA, heads, heads, nope + rope, value, 0.11, mla=dims)
        self.call = RaggedCall.of(0, queries, keys, causal=causal, device=torch.device(device))
        self.config = SMALL if device == "cpu" else fit_ragged(sm(), 227 << 10, (nope + rope, value))
        self.tolerance = 1e-5 if device == "cpu" else 1e-2
        random = torch.Generator(device).manual_seed(1)
        dtype = torch.float32 if device == "cpu" else torch.bfloat16

        def rows(number: int, width: int) -> torch.Tensor:
            return torch.randn(number, heads, width, generator=random, device=device).to(dtype)

        self.q, self.k, self.v = rows(sum(queries), nope + rope), rows(sum(keys), nope + rope), rows(sum(keys), value)

    def run(self) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(self.q.shape[:2], NAN, device=self.q.device)
        tiles = plan_tiles(self.call, self.config)
        return launch_ragged(self.q, self.k, self.v, self.layer, self.call, tiles, self.config, lse), lse

    def check(self) -> None:
        (out, lse), (wanted, wanted_lse) = self.run(), attended(self.q, self.k, self.v, self.call, self.layer.scale)
        assert (out.double() - wanted).abs().max() <= self.tolerance * wanted.abs().max()
        finite = wanted_lse.isfinite()
        assert (lse[finite] - wanted_lse[finite]).abs().max() <= self.tolerance
        assert torch.equal(lse.isfinite(), finite)


@on_every_device
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.sample(1)
def test_sequences_of_any_length(causal, device):
    """C1, C4: around tiles and steps; with and without a prefix."""
    longer = 1 if device == "cpu" else 40
    queries = (1, 33, 32, 7, 65)
    Rows(
        device, queries, [longer * n + more for n, more in zip(queries, (0, 15, 0, 100, 64), strict=True)], causal
    ).check()


@on_every_device
@pytest.mark.parametrize(("nope", "rope", "value"), [(128, 0, 128), (192, 64, 256), (64, 32, 80), (24, 8, 8)])
@pytest.mark.sample(2)
def test_widths_that_are_no_power_of_two(nope, rope, value, device):
    """C1"""
    Rows(device, (20, 40), (33, 40), True, nope, rope, value).check()


@on_every_device
def test_a_sequence_with_fewer_keys_than_queries(device):
    """C1: its first queries see nothing: zeros, and a log-sum-exp of -inf."""
    rows = Rows(device, (40, 3), (10, 3), True)
    rows.check()
    out, lse = rows.run()
    assert not out[:30].any() and bool((lse[:30] == float("-inf")).all())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by NumPy, in the interpreter
@on_every_device
@pytest.mark.parametrize("causal", [True, False])
def test_nan_stays_in_its_sequence(causal, device):
    """B6: rows behind a sequence's last are another's."""
    rows = Rows(device, (20, 30, 5), (50, 35, 21), causal)
    clean, _ = rows.run()
    for tensor, start, stop in ((rows.q, 20, 50), (rows.k, 50, 85), (rows.v, 50, 85)):
        tensor[start:stop] = NAN
    out, lse = rows.run()
    assert lse[20:50].isnan().all()
    assert torch.equal(out[:20], clean[:20]) and torch.equal(out[50:], clean[50:])
    assert out[20:50].isnan().all()


@on_every_device
def test_rows_with_strides(device):
    """Parts of wider rows are read in place; addresses that TMA cannot read are copied."""
    rows = Rows(device, (20, 40), (33, 40), True)
    wanted, _ = rows.run()
    both = torch.full((*rows.k.shape[:2], 192 + 128 + 3), NAN, dtype=rows.k.dtype, device=device)
    both[..., :192], both[..., 195:] = rows.k, rows.v
    rows.k, rows.v = both[..., :192], both[..., 195:]
    rows.q = head_major(rows.q)
    assert torch.equal(rows.run()[0], wanted)
    rows.k, rows.v = head_major(rows.k), head_major(rows.v)
    assert torch.equal(rows.run()[0], wanted)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_float16(device):
    """C1"""
    rows = Rows(device, (200, 3, 129), (500, 3, 400), True)
    rows.q, rows.k, rows.v = rows.q.half(), rows.k.half(), rows.v.half()
    rows.check()


@pytest.fixture
def specialize(monkeypatch):
    """Let a call run the specialized kernel, interpreted: keys and values in bfloat16, the others in float64."""

    def change(rows: Rows, seed: int = 0, stages: int = 2) -> Rows:
        monkeypatch.setattr("attnplug_triton_mla.ragged.attend_ragged_rows", interpreted(attend_ragged_rows, seed))
        rows.q, rows.k, rows.v = rows.q.double(), rows.k.bfloat16(), rows.v.bfloat16()
        rows.config = replace(fit_ragged(90, 227 << 10, (rows.k.shape[2], rows.v.shape[2])), stages=stages)
        rows.tolerance = 1e-6  # of the log-sum-exp, which is in float32
        return rows

    return change


@INTERPRETED
class TestInterpretedSpecializedKernel:
    @pytest.mark.parametrize(("causal", "stages"), [(True, 1), (True, 2), (False, 2)])
    def test_lengths_around_tiles_and_steps(self, causal, stages, specialize):
        """C1, C4"""
        queries, keys = (1, 129, 128, 7, 65), (1, 144, 128, 300, 129)
        specialize(Rows("cpu", queries, keys, causal), stages=stages).check()

    @pytest.mark.parametrize(("nope", "rope", "value"), [(64, 0, 64), (128, 0, 128), (128, 64, 64)])
    def test_widths(self, nope, rope, value, specialize):
        specialize(Rows("cpu", (20, 40), (33, 140), True, nope, rope, value)).check()

    def test_fewer_keys_than_queries(self, specialize):
        """C1: the first queries see nothing: zeros, and a log-sum-exp of -inf."""
        rows = specialize(Rows("cpu", (140, 3, 2), (10, 3, 0), True))
        rows.check()
        out, lse = rows.run()
        assert not out[:130].any() and bool((lse[:130] == float("-inf")).all())

    @pytest.mark.parametrize("causal", [True, False])
    def test_nan_stays_in_its_sequence(self, causal, specialize):
        """B6: rows behind a sequence's last are another's."""
        rows = specialize(Rows("cpu", (20, 30, 5), (50, 135, 21), causal))
        clean, _ = rows.run()
        for tensor, start, stop in ((rows.q, 20, 50), (rows.k, 50, 185), (rows.v, 50, 185)):
            tensor[start:stop] = NAN
        out, lse = rows.run()
        assert lse[20:50].isnan().all() and out[20:50].isnan().all()
        close = {"rtol": 0, "atol": 1e-12}
        torch.testing.assert_close(out[:20], clean[:20], **close)
        torch.testing.assert_close(out[50:], clean[50:], **close)

    def test_rows_with_strides(self, specialize):
        """Parts of wider rows, and head-major rows, which are copied."""
        rows = specialize(Rows("cpu", (20, 40), (33, 40), True))
        wanted, _ = rows.run()
        both = torch.full((*rows.k.shape[:2], 192 + 128 + 8), NAN, dtype=rows.k.dtype)
        both[..., :192], both[..., 200:] = rows.k, rows.v
        rows.k, rows.v, rows.q = both[..., :192], both[..., 200:], head_major(rows.q)
        torch.testing.assert_close(rows.run()[0], wanted)
        rows.k, rows.v = head_major(rows.k), head_major(rows.v)
        torch.testing.assert_close(rows.run()[0], wanted)

    def test_padding_and_empty_sequences_of_a_captured_call(self, specialize):
        """C1, B6: rows behind the last sequence are NaN."""
        call = RaggedCall.captured(4, 300, device=torch.device("cpu"))
        call.refill(torch.tensor((133, 0, 1, 0), dtype=torch.int32))
        rows = specialize(Rows("cpu", (133, 1), (133, 1), True))
        given = [torch.cat([each, each.new_full((166, *each.shape[1:]), NAN)]) for each in (rows.q, rows.k, rows.v)]
        out = launch_ragged(*given, rows.layer, call, plan_tiles(call, rows.config), rows.config, None)
        wanted, _ = attended(rows.q, rows.k, rows.v, rows.call, rows.layer.scale)
        torch.testing.assert_close(out[:134], wanted, rtol=0, atol=1e-9)
        assert not out[134:].any() and not out[134:].isnan().any()

    @pytest.mark.long
    @pytest.mark.parametrize("seed", range(50))
    def test_random_calls(self, seed, specialize):
        numbers = random.Random(seed)
        queries = [numbers.choice((1, 64, 65, 128, 129, numbers.randint(1, 300))) for _ in range(numbers.randint(1, 4))]
        keys = [new + numbers.choice((0, 1, 100, -(new // 3), numbers.randint(0, 400))) for new in queries]
        nope, rope, value = numbers.choice(((128, 64, 128), (64, 0, 64), (128, 64, 64)))
        rows = Rows("cpu", queries, keys, numbers.random() < 0.6, nope, rope, value)
        specialize(rows, seed, numbers.choice((1, 2, 3))).check()


class Launches:
    """Stand-in for a kernel: records the arguments of its launches."""

    def __init__(self) -> None:
        self.found: list[tuple[tuple, dict]] = []

    def __getitem__(self, grid):
        return lambda *arguments, **constants: self.found.append((arguments, constants))


def test_heads_of_the_specialized_kernel_are_at_distances_that_no_length_changes(monkeypatch):
    """E1: they are constants of the compiled kernel. Offsets of queries have 32 bits."""
    launches = Launches()
    monkeypatch.setattr("attnplug_triton_mla.ragged.attend_ragged_rows", launches)
    for count in (100, 200, 1 << 17):
        rows = Rows("cpu", (1,), (1,), True)
        q, k = (head_major(torch.empty(count, 128, 192, dtype=torch.bfloat16, device="meta")) for _ in range(2))
        v = torch.empty(count, 128, 256, dtype=torch.bfloat16, device="meta")[..., 128:]
        launch_ragged(q, k, v, rows.layer, rows.call, rows.q, fit_ragged(90, 227 << 10, (192, 128)), None)
    for (queries, keys, values, *_), constants in launches.found:
        assert (constants["K_HEAD_COLUMNS"], constants["V_HEAD_COLUMNS"]) == (192, 256)
        assert (keys.shape[1], values.shape[1]) == (128 * 192, 127 * 256 + 128)
        assert queries.stride(1) * 128 < 1 << 31


@on_every_device
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_with_most_keys_come_first(causal, device):
    """Every tile once, by falling numbers of keys in whole tiles, then -1."""
    random = torch.Generator().manual_seed(3)
    queries = torch.randint(1, 150, (20 if device == "cpu" else 300,), generator=random).tolist()
    keys = [new + int(torch.randint(0, 200, (), generator=random)) for new in queries]
    call = RaggedCall.of(0, queries, keys, causal=causal, device=torch.device(device))
    tiles = plan_tiles(call, SMALL).tolist()
    live = [(sequence, block) for sequence, block in tiles if sequence >= 0]
    assert tiles[: len(live)] == [list(tile) for tile in live]
    assert sorted(live) == [(n, block) for n, new in enumerate(queries) for block in range(math.ceil(new / 32))]
    work = [((keys[n] - queries[n]) // 32 + block + 1 if causal else keys[n] // 32) for n, block in live]
    assert work == sorted(work, reverse=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # by NumPy, in the interpreter
@on_every_device
def test_a_captured_call_reads_its_lengths_on_the_device(device):
    """C1: sequences without rows, and padding behind the last one, which gets zeros even if its rows are NaN."""
    call = RaggedCall.captured(5, 90, device=torch.device(device))
    for lens in ((33, 0, 1, 40, 0), (0, 0, 90, 0, 0), (2, 3, 4, 5, 6), (0, 0, 0, 0, 0)):
        live = [length for length in lens if length]
        rows = Rows(device, live or [1], live or [1], True)
        call.refill(torch.tensor(lens, dtype=torch.int32, device=device))
        count = sum(live)
        given = [
            torch.cat([each[:count], each.new_full((90 - count, *each.shape[1:]), NAN)])
            for each in (rows.q, rows.k, rows.v)
        ]
        tiles = plan_tiles(call, rows.config)
        out = launch_ragged(*given, rows.layer, call, tiles, rows.config, None)
        assert not out[count:].any() and not out[count:].isnan().any()
        if live:
            wanted, _ = attended(rows.q, rows.k, rows.v, rows.call, rows.layer.scale)
            assert (out[:count].double() - wanted).abs().max() <= rows.tolerance * wanted.abs().max()


@INTERPRETED
def test_wide_heads_extend_absorbed():
    """C1: abilities are narrowed at construction; so are those of a backend whose results are batch-invariant."""
    wide = MLADims(kv_lora_rank=32, qk_nope_head_dim=256, qk_rope_head_dim=16)
    narrow = scene(mla(((5, 3),), heads=2, dtype=DType.FLOAT32), "cpu").backend
    assert narrow.claims.mla_extend == frozenset(ExtendPath)
    assert scene(mla(((5, 3),), heads=2, dtype=DType.FLOAT32, dims=wide), "cpu").backend.claims.mla_extend == {
        ExtendPath.ABSORBED
    }
