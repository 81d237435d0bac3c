"""``attnplug check``: it passes a right backend, and no wrong one."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from attnplug import DType, LayerSpec
from attnplug.cli.check import LAYERS
from attnplug.cli.main import main
from attnplug.cli.scene import STEPS, Scene, allowed_error, largest_error, worse
from attnplug.host import torch_dtype

Attnplug = Callable[..., "Outcome"]
Backend = Callable[..., None]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as JSON that any parser reads: it holds nothing else, and no NaN."""
        return json.loads(self.out, parse_constant=pytest.fail)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ATTNPLUG_PLUGINS", "ATTNPLUG_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own; this puts it back


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Attnplug:
    """Runs the command on the CPU, in this process. An exception that would be a traceback fails the test."""

    def run(*arguments: str) -> Outcome:
        given = arguments if "--device" in arguments else ("--device", "cpu", *arguments)
        monkeypatch.setattr(sys, "argv", ["attnplug", "check", *given])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        captured = capsys.readouterr()
        code = exit.value.code
        return Outcome(code if isinstance(code, int) else int(code is not None), captured.out, captured.err)

    return run


PLUGIN = """
from attnplug import BackendSpec, Capabilities, hookimpl

@hookimpl
def attnplug_backends():
    can = Capabilities(kinds=["mha"], devices=["cpu"], dtypes=["float32"], roles={roles!r}, extras={extras!r})
    return [BackendSpec("tested", "a backend of a test", "0.9", "{module}_backend:Tested", can, preference=100)]
"""

BACKEND = """
import torch
from dataclasses import replace
from attnplug import ForwardExtras
from attnplug.host import TorchNativeBackend

{before}

def first(layer):
    return replace(layer, layer_id=0)

class Tested(TorchNativeBackend):
    def forward_extend(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        out = super().forward_extend(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)
        {extend}
        return out

    def forward_decode(self, q, k, v, layer, batch, *, save_kv_cache=True, extras=None):
        out = super().forward_decode(q, k, v, layer, batch, save_kv_cache=save_kv_cache, extras=extras)
        {decode}
        return out
"""


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Installs the backend ``tested``: torch_native's results, and then what a test does to them."""
    monkeypatch.syspath_prepend(tmp_path)
    module = "check_plugin"

    def install(
        extend: str = "pass",
        decode: str = "pass",
        *,
        before: str = "",
        source: str | None = None,
        roles: tuple[str, ...] = ("prefill", "decode"),
        extras: tuple[str, ...] = ("lse",),
        plugin: str = PLUGIN,
    ) -> None:
        (tmp_path / f"{module}.py").write_text(plugin.format(module=module, roles=roles, extras=extras))
        made = BACKEND.format(extend=extend, decode=decode, before=before) if source is None else source
        (tmp_path / f"{module}_backend.py").write_text(made)
        info = tmp_path / "tested_dist-1.2.3.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tested-dist\nVersion: 1.2.3\n")
        (info / "entry_points.txt").write_text(f"[attnplug.plugins]\ntested = {module}\n")

    yield install
    for name in (module, f"{module}_backend"):
        sys.modules.pop(name, None)


TESTED = ("--attention-backend", "tested")

# ---- the default holds ----


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--kv-dtype", "fp8", "--seed", "9223372036854775807"],
        ["--dtype", "fp16", "--page-size", "1"],
        ["--dtype", "bf16", "--kv-dtype", "fp8", "--page-size", "7"],
    ],
    ids=" ".join,
)
def test_the_default_backend_holds(check: Attnplug, arguments: list[str]) -> None:
    outcome = check(*arguments)
    assert outcome.code == 0
    assert "24 of 24 checks hold" in outcome.out
    assert "WRONG" not in outcome.out


def test_the_report_shows_what_was_found_chosen_and_why(check: Attnplug) -> None:
    text = check().out
    for part in ("torch_native (attnplug 0.1.0)", "auto: the only usable one", "MHA", "GQA", "MLA", "decode", "mixed"):
        assert part in text


def test_as_json_stdout_holds_nothing_else(check: Attnplug) -> None:
    outcome = check("--json")
    assert outcome.code == 0
    assert len(outcome.json) == 24
    assert all(result["holds"] and result["error"] <= result["tolerance"] for result in outcome.json)
    assert "24 of 24" in outcome.err


