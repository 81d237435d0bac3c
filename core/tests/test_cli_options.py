"""Every option of ``explain`` arrives. Fields are enumerated: none is left at its default unnoticed."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

import pytest

from attnplug import DType, ExtendPath, GraphLevel, Problem, Role, UsageError
from attnplug.cli.explain import ExplainOptions
from attnplug.cli.options import option
from attnplug.host import load_model
from attnplug_testing.command import Attnplug

ROLES = {Role.PREFILL: "two", Role.DECODE: "three", Role.LINEAR: "four"}
GIVEN = (
    *("--attention-backend", "one", "--device", "cuda", "--dtype", "bf16", "--kv-dtype", "fp8", "--page-size", "16"),
    *(
        "--backend-option",
        "one.split=2",
        *(word for role, name in ROLES.items() for word in (option(role.setting), name)),
    ),
)
SHARED: dict[str, Any] = {
    "attention_backend": "one",
    "roles": ROLES,
    "device": "cuda",
    "dtype": "bf16",
    "kv_dtype": "fp8",
    "page_size": 16,
    "backend_option": ["one.split=2"],
}
EXPLAIN = {
    **SHARED,
    "roles": {**ROLES, Role.DRAFT: "five"},
    "model": "tiny:llama",
    "sm": 90,
    "speculative_tokens": 3,
    "speculative_topk": 4,
    "tensor_parallel": 2,
    "mla_extend": "absorbed",
    "cuda_graph": "uniform",
    "host": "vllm",
    "index_dtype": "fp8",
    "enable_hisparse": True,
}


@pytest.mark.parametrize(
    ("command", "kind", "arguments", "expected"),
    [
        ("explain", ExplainOptions, ("--model", "tiny:llama", "--sm", "90", "--speculative-tokens", "3",
         "--speculative-topk", "4", "--tensor-parallel", "2", "--cuda-graph", "uniform", "--host", "vllm",
         "--mla-extend", "absorbed",
         "--draft-attention-backend", "five", "--index-dtype", "fp8", "--enable-hisparse"), EXPLAIN),
    ],
    ids=["explain"],
)  # fmt: skip
def test_every_option_is_a_field_of_what_the_command_is_given(
    attnplug: Attnplug,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    kind: Any,
    arguments: tuple[str, ...],
    expected: Any,
) -> None:
    seen = []

    def spy(options: object, render: object, *, json: bool) -> int:
        seen.append(options)
        raise UsageError("nothing runs")

    monkeypatch.setattr("attnplug.cli.explain.explain_choice", spy)
    assert "nothing runs" in attnplug(command, *GIVEN, *arguments).err
    assert seen == [kind(**expected)]
    default = {field.name: field.default for field in fields(kind) if field.default is not MISSING}
    assert expected.keys() == {field.name for field in fields(kind)}
    assert [name for name in default if default[name] == expected[name]] == []


def test_every_field_of_explain_is_part_of_the_problem_or_of_the_request() -> None:
    options, model = ExplainOptions(**EXPLAIN), load_model("tiny:deepseek_v32")
    assert options.problem(model) == Problem(
        model=model,
        device="cuda",
        sm=90,
        dtype=DType.BFLOAT16,
        kv_dtype=DType.FLOAT8_E4M3,
        page_size=16,
        cuda_graph=GraphLevel.UNIFORM,
        speculative_tokens=3,
        speculative_topk=4,
        tensor_parallel=2,
        index_dtype=DType.FLOAT8_E4M3,
        coordinator="hisparse",
        mla_extend=ExtendPath.ABSORBED,
    )
    request = options.request()
    assert (request.attention, request.roles, request.options) == ("one", EXPLAIN["roles"], {"one": {"split": "2"}})
