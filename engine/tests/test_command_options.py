"""Every option of ``run`` and ``embed`` arrives: as a field of what an engine or an embedder is built from.

Fields are enumerated: one that is added and that no option fills, or that is left at its default, is found.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from attnplug import DType, ExtendPath, Role, UsageError
from attnplug.host import ExtendPolicy, Registry
from attnplug_engine.options import EmbedOptions, EngineOptions
from attnplug_engine.request import SamplingParams
from attnplug_engine.settings.pooling import Pooling
from attnplug_testing.command import Attnplug
from attnplug_testing.errors import missing_values

SHARED = (
    *("--model", "tiny:llama", "--prompt", "x", "--attention-backend", "one", "--device", "cpu", "--dtype", "bf16"),
    *("--prefill-attention-backend", "two", "--linear-attention-backend", "three", "--backend-option", "two.split=4"),
    *("--kv-dtype", "fp8", "--page-size", "16", "--max-batch", "3", "--chunked-prefill-size", "5"),
    *("--context-length", "99", "--seed", "6", "--compile-processes", "0", "--json"),
)
FIELDS: dict[str, Any] = {
    "attention_backend": "one",
    "role_backends": {Role.PREFILL: "two", Role.LINEAR: "three"},
    "backend_options": {"two": {"split": "4"}},
    "device": "cpu",
    "dtype": DType.BFLOAT16,
    "kv_dtype": DType.FLOAT8_E4M3,
    "page_size": 16,
    "max_batch": 3,
    "chunked_prefill_size": 5,
    "context_length": 99,
    "seed": 6,
    "compile_processes": 0,
}
RUN: dict[str, Any] = {
    **FIELDS,
    "role_backends": {**FIELDS["role_backends"], Role.DECODE: "four", Role.DRAFT: "five"},
    "index_dtype": DType.FLOAT8_E4M3,
    "num_pages": 7,
    "prefix_cache": False,
    "state_slots": 9,
    "state_checkpoint": 64,
    "inter_token_latency": 0.2,
    "extend_policy": ExtendPolicy(forced=ExtendPath.CHUNKED, chunk_capacity=33),
    "ignore_eos": True,
    "random_weights": True,
    "check_layers": True,
    "overlap": False,
    "two_batch_overlap": True,
    "disable_cuda_graph": True,
    "disable_prefill_cuda_graph": True,
    "speculative_algorithm": "standalone",
    "speculative_draft_model": "small",
    "speculative_num_steps": 2,
    "speculative_topk": 3,
    "speculative_num_draft_tokens": 5,
    "plan_stream": True,
}
HOT = {"enable_hisparse": True, "hisparse_config": '{"device_buffer_size": 24}', "batch_invariant": True}
ALONE = {"cuda_graph_batch_sizes": (1, 2), "cuda_graph_prefill_sizes": (16, 64), **HOT}
"""Options that each exclude one of the others."""
EMBED: dict[str, Any] = {
    **FIELDS,
    "batch_invariant": True,
    "pooling": Pooling.MEAN,
    "normalize": False,
    "prompt_name": "query",
}


class Spy:
    """Replacement for an engine or an embedder that records its arguments and refuses every prompt."""

    registry = Registry({})
    built: list[Spy]

    def __init__(self, model: str, options: object, **_: object) -> None:
        self.model, self.options, self.params = model, options, None
        self.built.append(self)

    def add(self, prompt: object, params: SamplingParams) -> None:
        self.params = params
        raise UsageError("nothing runs")

    def tokens(self, prompt: object) -> None:
        raise UsageError("nothing runs")


@pytest.fixture
def spies(monkeypatch: pytest.MonkeyPatch) -> list[Spy]:
    monkeypatch.setattr(Spy, "built", found := [], raising=False)
    monkeypatch.setattr("attnplug_engine.cli.generate.Engine", Spy)
    monkeypatch.setattr("attnplug_engine.cli.embed_prompts.Embedder", Spy)
    return found


def values(options: Any) -> dict[str, Any]:
    return {field.name: getattr(options, field.name) for field in fields(options)}


@pytest.mark.parametrize(("kind", "expected"), [(EngineOptions, RUN), (EmbedOptions, EMBED)])
def test_every_field_is_given_here_another_value_than_its_default(kind, expected):
    default = values(kind())
    given = {**expected, **({} if kind is EmbedOptions else ALONE)}
    assert given.keys() == default.keys()
    assert [name for name in default if default[name] == given[name]] == []


def test_every_option_of_run_reaches_the_engine_or_the_sampling(attnplug: Attnplug, spies):
    outcome = attnplug(
        "run",
        *SHARED,
        *("--decode-attention-backend", "four", "--num-pages", "7", "--no-prefix-cache", "--state-slots", "9"),
        *("--index-dtype", "fp8"),
        *(
            "--state-checkpoint",
            "64",
            "--inter-token-latency",
            "0.2",
            "--mla-extend",
            "chunked",
            "--mla-chunk-capacity",
            "33",
            "--ignore-eos",
        ),
        *("--check-layers", "--max-tokens", "8", "--temperature", "0.5", "--top-k", "11", "--top-p", "0.9"),
        *("--stop", "a", "--stop", "b", "--logprobs", "2", "--random-weights", "--disable-overlap"),
        *("--enable-two-batch-overlap", "--disable-prefill-cuda-graph"),
        *("--disable-cuda-graph", "--draft-attention-backend", "five", "--speculative-algorithm", "standalone"),
        *("--speculative-draft-model", "small", "--speculative-num-steps", "2", "--speculative-topk", "3"),
        *("--speculative-num-draft-tokens", "5", "--enable-plan-stream"),
    )
    assert "nothing runs" in outcome.err
    (engine,) = spies
    assert (engine.model, values(engine.options)) == ("tiny:llama", {**values(EngineOptions()), **RUN})
    assert engine.params == SamplingParams(8, 0.5, 11, 0.9, stop=("a", "b"), logprobs=2)


def test_options_that_exclude_others_reach_the_engine(attnplug: Attnplug, spies):
    given = ("--enable-hisparse", "--hisparse-config", HOT["hisparse_config"], "--batch-invariant")
    attnplug("run", "--model", "tiny:llama", "--prompt", "x", *given)
    assert values(spies[0].options) == {**values(spies[0].options), **HOT}


@pytest.mark.parametrize(
    ("sizes", "code", "named"),
    [
        ("1,2", 2, ["nothing runs"]),
        ("1, two", 2, ["--cuda-graph-batch-sizes", "1, two"]),
        ("", 2, ["--cuda-graph-batch-sizes"]),
        ("4,9", 2, ["--cuda-graph-batch-sizes", 9, 8]),
        ("0", 2, ["--cuda-graph-batch-sizes", 0]),
    ],
)
def test_batch_sizes_of_graphs_reach_the_engine_or_are_refused(attnplug: Attnplug, spies, sizes, code, named):
    options = ("--max-batch", "8", "--cuda-graph-batch-sizes", sizes)
    outcome = attnplug("run", "--model", "tiny:llama", "--prompt", "x", *options)
    assert not missing_values(outcome.err, *named) and "Traceback" not in outcome.err
    assert outcome.code == code
    if spies:
        assert spies[0].options.cuda_graph_batch_sizes == (1, 2)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        ("16,64", ["nothing runs"]),
        ("16;64", ["--cuda-graph-prefill-sizes", "16;64"]),
        ("4,99", ["--cuda-graph-prefill-sizes", 99, 64]),
    ],
)
def test_sizes_of_captured_prefills_reach_the_engine_or_are_refused(attnplug: Attnplug, spies, sizes, named):
    options = ("--chunked-prefill-size", "64", "--cuda-graph-prefill-sizes", sizes)
    outcome = attnplug("run", "--model", "tiny:llama", "--prompt", "x", *options)
    assert not missing_values(outcome.err, *named) and "Traceback" not in outcome.err and outcome.code == 2
    assert [spy.options.cuda_graph_prefill_sizes for spy in spies] == ([(16, 64)] if sizes == "16,64" else [])


def test_every_option_of_embed_reaches_the_embedder(attnplug: Attnplug, spies):
    given = ("--pooling", "mean", "--no-normalize", "--prompt-name", "query", "--batch-invariant")
    outcome = attnplug("embed", *SHARED, *given)
    assert "nothing runs" in outcome.err
    (embedder,) = spies
    assert (embedder.model, values(embedder.options)) == ("tiny:llama", EMBED)


def test_an_embedder_is_built_by_the_same_options_as_an_engine():
    """Options that both have; without prefix hits."""
    engine = EmbedOptions(**EMBED).for_engine()
    assert {name: value for name, value in values(engine).items() if name in FIELDS} == FIELDS
    assert engine.batch_invariant
    assert engine.prefix_cache is False