def sequential_float32(q: torch.Tensor, rows: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
    """Absorbed MLA of one request's newest queries, every sum in float32 and one term after the other."""
    assert layer.mla is not None
    rank, queries, keys = layer.mla.kv_lora_rank, q.shape[0], rows.shape[0]
    logits = torch.zeros(layer.num_heads, queries, keys)
    for column in range(layer.mla.row_dim):
        logits += q[:, :, column].T[:, :, None] * rows[:, column]
    future = torch.ones(queries, keys).triu(keys - queries + 1).bool()
    logits = (logits * layer.scale).masked_fill(future, -torch.inf)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True))
    sums, total = torch.zeros(layer.num_heads, queries, rank), torch.zeros(layer.num_heads, queries, 1)
    for row in range(keys):
        sums += weights[:, :, row, None] * rows[row, :rank]
        total += weights[:, :, row, None]
    return (sums / total).transpose(0, 1)


def test_rounding_is_no_fault() -> None:
    """With this seed plain float32 is off by more than 2e-6, and as right as it can be."""
    layer = LAYERS["MLA 16 heads, 512+64"]
    scene = Scene(layer, DType.FLOAT32, DType.FLOAT32, 64, torch.device("cpu"), 18)
    scene._inputs(STEPS[0])
    q, _, _ = scene._inputs(STEPS[1])  # 29 tokens of request 1, which has 100
    wanted, _ = scene._wanted(STEPS[1], q)
    error = largest_error(sequential_float32(q, torch.cat(scene.keys[1]).float().squeeze(1), layer), wanted)
    assert 2e-6 < error < scene.tolerance / 4


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_what_is_allowed_in_float32_is_far_from_a_fault(layer: LayerSpec) -> None:
    """A thousandth of a per cent is one, however many terms a layer sums."""
    assert Scene(layer, DType.FLOAT32, DType.FLOAT32, 64, torch.device("cpu"), 0).tolerance < 2e-5


@pytest.mark.parametrize(("dtype", "most"), [(DType.FLOAT16, 0.01), (DType.BFLOAT16, 0.03)])
def test_what_is_allowed_in_a_short_type_is_its_rounding(dtype: DType, most: float) -> None:
    """Results have eleven bits, or eight."""
    assert 2 * torch.finfo(torch_dtype(dtype)).eps < allowed_error(dtype, 1000) < most


def test_a_requests_pages_are_in_no_order() -> None:
    """A backend that takes them for neighbours finds other rows there."""
    scene = Scene(LAYERS["MHA 4 heads"], DType.FLOAT32, DType.FLOAT32, 16, torch.device("cpu"), 0)
    scene.table.extend(scene.rows[1], 100)
    pages = list(scene.table.pages(scene.rows[1]))
    assert len(pages) == 7 and pages not in (sorted(pages), sorted(pages, reverse=True))


@pytest.mark.parametrize("errors", [(1e-9, math.nan), (math.nan, 1e-9), (math.nan, math.inf)])
def test_of_two_errors_nan_is_the_worse(errors: tuple[float, float]) -> None:
    """Of two results of one step, too: no comparison with NaN holds, so that it is easily lost."""
    assert math.isnan(worse(*errors))


# ---- linear attention ----

LINEAR_PLUGIN = """
from attnplug import BackendSpec, Capabilities, hookimpl

@hookimpl
def attnplug_backends():
    kinds = ["gdn", "kda", "lightning", "mamba2", "short_conv"]
    can = Capabilities(kinds=kinds, devices=["cpu"], dtypes=["float32"], roles=["linear"])
    return [BackendSpec("tested", "a linear backend of a test", "0.9", "{module}_backend:Tested", can)]
"""
LINEAR_BACKEND = """
import torch
from attnplug import BackendId, Claims, Plan

class Tested:
    claims = Claims()

    def __init__(self, context):
        self.backend_id, self.pool = BackendId(context.name), context.pools.linear

    def init_forward_metadata(self, batch):
        lens = batch.geometry.query_lens
        starts = [sum(lens[:i]) for i in range(len(lens))]
        own = [(slot, slice(s, s + n)) for slot, s, n in zip(batch.geometry.state_slots.tolist(), starts, lens)]
        return Plan(self.backend_id, batch.forward_mode, sum(lens), None, metadata=own)

    def forward_conv(self, x, weight, bias, layer, batch, silu):
        states, out = self.pool.conv(layer.layer_id), torch.zeros_like(x)
        for slot, own in batch.plan_for(self.backend_id, x.shape[0]).metadata:
            rows = torch.cat([states[slot, :, 1:].T, x[own]])
            width = weight.shape[1]
            out[own] = (rows.unfold(0, width, 1) * weight).sum(-1) + bias
            states[slot] = torch.cat([states[slot].T, x[own]])[-width:].T
        {conv}
        return torch.nn.functional.silu(out) if silu else out

    def forward_linear(self, inputs, layer, batch):
        states, out = self.pool.recurrent(layer.layer_id), torch.zeros_like(inputs.v)
        heads, key_heads = out.shape[1], inputs.q.shape[1]
        for slot, own in batch.plan_for(self.backend_id, out.shape[0]).metadata:
            for t in range(own.start, own.stop):
                q, k = (x[t].repeat_interleave(heads // key_heads, 0) for x in (inputs.q, inputs.k))
                if inputs.normalize:
                    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
                decay = inputs.log_decay if inputs.log_decay.dim() == 1 else inputs.log_decay[t]
                state = states[slot] * decay.exp().reshape(heads, -1, 1)
                write = inputs.v[t]
                if inputs.beta is not None:
                    write = (write - (k[:, None] @ state)[:, 0]) * inputs.beta[t, :, None]
                state = state + k[:, :, None] * write[:, None]
                states[slot] = state
                out[t] = layer.scale * (q[:, None] @ state)[:, 0]
        {linear}
        return out

    def commit_states(self, forward_batch, accepted):
        raise NotImplementedError
"""
LINEAR = ("--linear-attention-backend", "tested")


@pytest.mark.parametrize(
    ("conv", "linear"),
    [
        ("pass", "pass"),
        ("out = out * 1.0001", "pass"),
        ("pass", "out = out * 1.0001"),
        ("pass", "states[batch.geometry.state_slots[0]] *= 1.0001"),
        ("states[batch.geometry.state_slots[0], 0, -1] += 1e-3", "pass"),
        ("pass", "free = set(range(7)) - set(batch.geometry.state_slots.tolist()); states[sorted(free)] = 0"),
        ("out = out[:-1]", "pass"),
    ],
    ids=["right", "convolution", "recurrence", "state", "rows kept", "slots of nobody", "shape"],
)
def test_linear_backends_are_checked_layer_by_layer_against_their_states(
    check: Attnplug, backend: Backend, conv: str, linear: str
) -> None:
    """A7: every kind of layer; outputs and what is kept of them."""
    source = LINEAR_BACKEND.format(conv=conv, linear=linear)
    backend(source=source, plugin=LINEAR_PLUGIN)
    outcome = check(*LINEAR)
    right = (conv, linear) == ("pass", "pass")
    assert outcome.code == (0 if right else 1)
    assert ("20 of 20 checks hold" in outcome.out) == right
    assert ("WRONG" in outcome.out) != right
    for kind in ("GDN", "KDA", "lightning", "mamba2", "short convolution"):
        assert kind in outcome.out
    assert "MHA" not in outcome.out


def test_both_sorts_are_checked_where_both_are_asked_for(check: Attnplug, backend: Backend) -> None:
    backend(source=LINEAR_BACKEND.format(conv="pass", linear="pass"), plugin=LINEAR_PLUGIN)
    outcome = check(*LINEAR, "--attention-backend", "torch_native")
    assert outcome.code == 0
    assert "44 of 44 checks hold" in outcome.out


# ---- no wrong backend passes ----


def test_a_right_backend_of_a_plugin_holds(check: Attnplug, backend: Backend) -> None:
    """D1"""
    backend()
    outcome = check(*TESTED)
    assert outcome.code == 0
    assert "8 of 8 checks hold" in outcome.out


@pytest.mark.parametrize(
    ("extend", "decode"),
    [
        ("out = out * 1.0001", "pass"),
        ("pass", "out = out * 1.0001"),
        ("out = out * float('nan')", "pass"),
        ("pass", "out[-1, -1, -1] = float('nan')"),
        ("out[0, 0, 0] += 1e-3", "pass"),
        ("pass", "out = torch.zeros_like(out)"),
        ("pass", "out = out.flip(0)"),
        ("if extras: extras.lse.mul_(1.4426950408889634)", "pass"),
        ("pass", "if extras: extras.lse.fill_(float('nan'))"),
        ("if extras: extras.lse.zero_()", "pass"),
        ("if extras: out = out * 1.0001", "pass"),
        ("out = out.unsqueeze(0)", "pass"),
        ("out = out.double()", "pass"),
        ("if layer.layer_id: out = self.forward_extend(q, k, v, first(layer), batch, save_kv_cache=False)", "pass"),
        ("out = out.flatten(1)", "pass"),
        ("out = out[:-1]", "pass"),
        ("pass", "out = None"),
        ("raise RuntimeError('no kernel image')", "pass"),
        ("pass", "raise AssertionError('bad page')"),
    ],
)
def test_a_wrong_result_is_shown_as_wrong_and_is_exit_code_1(
    check: Attnplug, backend: Backend, extend: str, decode: str
) -> None:
    """C4 for the log-sum-exp: base 2 is wrong."""
    backend(extend, decode)
    outcome = check(*TESTED)
    assert outcome.code == 1
    assert "WRONG" in outcome.out
    assert "8 of 8" not in outcome.out


def test_a_layer_is_checked_no_further_than_its_first_error(check: Attnplug, backend: Backend) -> None:
    """What the cache holds then is anybody's guess."""
    backend("raise RuntimeError('no kernel image')")
    results = check(*TESTED, "--json").json
    assert [result["step"] for result in results] == [STEPS[0].title] * len({result["layer"] for result in results})


def test_a_log_sum_exp_that_is_never_written_is_wrong(check: Attnplug, backend: Backend) -> None:
    """The buffer must not hold what an earlier result left in memory."""
    source = BACKEND.format(extend="pass", decode="pass", before="")
    backend(source=source.replace("extras=extras)", "extras=None)"))
    outcome = check(*TESTED)
    assert outcome.code == 1
    assert "WRONG" in outcome.out


def test_a_backend_that_does_not_write_the_cache_is_wrong(check: Attnplug, backend: Backend) -> None:
    source = BACKEND.format(extend="pass", decode="pass", before="")
    backend(source=source.replace("save_kv_cache=save_kv_cache", "save_kv_cache=False"))
    outcome = check(*TESTED)
    assert outcome.code == 1
    assert "WRONG" in outcome.out


def test_a_wrong_result_is_json_that_any_parser_reads(check: Attnplug, backend: Backend) -> None:
    backend("out = out * float('nan')")
    outcome = check(*TESTED, "--json")
    assert outcome.code == 1
    assert not all(result["holds"] for result in outcome.json)


def test_an_error_in_a_forward_names_the_backend_and_the_error(check: Attnplug, backend: Backend) -> None:
    backend("raise RuntimeError('no kernel image')")
    outcome = check(*TESTED)
    assert "tested" in outcome.out + outcome.err
    assert "no kernel image" in outcome.out + outcome.err


# ---- backends that cannot be built ----


@pytest.mark.parametrize(
    ("source", "needs"),
    [
        ("import no_such_kernel_library", "no_such_kernel_library"),
        ("raise AssertionError('needs an H100')", "needs an H100"),
        ("import sys; sys.exit(0)", "SystemExit"),
        ("", "Tested"),
        ("def Tested(context): raise RuntimeError('no kernel image')", "no kernel image"),
        ("def Tested(): pass", "Tested"),
        ("def Tested(context): return None", "not a backend"),
        ("Tested = 7", "7"),
    ],
)
def test_a_backend_that_cannot_be_built_is_exit_code_1_with_its_plugin_and_error(
    check: Attnplug, backend: Backend, source: str, needs: str
) -> None:
    """D2"""
    backend(source=source)
    outcome = check(*TESTED)
    assert outcome.code == 1
    for text in ("tested", "tested-dist 1.2.3", needs):
        assert text in outcome.err


@pytest.mark.parametrize(
    ("source", "needs"),
    [("import no_such_kernel_library", "no_such_kernel_library"), ("def Tested(context): 1 / 0", "ZeroDivisionError")],
    ids=["on import", "in its constructor"],
)
def test_auto_goes_on_without_a_backend_that_cannot_be_built(
    check: Attnplug, backend: Backend, source: str, needs: str
) -> None:
    """D2: it has the highest preference and nothing speaks against it, but the embedded default can serve."""
    backend(source=source)
    outcome = check("--json")
    assert outcome.code == 0, outcome.err
    assert len(outcome.json) == 24
    (warning,) = [line for line in outcome.err.splitlines() if line.startswith("warning: ")]
    for text in ("tested (tested-dist 1.2.3)", needs, "auto goes on without it"):
        assert text in warning
    assert "MHA 4 heads: torch_native, auto" in outcome.err


def test_a_backend_that_prints_does_not_spoil_json(check: Attnplug, backend: Backend) -> None:
    backend("print('in a forward')", before="print('on import')")
    assert len(check(*TESTED, "--json").json) == 8


def test_square_brackets_of_a_plugin_are_text(check: Attnplug, backend: Backend) -> None:
    """They are no markup: neither dropped nor an error."""
    backend("raise RuntimeError('fast [experimental] or [/slow]')")
    outcome = check(*TESTED)
    assert outcome.code == 1
    assert "fast [experimental] or [/slow]" in outcome.out + outcome.err


def test_decode_runs_on_the_backend_that_was_chosen_for_it(check: Attnplug, backend: Backend) -> None:
    """D3: a backend that claims prefill alone is not asked to decode."""
    backend(decode="raise RuntimeError('decode was not claimed')", roles=("prefill",))
    outcome = check()
    assert outcome.code == 0
    assert "decode was not claimed" not in outcome.out + outcome.err


def test_layers_that_are_refused_are_shown_with_the_reasons(check: Attnplug, backend: Backend) -> None:
    """D3"""
    backend()
    outcome = check(*TESTED)
    assert "attention kind mla is not supported" in outcome.out
    assert "feature sliding_window" in outcome.out


def test_where_every_layer_is_refused_the_reasons_are_the_error(check: Attnplug, backend: Backend) -> None:
    """D3"""
    backend()
    outcome = check(*TESTED, "--dtype", "bf16")
    assert outcome.code == 1
    for text in ("tested (tested-dist 1.2.3) was asked for by --attention-backend", "bfloat16", "float32", "--dtype"):
        assert text in outcome.err


def test_where_every_layer_is_refused_the_error_speaks_of_the_nearest(check: Attnplug, backend: Backend) -> None:
    """D3: a backend for MLA is not told that it lacks MHA."""
    backend(plugin=PLUGIN.replace('"mha"', '"mla"'))
    outcome = check(*TESTED, "--dtype", "bf16")
    assert "attention kind" not in outcome.err
    assert "dtype bfloat16 is not supported" in outcome.err


# ---- wrong options ----


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_where_there_is_none_is_wrong_usage(check: Attnplug) -> None:
    outcome = check("--device", "cuda")
    assert outcome.code == 2
    for text in ("--device cuda", "--device cpu", "doctor"):
        assert text in outcome.err


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        (["--device", "tpu"], ["'tpu'", "cpu, cuda"]),
        (["--dtype", "fp8"], ["float8_e4m3fn", "bfloat16"]),
        (["--dtype", "int8"], ["'int8'", "bfloat16"]),
        (["--kv-dtype", ""], ["--kv-dtype", "''"]),
        (["--page-size", "0"], ["--page-size 0"]),
        (["--page-size", "99999999999999999"], ["--page-size", "99999999999999999"]),
        (["--seed", "99999999999999999999999"], ["--seed", "9223372036854775807"]),
        (["--attention-backend", "torch_nativ"], ["did you mean torch_native?"]),
        (["--backend-option", "torch_native.x=1"], ["torch_native.x", "no options"]),
        (["--backend-option", "="], ["NAME.KEY=VALUE"]),
    ],
)
def test_a_wrong_option_is_exit_code_2_with_value_and_allowed(
    check: Attnplug, arguments: list[str], needs: list[str]
) -> None:
    outcome = check(*arguments)
    assert outcome.code == 2
    for text in needs:
        assert text in outcome.err


def test_only_options_that_check_has_are_advised(check: Attnplug, backend: Backend) -> None:
    """Of a refusal that another command's option would change, the reason is told and the option is not."""
    plugin = PLUGIN.replace(
        "attnplug_backends():\n    can",
        "attnplug_backends():\n"
        "    from attnplug import Refusal\n"
        "    def check(problem, role, options):\n"
        '        return [Refusal("ranks", "it wants two ranks", setting="tensor_parallel")]\n'
        "    can",
    ).replace("preference=100", "check=check")
    backend(plugin=plugin)
    outcome = check(*TESTED)
    assert outcome.code == 1
    assert "it wants two ranks" in outcome.err
    assert "--tensor-parallel" not in outcome.err


def test_roles_have_options_of_their_own(check: Attnplug, backend: Backend) -> None:
    """D3: what a refusal of a role advises can be given."""
    backend("raise RuntimeError('prefill ran on it')")
    outcome = check("--decode-attention-backend", "tested", "--prefill-attention-backend", "torch_native")
    assert outcome.code == 0
    assert "MHA 4 heads: tested, asked for by --decode-attention-backend" in outcome.out
